"""A supervised job of four ranks that is disturbed by faults, one after the other (for
benchmarks.recovery).

`DisturbedJob.run` starts `hybridpar train`, waits for the moment of each fault, sends its signal,
and notes when the fault was noticed, who was blamed, and when and from which step training resumed.
Processes of a job are found by an environment variable, so a process that is left over is seen
whoever its parent is now. Linux only.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from hybridpar import flight
from hybridpar.checkpoint.folders import folder_of, half_written, saved_steps
from hybridpar.checkpoint.format.manifest import read_manifest
from hybridpar.checkpoint.load import check_files
from hybridpar.config import Config
from hybridpar.errors import CheckpointError
from hybridpar.train.faults.inject import parse_fault
from hybridpar.train.folder import flight_path
from hybridpar.train.reporting.run_metrics import last_step, read_metrics

T = TypeVar("T")
RANKS = 4
STRETCH = 10
"""Steps between two checkpoints."""
SLOW_S = 1.0
GRACE_S = 20.0
"""How long the ranks of a supervisor that has ended may live beyond faults.timeout_s."""
SLACK_S = 10.0
"""How much later than its limit a fault may be noticed on a busy machine."""
AGAIN_S = 240.0
"""How long the next moment of a job may take to come."""
END_S = 180.0
PAUSE_S = 0.3
"""How long a supervisor is stopped before it is killed."""
SECOND_SIGNAL_S = 2.0
POLL_S = 0.02
MAX_REPAIRS = 5
MARK = "HYBRIDPAR_RECOVERY_JOB"
"""The environment variable whose value all processes of a job have."""
INJECTED = "injected"
IMPORTS = "imports"
SETUP = "set-up"
STEP = "a step"
SAVE = "a save"
STARTS = (IMPORTS, SETUP)
TERMINATED = 128 + signal.SIGTERM
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    signal: A key of SIGNALS, or what `--inject` calls the fault. target: "rank", "supervisor",
    "supervisor of a stopped rank", or INJECTED. moment: When the fault comes. failure: The
    supervisor's word for the failure; empty if the supervisor reports none.
    """

    signal: str
    target: str
    moment: str
    failure: str = ""

    @property
    def name(self) -> str:
        if self.target == INJECTED:
            return f"inject {self.signal}"
        return f"{self.signal} {self.target} in {self.moment}"

    @property
    def ends_supervisor(self) -> bool:
        return self.target.startswith("supervisor")

    @property
    def ends_ranks(self) -> bool:
        return bool(self.failure) or self.ends_supervisor

    @property
    def stretches(self) -> int:
        """Stretches of the job until the next fault may come."""
        if self.moment in STARTS:
            return 0
        return 2 if self.moment == SAVE or self.ends_supervisor else 1


@dataclass(frozen=True)
class Fault:
    """A fault of one job: a signal `delay_s` after its moment at `step`, or the `text` of an
    injected fault."""

    kind: Kind
    rank: int
    step: int
    delay_s: float = 0.0
    text: str = ""


class StuckError(Exception):
    """An event that was waited for did not happen."""


@dataclass
class DisturbedJob:
    """One training job: its processes, its output with times, and what came of its faults."""

    folder: Path
    config_path: Path
    config: Config
    drawn: Sequence[Fault]
    lines: list[tuple[float, str]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    looked_at: set[tuple[int, int]] = field(default_factory=set)
    damaged: list[str] = field(default_factory=list)
    left_over: int = 0
    """Processes that outlived their limit."""

    def __post_init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._old: set[int] = set()  # pids of ranks before the last fault
        self._seen_failures = 0
        self._repairs = 0
        self._over = threading.Event()

    # -- running

    def run(self) -> None:
        """Run the job with its faults to its end. Afterwards no process of the job is left."""
        looker = threading.Thread(target=self._look, daemon=True)
        looker.start()
        try:
            self._start()
            for fault, following in zip_longest(self.drawn, self.drawn[1:]):
                self._suffer(fault, following)
            self._until(
                lambda: self._process.poll() is not None, END_S, "the end of the job", may_end=True
            )
            if self._process.returncode:
                self.wrong.append(f"exit code {self._process.returncode}")
            self._take_failures(self.wrong, expected=0)
            self._await_nobody(self.wrong)
        except StuckError as error:
            self.wrong.append(str(error))
        finally:
            self._over.set()
            looker.join()
            self._kill_all()

    def _start(self) -> None:
        texts = [fault.text for fault in self.drawn if fault.kind.target == INJECTED]
        command = [
            sys.executable,
            "-m",
            "hybridpar",
            "train",
            str(self.config_path),
            "--ranks",
            str(RANKS),
            "--run.name",
            self.folder.name,
        ]
        if texts:
            command += ["--inject", *texts]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self._token},
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append((time.time(), line.rstrip()))

    def _suffer(self, fault: Fault, following: Fault | None) -> None:
        """Let a fault happen and see what comes of it. A job that gets stuck is started again."""
        entry: dict[str, Any] = {"fault": fault.text, "kind": fault.kind.name, "wrong": []}
        self.faults.append(entry)
        try:
            if fault.kind.target == INJECTED:
                self._await_injected(fault, entry)
            else:
                self._await_moment(fault)
                self._send(fault, entry)
            if fault.kind.ends_supervisor:
                self._await_nobody(entry["wrong"], entry)
                code = self._process.returncode
                if (
                    fault.kind.target == "supervisor"
                    and fault.kind.signal == "terminate"
                    and code != TERMINATED
                ):
                    entry["wrong"].append(f"exit code {code}")
                self._take_failures(entry["wrong"], expected=None)
                self._start()
            elif fault.kind.failure:
                self._await_failure(fault, entry)
            if fault.kind.ends_ranks and (following is None or following.kind.moment not in STARTS):
                self._await_training(entry, following)
        except StuckError as error:
            entry["wrong"].append(str(error))
            self._repairs += 1
            if self._repairs > MAX_REPAIRS:
                raise
            self._kill_all()
            self._take_failures(entry["wrong"], expected=None)
            self._start()
        print(f"{self.folder.name}: {json.dumps(entry)}", flush=True)

    def _until(
        self, condition: Callable[[], T], limit_s: float, what: str, may_end: bool = False
    ) -> T:
        """Wait for a condition and return its value.

        Raises: StuckError after `limit_s`, or if the supervisor ends before and may not.
        """
        end = time.monotonic() + limit_s
        while True:
            has_ended = self._process.poll() is not None
            if found := condition():
                return found
            if has_ended and not may_end:
                raise StuckError(
                    f"waited for {what}; the command ended with exit code "
                    f"{self._process.returncode}"
                )
            if time.monotonic() > end:
                raise StuckError(f"waited for {what}; not within {limit_s:g} s")
            time.sleep(POLL_S)

    # -- moments and faults

    def _await_moment(self, fault: Fault) -> None:
        before = half_written(self._checkpoints)

        def has_come() -> bool:
            ranks = self._new_ranks()
            record = self._record(fault.rank, ranks)
            if fault.kind.moment == IMPORTS:
                return fault.rank in ranks and record is None
            if record is None or fault.kind.moment == SETUP:
                return record is not None
            if fault.kind.moment == SAVE:
                return any(
                    int(name[6:-5]) >= fault.step
                    for name, _ in half_written(self._checkpoints) - before
                )
            return record.step >= fault.step

        self._until(has_come, AGAIN_S, "the moment of the fault")
        time.sleep(fault.delay_s)

    def _send(self, fault: Fault, entry: dict[str, Any]) -> None:
        """Send the signal of a fault, and note in which state the job was."""
        ranks = self._new_ranks()
        record = self._record(fault.rank, ranks)
        entry |= {"saved": self._saved(), "was": "importing" if record is None else record.phase}
        if fault.kind.moment == SAVE:
            entry["published"] = not half_written(self._checkpoints)
        pid = self._process.pid
        if fault.kind.target == "rank":
            if fault.rank not in ranks:
                raise StuckError(f"rank {fault.rank} has no process")
            pid = ranks[fault.rank]
        elif fault.kind.target != "supervisor":
            os.kill(ranks[fault.rank], signal.SIGSTOP)
            time.sleep(PAUSE_S)
        entry["time"] = time.time()
        os.kill(pid, SIGNALS[fault.kind.signal])
        if fault.kind.ends_supervisor:
            self._end_supervisor(fault, entry)
        entry["done"] = max(0, last_step(self.folder / "metrics.jsonl"))
        entry["limit_s"] = 0.0
        if fault.kind.signal == "stop":
            record = self._record(fault.rank, ranks)
            entry["limit_s"] = self.config.faults.start_timeout_s
            if record is not None and record.limit_s:
                entry["limit_s"] = record.limit_s
        self._old |= set(ranks.values())

    def _end_supervisor(self, fault: Fault, entry: dict[str, Any]) -> None:
        if fault.kind.signal == "stop":
            time.sleep(PAUSE_S)
            entry["time"] = time.time()
            self._process.kill()
        if fault.kind.signal == "terminate" and fault.kind.target != "supervisor":
            time.sleep(SECOND_SIGNAL_S)
            self._process.terminate()

    def _await_injected(self, fault: Fault, entry: dict[str, Any]) -> None:
        parsed = parse_fault(fault.text, self.config)
        path = self.folder / "injected" / parsed.name
        ranks: dict[int, int] = {}

        def mark() -> dict[str, Any] | None:
            ranks.update(self._new_ranks())
            with suppress(OSError, ValueError):
                return dict(json.loads(path.read_text()))
            return None

        found = self._until(mark, AGAIN_S, "an injected fault")
        assert found is not None
        entry |= {
            "time": found["time"],
            "done": found["done"],
            "saved": max(found["saved"], default=0),
        }
        faults = self.config.faults
        longest = max(faults.timeout_s, faults.save_timeout_s)
        entry["limit_s"] = 0.0 if fault.kind.signal == "kill" else longest
        if fault.kind.ends_ranks:
            self._old |= set(ranks.values())

    # -- what comes of a fault

    def _await_failure(self, fault: Fault, entry: dict[str, Any]) -> None:
        # without a folder, the supervisor's note waits for the ranks that make it
        limit_s = entry["limit_s"] + (SLACK_S if self.folder.is_dir() else AGAIN_S)
        try:
            failure = self._until(
                lambda: self._failures()[self._seen_failures :], limit_s, "its failure"
            )[0]
        except StuckError:
            if fault.kind.signal != "stop":
                raise
            entry["wrong"].append(f"was not noticed within {limit_s:g} s")
            pid = self._ranks()[fault.rank]
            self._old.clear()  # the same ranks go on
            os.kill(pid, signal.SIGCONT)
            return
        self._seen_failures += 1
        entry |= {"noticed_s": round(failure["time"] - entry["time"], 3), "said": failure["text"]}
        if "link" in fault.kind.signal:
            if not set(re.findall(r"\d+", fault.text)[:2]) <= _suspects(failure["text"]):
                entry["wrong"].append(f"another link is blamed: {failure['text']}")
        elif failure["kind"] != fault.kind.failure:
            entry["wrong"].append(f"called {failure['kind']}: {failure['text']}")
        elif failure["rank"] != fault.rank:
            entry["wrong"].append(f"rank {failure['rank']} is blamed: {failure['text']}")

    def _await_nobody(self, wrong: list[str], entry: dict[str, Any] | None = None) -> None:
        """Wait until no process of the job is left. Those that outlive the limit are counted and
        killed."""
        limit_s = self.config.faults.timeout_s + GRACE_S
        began = time.time() if entry is None else entry["time"]
        end = began + limit_s
        while (left := self._processes()) and time.time() < end:
            time.sleep(POLL_S)
            self._process.poll()  # so that it is no zombie
        if left:
            self.left_over += len(left)
            wrong.append(f"left over after {limit_s:g} s: {', '.join(map(_describe, left))}")
            self._kill_all()
        elif entry is not None:
            entry["gone_s"] = round(time.time() - began, 3)
        self._process.wait()

    def _await_training(self, entry: dict[str, Any], following: Fault | None) -> None:
        """Wait until all ranks train again, and check from which step they do."""
        mark = None
        if following is not None and following.kind.target == INJECTED:
            mark = self.folder / "injected" / parse_fault(following.text, self.config).name

        def trains() -> bool:
            records = [self._record(rank, self._new_ranks()) for rank in range(RANKS)]
            phases = {record.phase for record in records if record is not None}
            is_training = None not in records and phases <= {
                "training",
                flight.EVALUATING,
                "saving",
            }
            return is_training or (mark is not None and mark.exists())

        self._until(trains, AGAIN_S, "training")
        self._take_failures(entry["wrong"], expected=0)
        entry["again_s"] = round(time.time() - entry["time"], 3)
        resumed = 0
        for when, line in self.lines:
            match = re.search(r"resuming after step (\d+)", line)
            if match and when > entry["time"]:
                resumed = int(match[1])
        if any(text.startswith("was not noticed") for text in entry["wrong"]):
            return
        entry["lost_steps"] = max(0, entry["done"] - resumed)
        if resumed < entry["saved"]:
            entry["wrong"].append(f"went on after step {resumed}, {entry['saved']} was saved")
        if (
            entry["lost_steps"] > 2 * STRETCH
        ):  # a save may have been under way, or the last one was made to fail
            entry["wrong"].append(f"{entry['lost_steps']} steps lost")

    def _take_failures(self, wrong: list[str], expected: int | None) -> None:
        """Take what the supervisor has reported beyond the failures that were expected (None:
        any)."""
        failures = self._failures()[self._seen_failures :]
        self._seen_failures += len(failures)
        if expected is not None:
            wrong += [
                f"a failure that no fault has caused: {failure['text']}" for failure in failures
            ]

    # -- the state of the job

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _saved(self) -> int:
        return max(saved_steps(self._checkpoints), default=0)

    def _failures(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "failures.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def _processes(self) -> list[int]:
        """The pids of all processes of the job."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and f"{MARK}={self._token}" in _environment(int(folder.name)):
                found.append(int(folder.name))
        return found

    def _ranks(self) -> dict[int, int]:
        """The pids of the supervisor's ranks, by rank."""
        found = {}
        children: list[str] = []
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            with suppress(OSError):
                children += path.read_text().split()
        for pid in map(int, children):
            for text in _environment(pid):
                if text.startswith("RANK="):
                    found[int(text[5:])] = pid
        return found

    def _new_ranks(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._ranks().items() if pid not in self._old}

    def _record(self, rank: int, ranks: dict[int, int]) -> flight.Record | None:
        """The flight record of a rank's process; None before there is one."""
        record = flight.read(flight_path(self.folder, rank))
        return (
            record
            if record is not None and record.who.get("pid") == ranks.get(rank, math.nan)
            else None
        )

    def _kill_all(self) -> None:
        while left := self._processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self._process.wait()

    # -- what it has written

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for step in saved_steps(self._checkpoints):
                folder = folder_of(self._checkpoints, step)
                with suppress(FileNotFoundError):
                    key = step, folder.stat().st_ino
                    if key not in self.looked_at:
                        self._check(folder)
                        self.looked_at.add(key)

    def _check(self, folder: Path) -> None:
        try:
            check_files(folder, read_manifest(folder))
        except CheckpointError as error:
            if folder.exists():  # else it has been removed meanwhile
                self.damaged.append(str(error))

    def steps(self) -> list[tuple[Any, ...]]:
        """Return the results of each step."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return [
            (row["step"], row["loss"], row["grad_norm"], row.get("skipped"))
            for row in rows
            if "loss" in row
        ]

    def validations(self) -> list[tuple[int, float]]:
        """The steps and losses of all evaluations."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]

    def files(self) -> dict[str, bytes]:
        """The files of the last checkpoint."""
        folder = folder_of(self._checkpoints, self._saved())
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def _environment(pid: int) -> list[str]:
    """The environment of a process; empty if it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _state(pid: int) -> str:
    """The state of a process, as in /proc/PID/stat."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _describe(pid: int) -> str:
    rank = next((text for text in _environment(pid) if text.startswith("RANK=")), "no rank")
    return f"pid {pid} ({rank}, state {_state(pid)})"


def _suspects(text: str) -> set[str]:
    """The ranks at both ends of a link that is blamed, or those in a circle, where the link is one
    of two suspects."""
    link = re.match(r"the link between rank (\d+) and rank (\d+)", text)
    if link is not None:
        return set(link.groups())
    circle = re.match(r"ranks ([\d, ]+) wait for each other in a circle", text)
    return set(circle[1].split(", ")) if circle is not None else set()
