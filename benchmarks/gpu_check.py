"""Run the checks that need a GPU, within the minutes that one is at hand. `scripts/gpu_check.sh`
starts this.

A check is a list of steps. Each step is a process with a limit, so a step that fails or hangs costs
the others nothing. Steps come in groups, which run one after another. A group has a limit, too: it
ends, at the latest, when the limits of all groups up to it have passed. What one group leaves of
its time is the next one's. Only tests run beside each other; a step that measures time runs alone.

    FOLDER/gpu_check_1.log            everything that the steps printed, each line behind the name
                                      of its step
    FOLDER/gpu_check_1_h100.json      the report: GPU, versions, commit, backends of each operator,
                                      outcome of each step
    FOLDER/gpu_single_.._h100.json    a result of benchmarks.single or benchmarks.gpu_ops

This module imports neither torch nor hybridpar: the report must be on disk before the next step
begins, at no cost. What needs torch is `benchmarks.gpu_environment`, which runs as the first step.

Without a GPU this is a rehearsal: every step runs with the same options on tiny models, tests of
NCCL run over Gloo, and tests that need a GPU are collected. A selection of tests that is empty is
an error in both cases.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STOPPED = 3
"""Exit status of the first step if nothing should be measured in this environment."""
MIN_STEP_S = 10
"""A step that has fewer seconds left is not started."""
PR_SET_CHILD_SUBREAPER = 36
"""Option of Linux's prctl: orphans of this process's descendants become its children."""
GRACE_S = 5
"""Seconds between SIGTERM and SIGKILL for a step that has passed its limit."""
CPU_SLOWDOWN = 10
"""Factor of all limits in a rehearsal."""
PEER = "HF autocast gelu_pytorch_tanh compiled"
"""The peer whose numerics are nearest to ours, under torch.compile."""
LAUNCH_TESTS = "tests/train/launching/test_nccl_launch.py"
TINY_SHAPES = {"bert_large": "tiny_bert"}
"""Shapes that stand for others in a rehearsal. All others are `tiny`."""

Command = list[str]


@dataclass(frozen=True)
class Context:
    """Settings that commands depend on.

    Args:
        device: "cuda", or "cpu" for a rehearsal.
        card: End of the names of result files, such as "h100"; "cpu" in a rehearsal.
        out: Folder of the results.
        python: The interpreter.
        cores: Number of cores that this process may use.
        plugins: Optional plugins of pytest that are installed, by module: "xdist",
            "pytest_timeout".
        environment_file: Where the first step writes what it found.
    """

    device: str
    card: str
    out: Path
    python: str = sys.executable
    cores: int = 1
    plugins: frozenset[str] = frozenset()
    environment_file: Path = Path("environment.json")

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Step:
    """One check.

    Args:
        name: Name on the command line, in the log and in the report.
        limit: Most seconds that the step may take.
        commands: Returns the commands of the step, run in order until one fails.
        result: Name of the result file, without the card and ".json". Empty if there is none.
        writes_table: Whether the step also writes measured.json.
        runs_tests: Whether the commands are pytest's. If so, at least one test must pass or be
            collected.
        needs: A program without which the step is left out on a GPU.
        environment: Additional environment variables.
    """

    name: str
    limit: int
    commands: Callable[[Context], list[Command]]
    result: str = ""
    writes_table: bool = False
    runs_tests: bool = False
    needs: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Steps of one call that share a limit.

    Args:
        call: Number of the call, 1 to 3. A call leaves at most eight files.
        limit: Seconds that the group adds to the time by which it must have ended.
        steps: In order of importance.
        is_parallel: Whether the steps run beside each other. For tests alone, which nobody times.
    """

    call: int
    limit: int
    steps: tuple[Step, ...]
    is_parallel: bool = False


# -- commands


def environment_step() -> Step:
    """Create the step that describes GPU, versions and backends, and stops the check where
    something is missing."""

    def commands(context: Context) -> list[Command]:
        return [[context.python, "-m", "benchmarks.gpu_environment", str(context.environment_file)]]

    return Step("environment", 60, commands)


def training(
    name: str, limit: int, result: str, shape: str, rounds: int, *options: str, peer: str = "none"
) -> Step:
    """Create a step that measures training steps of one shape in bf16, of ours alone or beside one
    peer."""

    def commands(context: Context) -> list[Command]:
        measured_shape = TINY_SHAPES.get(shape, "tiny") if context.is_rehearsal else shape
        return [
            [
                context.python,
                "-m",
                "benchmarks.single",
                "--device",
                context.device,
                "--shapes",
                measured_shape,
                "--dtypes",
                "bf16",
                "--threads",
                "1",
                "--rounds",
                str(rounds),
                "--compile",
                "--profile",
                "--peers",
                peer,
                "--name",
                f"{result}_{context.card}",
                "--out",
                str(context.out),
                *options,
            ]
        ]

    return Step(name, limit, commands, result)


def operators(
    name: str,
    limit: int,
    result: str,
    rounds: int,
    sizes: Sequence[str],
    *options: str,
    writes_table: bool = False,
) -> Step:
    """Create a step that measures operators in bf16 at some sizes.

    `writes_table`: also write the table that `auto` goes by, as measured.json beside the results.
    """

    def commands(context: Context) -> list[Command]:
        table = ["--table", str(context.out / "measured.json")] if writes_table else []
        measured_sizes = ["tiny"] if context.is_rehearsal else sizes
        return [
            [
                context.python,
                "-m",
                "benchmarks.gpu_ops",
                "--device",
                context.device,
                "--sizes",
                *measured_sizes,
                "--dtypes",
                "bf16",
                "--rounds",
                str(rounds),
                "--name",
                f"{result}_{context.card}",
                "--out",
                str(context.out),
                *table,
                *options,
            ]
        ]

    return Step(name, limit, commands, result, writes_table)


def gpu_tests(
    name: str,
    limit: int,
    files: Callable[[], list[str]],
    *,
    keyword: str = "",
    workers: int = 1,
    test_limit: int = 100,
    has_cpu_tests: bool = False,
    tool: str = "",
) -> Step:
    """Create a step that runs tests marked `gpu`.

    A rehearsal collects these tests. If the same files have tests over Gloo, it also runs those.

    Args:
        name: Name of the step.
        limit: Most seconds of the step.
        files: Returns the test files, relative to the root.
        keyword: A pytest -k expression.
        workers: Number of pytest-xdist workers, if that is installed.
        test_limit: Most seconds of one test that has no limit in its file, if pytest-timeout is
            installed.
        has_cpu_tests: Whether the files' other tests do the same on CPUs.
        tool: A tool of compute-sanitizer that watches the tests.
    """

    def commands(context: Context) -> list[Command]:
        selected = ["-p", "no:cacheprovider", "--continue-on-collection-errors", *files()]
        if keyword:
            selected += ["-k", keyword]
        if "pytest_timeout" in context.plugins:
            selected += [
                "--timeout",
                str(test_limit * (CPU_SLOWDOWN if context.is_rehearsal else 1)),
            ]
        if context.is_rehearsal:
            found = [[context.python, "-m", "pytest", "-m", "gpu", "--collect-only", *selected]]
            if has_cpu_tests:
                found.append(
                    [
                        context.python,
                        "-m",
                        "pytest",
                        "-vv",
                        "--tb=short",
                        "-m",
                        "not gpu",
                        *selected,
                    ]
                )
            return found
        options = ["-vv", "--tb=short", "-m", "gpu"]
        number = min(workers, context.cores)
        if "xdist" in context.plugins and number > 1:
            options += ["-n", str(number), "--dist", "worksteal"]
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] if tool else []
        return [[*sanitizer, context.python, "-m", "pytest", *options, *selected]]

    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool else {}
    return Step(
        name,
        limit,
        commands,
        runs_tests=True,
        needs="compute-sanitizer" if tool else "",
        environment=environment,
    )


# -- selections of tests


def test_files(*folders: str) -> list[str]:
    """Return the files with GPU tests under these folders of tests/, sorted.

    Raises: FileNotFoundError if there is no such folder, or no file in it.
    """
    marked = re.compile(r"mark\.gpu|import places")
    found = []
    for folder in folders:
        inside = list((ROOT / "tests" / folder).rglob("test_*.py"))
        if not inside:
            raise FileNotFoundError(f"tests/{folder}: has no tests. Name a folder of tests/")
        found += inside
    return sorted(str(path.relative_to(ROOT)) for path in found if marked.search(path.read_text()))


test_files.__test__ = False  # type: ignore[attr-defined]  # pytest: this is no test


def launch_files() -> list[str]:
    """Return the file whose tests start ranks by `hybridpar train`."""
    return [LAUNCH_TESTS]


def run_files() -> list[str]:
    """Return the files that test whole runs, without LAUNCH_TESTS."""
    return [path for path in test_files("train") if path != LAUNCH_TESTS]


def starts_nccl(path: str) -> bool:
    """Return whether a test file starts ranks that talk over NCCL, beside which nothing else may
    run."""
    return 'backend="nccl"' in (ROOT / path).read_text()


def graph_files() -> list[str]:
    """Return the files with tests of CUDA graphs in one process."""
    return [path for path in test_files("runtime") if not starts_nccl(path)]


def nccl_files() -> list[str]:
    """Return the files that test NCCL without the launcher. Tests of CUDA graphs come first."""
    return [*filter(starts_nccl, test_files("runtime")), *run_files()]


def operator_files() -> list[str]:
    """Return all other files with GPU tests."""
    others = {*test_files("train", "runtime"), LAUNCH_TESTS}
    return [path for path in test_files(".") if path not in others]


def sanitized_files() -> list[str]:
    """Return the files whose operators compute-sanitizer watches."""
    return [
        f"tests/ops/test_{name}.py"
        for name in ("sparse", "largest", "quantize", "embedding", "fp8", "backends")
    ]


SANITIZED = (
    "cuda and not held and ("
    "test_sparse and 4081 and triton"
    " or (test_largest or test_quantize) and same_bytes and float32"
    " or test_embedding and bfloat16 and float32 and triton and (odd or few)"
    " or 4x2050 and bfloat16"
    " or test_fp8 and (300 or 2064 or 272)"
    " or against_float64 and bfloat16 and not no-bias"
    " and (3x7x41 or 5x6 or 5x7 and causal-padded-dropout or 300x33-dropout or "
    "5x8-3-groups-rotary))"
)
"""Every operator once, at a few small shapes. compute-sanitizer takes minutes for all of them."""

DROPOUT = ("--dropout", "0.1")
HEAD_DIMENSIONS = ("d72", "d80", "d96", "d64-grouped", "d128-grouped", "d64", "d256")

GROUPS: tuple[Group, ...] = (
    Group(1, 40, (environment_step(),)),
    Group(1, 25, (training("smoke", 60, "gpu_smoke", "345M", 3, *DROPOUT, "--graphs"),)),
    # A step may take more than its share if those before it took less.
    Group(
        1,
        100,
        (
            training("1.3B-dropout", 45, "gpu_single_1.3B_dropout", "1.3B", 7, *DROPOUT),
            training("1.3B", 40, "gpu_single_1.3B", "1.3B", 7),
            training("345M-dropout", 35, "gpu_single_345M_dropout", "345M", 7, *DROPOUT),
            training("1.3B-16", 50, "gpu_single_1.3B_16", "1.3B", 3, "--microbatches", "16"),
            training("fp8", 45, "gpu_single_1.3B_fp8", "1.3B", 7, "--fp8"),
        ),
    ),
    # Ranks that share a GPU take turns on it, so these run alone: three grids, then graphs with tp
    # and with pp.
    Group(1, 115, (gpu_tests("nccl", 130, launch_files, test_limit=40, has_cpu_tests=True),)),
    Group(
        1,
        95,
        (
            gpu_tests("graphs", 150, graph_files, workers=3, test_limit=60),
            gpu_tests(
                "moves",
                150,
                run_files,
                keyword="not nccl and not every_grid",
                workers=4,
                test_limit=90,
            ),
            gpu_tests("operators", 150, operator_files, workers=8, test_limit=60),
        ),
        is_parallel=True,
    ),
    # The last one takes what the others leave.
    Group(
        1, 25, (gpu_tests("memcheck", 150, sanitized_files, keyword=SANITIZED, tool="memcheck"),)
    ),
    # A trained 1.3B beside its peer takes 70 GiB.
    Group(
        2,
        160,
        (
            training(
                "1.3B-peer", 110, "gpu_single_1.3B_dropout_peer", "1.3B", 5, *DROPOUT, peer=PEER
            ),
            training(
                "345M-peer", 80, "gpu_single_345M_dropout_peer", "345M", 7, *DROPOUT, peer=PEER
            ),
        ),
    ),
    Group(
        2, 160, (gpu_tests("nccl-more", 200, nccl_files, keyword="nccl or graph_sums", workers=2),)
    ),
    Group(
        2,
        160,
        (
            operators(
                "attention-table",
                90,
                "gpu_ops_attention",
                3,
                HEAD_DIMENSIONS,
                "--ops",
                "causal attention",
                writes_table=True,
            ),
            operators("operator-table", 110, "gpu_ops", 5, ("1.3B",), writes_table=True),
        ),
    ),
    Group(
        3, 100, (gpu_tests("gloo", 130, run_files, keyword="every_grid and not nccl", workers=8),)
    ),
    Group(3, 40, (training("bert-graphs", 60, "gpu_single_bert", "bert_large", 5, "--graphs"),)),
    Group(
        3,
        200,
        (
            training("345M-without-dropout", 110, "gpu_single_345M_peer", "345M", 9, peer=PEER),
            training("1.3B-without-dropout", 130, "gpu_single_1.3B_peer", "1.3B", 7, peer=PEER),
        ),
    ),
    Group(3, 80, (operators("operators-large", 90, "gpu_ops_large", 5, ("large",)),)),
    Group(
        3, 80, (gpu_tests("racecheck", 120, sanitized_files, keyword=SANITIZED, tool="racecheck"),)
    ),
)

# -- running

_OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped"}
_XDIST_LINE = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (tests/.*)")
_PYTEST_LINE = re.compile(r"(tests/\S+?::.*?) (PASSED|FAILED|ERROR|SKIPPED)( \(.*\))? +\[ *\d+%\]$")
_COLLECTED_LINE = re.compile(r"tests/\S+?::.*")


@dataclass
class Outcome:
    """The result of a step.

    Args:
        step: Name of the step.
        status: "passed", "failed", "cut off" at its limit, or "left out".
        seconds: Wall time.
        limit: Seconds that the step was given.
        note: Why it was left out, or what a command said last; the measured numbers of a training
            step.
        exit_status: Of the command that ran last; None if none ran.
        tests: Number of tests by outcome: "passed", "failed", "errors", "skipped", "collected".
        failed_tests: Node ids.
        collected_tests: Node ids; not in the report.
    """

    step: str
    status: str = "left out"
    seconds: float = 0.0
    limit: int = 0
    note: str = ""
    exit_status: int | None = None
    tests: dict[str, int] = field(default_factory=dict)
    failed_tests: list[str] = field(default_factory=list)
    collected_tests: set[str] = field(default_factory=set)

    def read(self, line: str, *, collects: bool) -> None:
        """Count the test that a line of pytest's output reports, if it reports one.

        `collects`: whether pytest was told to collect only, so that a line with a node id is a test
        found.
        """
        name = ""
        word = ""
        if match := _XDIST_LINE.match(line):
            word = match[1]
            name = match[2]
        elif match := _PYTEST_LINE.match(line):
            name = match[1]
            word = match[2]
        if word:
            kind = _OUTCOMES[word]
        elif collects and _COLLECTED_LINE.fullmatch(line):
            kind = "collected"
            self.collected_tests.add(line)
        else:
            return
        self.tests[kind] = self.tests.get(kind, 0) + 1
        if kind in ("failed", "errors"):
            self.failed_tests.append(name)

    def as_json(self) -> dict[str, Any]:
        """Return the step's entry in the report."""
        entry = dataclasses.asdict(self)
        del entry["collected_tests"]
        return entry


@dataclass
class Check:
    """Runs groups of steps and keeps the report on disk true.

    Args:
        groups: Chosen groups, with the chosen steps in them.
        out: Folder of log and report.
        stem: Begin of the names of log and report, such as "gpu_check_1".
        limit: Seconds for all groups together.
        cores: Number of cores that tests may use.
        begin: Monotonic time from which limits count.
    """

    groups: Sequence[Group]
    out: Path
    stem: str
    limit: float
    cores: int = 1
    begin: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: set[int] = field(default_factory=set)
    _killed: set[int] = field(default_factory=set)
    _not_ours: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="gpu_check_"))
        self._environment_file = self._scratch / "environment.json"
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / f"{self.stem}.log"
        self.log.write_text("")
        self.context = Context(
            "cpu", "cpu", self.out, cores=self.cores, environment_file=self._environment_file
        )
        self.variables = os.environ | {"PYTHONUNBUFFERED": "1"}

    @property
    def report(self) -> Path:
        return self.out / f"{self.stem}_{self.context.card}.json"

    def run(self) -> int:
        """Run all groups; returns the exit status: 0 if every step passed, `STOPPED` if the first
        one said stop."""
        adopt_orphans(True)
        self._not_ours = set(children())
        try:
            return self._run()
        finally:
            for group in set(self._running):
                self._kill(group)
            self._end_orphans()
            adopt_orphans(False)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _run(self) -> int:
        end = self.begin
        for group in self.groups:
            end += group.limit * self._slowdown
            if group.is_parallel:
                threads = [
                    threading.Thread(target=self._run_step, args=(step, end))
                    for step in group.steps
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self._end_orphans()
                continue
            for step in group.steps:
                outcome = self._run_step(step, end)
                self._end_orphans()
                if step.name == "environment" and (
                    not self.environment or outcome.exit_status == STOPPED
                ):
                    self.say("Stopped: nothing is measured in this environment.")
                    return STOPPED
        if self.context.is_rehearsal and tuple(self.groups) == GROUPS:
            self._rehearse_coverage(end)
        return 0 if all(outcome.status == "passed" for outcome in self.outcomes) else 1

    def _rehearse_coverage(self, end: float) -> None:
        """Collect all GPU tests. Each must be in the selection of some step, or nothing would ever
        run it."""
        selected = set[str]().union(*(outcome.collected_tests for outcome in self.outcomes))
        step = gpu_tests("all-tests", 60, lambda: ["tests"])
        outcome = self._run_step(step, end + step.limit * self._slowdown)
        outcome.failed_tests += sorted(outcome.collected_tests - selected)
        if outcome.failed_tests:
            outcome.status = "failed"
            outcome.note = f"{len(outcome.failed_tests)} GPU tests are in no step"
            self.write_report()

    @property
    def _slowdown(self) -> int:
        """Factor of limits. Before the first step has ended, only NVIDIA's tool tells whether there
        is a GPU."""
        has_gpu = not self.context.is_rehearsal or (
            not self.environment and shutil.which("nvidia-smi")
        )
        return 1 if has_gpu else CPU_SLOWDOWN

    def _run_step(self, step: Step, end: float) -> Outcome:
        outcome = Outcome(step.name)
        end = min(end, self.begin + self.limit * self._slowdown)
        allowed = int(min(step.limit * self._slowdown, end - time.monotonic()))
        outcome.limit = max(allowed, 0)
        lacks = step.needs and not self.context.is_rehearsal and shutil.which(step.needs) is None
        if lacks:
            outcome.note = f"no {step.needs} on this machine"
        elif allowed < MIN_STEP_S:
            outcome.note = f"{max(allowed, 0)} s left"
        else:
            if step.needs and shutil.which(step.needs) is None:
                self.say(f"{step.name}: no {step.needs} on this machine")
            begin = time.time()
            try:
                self._run_commands(step, outcome, time.monotonic() + allowed)
            except Exception as error:  # of this module; the other steps go on
                outcome.status = "failed"
                outcome.note = repr(error)
            if step.result:
                path = self.out / f"{step.result}_{self.context.card}.json"
                outcome.note = described(path, begin) or outcome.note
        if outcome.status == "left out":
            self.say(f"{step.name}: left out, {outcome.note}")
        if step.name == "environment" and self._environment_file.exists():
            self._read_environment()
        with self._lock:
            self.outcomes.append(outcome)
            self.write_report()
        return outcome

    def _run_commands(self, step: Step, outcome: Outcome, end: float) -> None:
        begin = time.monotonic()
        outcome.status = "passed"
        for command in step.commands(self.context):
            seconds = max(end - time.monotonic(), 1)
            outcome.exit_status = self._execute(step, command, seconds, outcome)
            if outcome.exit_status:
                is_cut_off = time.monotonic() >= end - 0.5
                outcome.status = "cut off" if is_cut_off else "failed"
                break
        outcome.seconds = round(time.monotonic() - begin, 1)
        wanted = "collected" if self.context.is_rehearsal else "passed"
        if step.runs_tests and outcome.status == "passed" and not outcome.tests.get(wanted):
            outcome.status = "failed"
            outcome.note = f"no test was {wanted}"

    def _execute(self, step: Step, command: Command, seconds: float, outcome: Outcome) -> int:
        """Run a command for at most `seconds`; returns its exit status, 124 or 137 if it was cut
        off."""
        # `timeout` makes a process group for the command and its ranks, and ends them all.
        limited = ["timeout", f"--kill-after={GRACE_S}", f"{seconds:.1f}", *command]
        process = subprocess.Popen(
            limited,
            cwd=ROOT,
            env=self.variables | step.environment,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._running.add(process.pid)
        counted = outcome if step.runs_tests else None
        reading = (step.name, process, counted, "--collect-only" in command)
        reader = threading.Thread(target=self._read, args=reading, daemon=True)
        reader.start()
        status = process.wait()
        self._kill(process.pid)
        reader.join(GRACE_S)
        return status

    def _read(
        self, name: str, process: subprocess.Popen[str], counted: Outcome | None, collects: bool
    ) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.rstrip()
            if counted is not None:
                counted.read(text, collects=collects)
            self.say(f"{name}: {text}")

    def _kill(self, group: int) -> None:
        """Kill all processes of a group. A rank that outlives its step would slow the next one."""
        self._running.discard(group)
        self._killed.add(group)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    def _end_orphans(self) -> None:
        """Kill processes that have outlived their step in sessions of their own, as ranks have."""
        while left := {
            process: group for process, group in children().items() if process not in self._not_ours
        }:
            for process, group in left.items():
                if group not in self._killed:
                    self.say(f"process {process} has outlived its step and is killed")
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)

    def _read_environment(self) -> None:
        self.environment = json.loads(self._environment_file.read_text())
        self.context = dataclasses.replace(
            self.context,
            device=self.environment["device"],
            card=self.environment["card"],
            plugins=frozenset(self.environment["plugins"]),
        )

    def say(self, line: str) -> None:
        """Print a line and append it to the log."""
        with self.log.open("a") as log:
            log.write(f"{line}\n")
        print(line, flush=True)

    def write_report(self) -> None:
        """Write the report of the steps so far."""
        known = (
            dict.fromkeys(("gpu", "torch", "cuda", "python", "commit", "backends"))
            | self.environment
        )
        bad = [outcome for outcome in self.outcomes if outcome.status != "passed"]
        report = known | {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "seconds": round(time.monotonic() - self.begin, 1),
            "limit": self.limit,
            "status": 1 if bad else 0,
            "steps": [outcome.as_json() for outcome in self.outcomes],
        }
        partial = self.report.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(self.report)

    def table(self) -> Iterator[str]:
        """Yield lines for people: failed tests, then each step's outcome."""
        for outcome in self.outcomes:
            for test in outcome.failed_tests:
                yield f"{outcome.step}: FAILED {test}"
        for outcome in self.outcomes:
            tests = ", ".join(f"{number} {kind}" for kind, number in outcome.tests.items())
            text = "; ".join(filter(None, (tests, outcome.note)))
            yield f"{outcome.step:<22}{outcome.status:<10}{outcome.seconds:6.1f} of {outcome.limit:>4} s  {text}"


def adopt_orphans(adopts: bool) -> None:
    """Have Linux make this process the parent of its descendants whose own parent ends; or end
    that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def children() -> dict[int, int]:
    """Return the numbers of this process's children, and of their process groups."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent, group = stat.read_text().rpartition(")")[2].split()[1:3]
            if int(parent) == os.getpid():
                found[int(stat.parent.name)] = int(group)
    return found


def described(path: Path, since: float) -> str:
    """Return the numbers of a result of benchmarks.single in one line; empty if the file is another
    or missing.

    `since`: the time from which on it was written. An older file is another check's.
    """
    if not path.exists() or path.stat().st_mtime < since - 1:
        return ""
    parts = []
    for case in json.loads(path.read_text())["cases"]:
        memory = case.get("peak_memory_gib", {})
        for side, speed in case.get("tokens_per_s", {}).items():
            numbers = [f"{speed:,.0f} tokens/s"]
            if side in case.get("mfu", {}):
                numbers.append(f"MFU {case['mfu'][side]:.3f}")
            if memory.get(side):
                numbers.append(f"{memory[side]} GiB")
            if side in case.get("graph_replays", {}):
                numbers.append(f"{case['graph_replays'][side]} replays")
            parts.append(f"{side} {', '.join(numbers)}")
    return "; ".join(parts)


# -- command line


def choose(words: Sequence[str], groups: Sequence[Group] = GROUPS) -> tuple[list[Group], str]:
    """Return the groups that words name, steps or numbers of calls, and the begin of their files'
    names.

    Order is the words' order. The environment comes first, as all other steps depend on it. No
    word: everything.
    Raises: SystemExit if a word names nothing.
    """
    names = [step.name for group in groups for step in group.steps]
    calls = sorted({str(group.call) for group in groups})
    chosen: list[Group] = []
    stem = "gpu_check"
    for word in words or calls:
        if word in calls:
            stem = f"gpu_check_{word}" if words else stem
            found = [group for group in groups if str(group.call) == word]
        elif word in names:
            found = [
                only(group, word) for group in groups if word in [step.name for step in group.steps]
            ]
        else:
            raise SystemExit(f"step = {word!r}: unknown. Valid: {', '.join([*calls, *names])}")
        chosen += [group for group in found if group not in chosen]
    first = [group for group in groups if group.steps[0].name == "environment"]
    return [*first, *(group for group in chosen if group not in first)], stem


def only(group: Group, name: str) -> Group:
    """Return the group with one of its steps, whose limit it takes if that is lower."""
    steps = tuple(step for step in group.steps if step.name == name)
    return dataclasses.replace(group, steps=steps, limit=min(group.limit, steps[0].limit))


def listing(groups: Sequence[Group] = GROUPS) -> Iterator[str]:
    """Yield the steps, their groups' limits, and the sum of each call, which is its longest
    duration."""
    for group in groups:
        separator = " | " if group.is_parallel else ", "
        names = separator.join(f"{step.name} ({step.limit} s)" for step in group.steps)
        yield f"call {group.call}  {group.limit:>4} s  {names}"
    for call in sorted({group.call for group in groups}):
        chosen, _ = choose([str(call)], groups)
        yield f"call {call}: {sum(group.limit for group in chosen)} s at most, the environment included"


def install_wheels(folder: Path, python: str) -> str:
    """Install the wheels of a folder into a temporary folder; returns that, or "" if there are
    none."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        return ""
    site = tempfile.mkdtemp(prefix="gpu_check_site_")
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        site,
    ]
    if subprocess.run([*command, *wheels]).returncode:
        print(f"{folder}: its wheels could not be installed, see above", flush=True)
    return site


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", help="folder of the results")
    parser.add_argument(
        "steps", nargs="*", help="names of steps, or 1, 2 or 3 for the steps of a call"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the steps, their limits, and the sum of each call",
    )
    args = parser.parse_args()
    if args.list:
        print(*listing(), sep="\n")
        return 0
    begin = time.monotonic()
    groups, stem = choose(args.steps)
    os.chdir(ROOT)
    site = install_wheels(Path(os.environ.get("WHEELS", ".whl")), sys.executable)
    paths = [str(ROOT), site, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    check = Check(
        groups,
        Path(args.out or "build/gpu_check").resolve(),
        stem,
        float(os.environ.get("LIMIT", "540")),
        len(os.sched_getaffinity(0)),
        begin,
    )
    status = check.run()
    print(*check.table(), sep="\n")
    print(f"{check.report}: status {status}", flush=True)
    if site:
        shutil.rmtree(site, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
