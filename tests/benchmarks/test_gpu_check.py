"""scripts/gpu_check.sh: its limits, its selections of tests, what it leaves on disk, and when it
stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_check, single
from benchmarks.common import SHAPES
from benchmarks.gpu_check import GROUPS, ROOT, Check, Context, Group, Outcome, Step, choose
from benchmarks.gpu_environment import card_of, reasons_to_stop
from benchmarks.gpu_ops import GPU_SIZES

ON_GPU = Context(
    "cuda", "h100", Path("out"), cores=16, plugins=frozenset({"xdist", "pytest_timeout"})
)
STEPS = [step for group in GROUPS for step in group.steps]
DEFAULT_LIMIT_S = 540
"""LIMIT, which leaves a minute of the ten that one command may take on a lent machine."""


@pytest.mark.parametrize(
    ("call", "limit_s"), [(1, 400), (2, DEFAULT_LIMIT_S), (3, DEFAULT_LIMIT_S)]
)
def test_a_call_ends_in_time_and_leaves_eight_files_at_most(call: int, limit_s: int) -> None:
    chosen, _ = choose([str(call)])
    total = sum(group.limit for group in chosen)
    assert total <= limit_s
    listed = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--list"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"call {call}: {total} s at most" in listed.stdout
    results = {step.result for group in chosen for step in group.steps if step.result}
    table = any(step.writes_table for group in chosen for step in group.steps)
    assert len(results) + table + len(("log", "report")) <= 8


def test_important_checks_come_first_and_timed_ones_run_alone() -> None:
    first = [step.name for group in GROUPS for step in group.steps if group.call == 1]
    assert first[:7] == [
        "environment",
        "smoke",
        "1.3B-dropout",
        "1.3B",
        "345M-dropout",
        "1.3B-16",
        "fp8",
    ]
    assert first[7] == "nccl"
    assert first[-1] == "memcheck"
    second = [step.name for group in GROUPS for step in group.steps if group.call == 2]
    assert second[:3] == ["1.3B-peer", "345M-peer", "nccl-more"]
    for group in GROUPS:
        if group.is_parallel:
            assert all(step.runs_tests and "nccl" not in step.name for step in group.steps)


def values(step: Step, option: str) -> list[str]:
    """Return what follows an option in a step's commands on a GPU, up to the next option."""
    found = []
    for command in step.commands(ON_GPU):
        if option in command:
            rest = command[command.index(option) + 1 :]
            options = [i for i, word in enumerate(rest) if word.startswith("--")]
            found += rest[: options[0] if options else len(rest)]
    return found


def test_ours_are_measured_alone_under_names_of_their_own() -> None:
    group = next(group for group in GROUPS if group.steps[0].name == "1.3B-dropout")
    for step in group.steps:
        assert values(step, "--peers") == ["none"]
        assert values(step, "--graphs") == []
        assert values(step, "--name") == [f"{step.result}_h100"]
    results = [step.result for step in STEPS if step.result]
    assert len(set(results)) == len(results)


def test_a_gpu_measures_shapes_and_operators_that_exist() -> None:
    """A rehearsal measures tiny ones in their place."""
    for step in STEPS:
        assert set(values(step, "--shapes")) <= set(SHAPES)
        assert set(values(step, "--sizes")) <= set(GPU_SIZES)


COLLECT = """
import json, sys
import pytest

class Count:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]

for arguments in json.loads(sys.argv[1]):
    count = Count()
    status = pytest.main(arguments, plugins=[count])
    print("found", json.dumps([int(status), getattr(count, "found", [])]))
"""


def test_every_selection_names_files() -> None:
    """Without a file pytest would run all tests."""
    context = Context("cpu", "cpu", Path("out"))
    for step in STEPS:
        if step.runs_tests:
            files = [part for part in step.commands(context)[0] if part.startswith("tests/")]
            assert files, step.name
            assert all((ROOT / name).is_file() for name in files)


def test_a_folder_without_tests_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="tests/pipeline: has no tests"):
        gpu_check.test_files("pipeline")


@pytest.mark.thorough
def test_no_selection_of_tests_is_empty() -> None:
    """Checks collected like a rehearsal's, but in one process."""
    context = Context("cpu", "cpu", Path("out"))
    chosen = {step.name: step.commands(context)[0][3:] for step in STEPS if step.runs_tests}
    selections = [*map(list, dict.fromkeys(map(tuple, chosen.values())))]
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(selections)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = [
        json.loads(line.removeprefix("found "))
        for line in run.stdout.splitlines()
        if line.startswith("found ")
    ]
    assert len(found) == len(selections), run.stdout + run.stderr
    for selection, (status, tests) in zip(selections, found, strict=True):
        assert status == 0, selection
        assert tests, selection
    every = [
        test
        for name, selection in chosen.items()
        if name not in ("memcheck", "racecheck")
        for test in found[selections.index(selection)][1]
    ]
    assert len(set(every)) == len(every), "a test is in two steps"


# -- a check of small steps


def python(name: str, code: str, *, limit: int = 20, **options: object) -> Step:
    return Step(name, limit, lambda context: [[sys.executable, "-c", code]], **options)  # type: ignore[arg-type]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Step:
    """Return a first step that finds a GPU, so that limits are as they stand."""
    monkeypatch.setattr(gpu_check, "CPU_SLOWDOWN", 1)  # until it has found one
    found = {
        "device": "cuda",
        "card": "h100",
        "gpu": "NVIDIA H100",
        "plugins": [],
        "torch": "2.11",
        "cuda": "13.0",
        "python": "3.12",
        "commit": "abc",
        "backends": [],
        "extensions": {},
    }
    code = (
        "import pathlib, sys; "
        f"pathlib.Path(sys.argv[1]).write_text({json.dumps(json.dumps(found))})"
    )
    return Step(
        "environment",
        20,
        lambda context: [[sys.executable, "-c", code, str(context.environment_file)]],
    )


def report_of(out: Path) -> dict:
    return json.loads((out / "gpu_check_1_h100.json").read_text())


def test_each_step_is_in_the_report_before_the_next_begins(
    tmp_path: Path, environment: Step
) -> None:
    reads = "import json, sys; print(*(s['step'] for s in json.load(open(sys.argv[1]))['steps']))"
    path = tmp_path / "gpu_check_1_h100.json"
    steps = (
        python("fails", "import sys; print('said'); sys.exit(4)"),
        Step("reads", 20, lambda context: [[sys.executable, "-c", reads, str(path)]]),
    )
    check = Check([Group(1, 40, (environment,)), Group(1, 40, steps)], tmp_path, "gpu_check_1", 60)
    assert check.run() == 1
    log = (tmp_path / "gpu_check_1.log").read_text().splitlines()
    assert log == ["fails: said", "reads: environment fails"]
    report = report_of(tmp_path)
    assert report["gpu"] == "NVIDIA H100"
    assert report["torch"] == "2.11"
    assert report["commit"] == "abc"
    assert report["status"] == 1
    assert report["backends"] == []
    assert {"date", "seconds", "limit", "cuda", "python"} <= report.keys()
    assert [(step["step"], step["status"], step["exit_status"]) for step in report["steps"]] == [
        ("environment", "passed", 0),
        ("fails", "failed", 4),
        ("reads", "passed", 0),
    ]
    assert all(
        set(step)
        == {"step", "status", "seconds", "limit", "note", "exit_status", "tests", "failed_tests"}
        for step in report["steps"]
    )


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.thorough
def test_a_step_is_cut_off_with_its_ranks_and_keeps_what_it_has_written(
    tmp_path: Path, environment: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "MIN_STEP_S", 1)
    monkeypatch.setattr(gpu_check, "GRACE_S", 1)
    rank = tmp_path / "rank"
    hangs = (
        "import pathlib, subprocess, time; print('begun', flush=True);"
        "p = subprocess.Popen(['sleep', '100']); "
        f"pathlib.Path({str(rank)!r}).write_text(str(p.pid));"
        "time.sleep(100)"
    )
    result = {
        "cases": [
            {
                "tokens_per_s": {"hybridpar": 1234.0},
                "mfu": {"hybridpar": 0.5},
                "peak_memory_gib": {"hybridpar": 3.25},
                "graph_replays": {"hybridpar": 0},
            }
        ]
    }
    writes = (
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'speed_h100.json')!r})"
        f".write_text({json.dumps(json.dumps(result))}); time.sleep(100)"
    )
    steps = (
        python("hangs", hangs, limit=3),
        python("writes", writes, limit=2, result="speed"),
        python("next", "print('here')", limit=5),
    )
    check = Check([Group(1, 20, (environment,)), Group(1, 20, steps)], tmp_path, "gpu_check_1", 60)
    assert check.run() == 1
    outcome = {step["step"]: step for step in report_of(tmp_path)["steps"]}
    assert [outcome[name]["status"] for name in ("hangs", "writes", "next")] == [
        "cut off",
        "cut off",
        "passed",
    ]
    assert outcome["hangs"]["seconds"] >= 2
    log = (tmp_path / "gpu_check_1.log").read_text().splitlines()
    assert log == ["hangs: begun", "next: here"]
    assert not is_alive(int(rank.read_text()))
    assert outcome["writes"]["note"] == "hybridpar 1,234 tokens/s, MFU 0.500, 3.25 GiB, 0 replays"
    assert any("writes" in line and "1,234 tokens/s" in line for line in check.table())


@pytest.mark.thorough
def test_a_rank_with_a_session_of_its_own_does_not_outlive_its_step(
    tmp_path: Path, environment: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no process group of ours, and one that waits for the GPU hears no SIGTERM."""
    monkeypatch.setattr(gpu_check, "MIN_STEP_S", 1)
    monkeypatch.setattr(gpu_check, "GRACE_S", 1)
    rank = tmp_path / "rank"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    leaves = (
        "import pathlib, subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True);"
        f"pathlib.Path({str(rank)!r}).write_text(str(p.pid)); time.sleep(100)"
    )
    looks = (
        f"import pathlib, sys; pid = pathlib.Path({str(rank)!r}).read_text();"
        "sys.exit(pathlib.Path('/proc', pid).exists())"
    )
    steps = (python("leaves", leaves, limit=2), python("looks", looks, limit=5))
    check = Check([Group(1, 20, (environment,)), Group(1, 20, steps)], tmp_path, "gpu_check_1", 60)
    check.run()
    assert [outcome.status for outcome in check.outcomes] == ["passed", "cut off", "passed"]
    assert f"process {rank.read_text()} has outlived its step" in check.log.read_text()


@pytest.mark.thorough
def test_a_group_ends_when_its_time_is_over_and_its_successor_has_its_own(
    tmp_path: Path, environment: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "MIN_STEP_S", 1)
    first = Group(
        1, 5, (python("hangs", "import time; time.sleep(60)"), python("starves", "print('never')"))
    )
    check = Check(
        [replace(first, steps=(environment, *first.steps)), Group(1, 5, (python("next", "pass"),))],
        tmp_path,
        "gpu_check_1",
        60,
    )
    assert check.run() == 1
    assert [(outcome.step, outcome.status) for outcome in check.outcomes] == [
        ("environment", "passed"),
        ("hangs", "cut off"),
        ("starves", "left out"),
        ("next", "passed"),
    ]


def test_checks_beyond_the_limit_are_left_out_and_named(tmp_path: Path, environment: Step) -> None:
    steps = (
        environment,
        python("sleeps", "import time; time.sleep(0.8)"),
        python("late", "print('never')"),
    )
    check = Check(
        [Group(1, 20, (step,)) for step in steps],
        tmp_path,
        "gpu_check_1",
        gpu_check.MIN_STEP_S + 0.7,
    )
    assert check.run() == 1
    assert re.fullmatch(
        r"late: left out, \d s left", (tmp_path / "gpu_check_1.log").read_text().strip()
    )
    assert report_of(tmp_path)["steps"][-1]["status"] == "left out"


def test_steps_of_a_parallel_group_run_beside_each_other(tmp_path: Path, environment: Step) -> None:
    """Each waits for a file that another one writes."""
    meets = (
        "import pathlib, time; here, there = map(pathlib.Path, ({0!r}, {1!r})); here.touch()\n"
        "while not there.exists(): time.sleep(0.01)"
    )
    a = str(tmp_path / "a")
    b = str(tmp_path / "b")
    steps = (python("a", meets.format(a, b)), python("b", meets.format(b, a)))
    check = Check(
        [Group(1, 20, (environment,)), Group(1, 20, steps, is_parallel=True)],
        tmp_path,
        "gpu_check_1",
        60,
    )
    assert check.run() == 0
    assert {step["step"] for step in report_of(tmp_path)["steps"]} == {"environment", "a", "b"}


@pytest.mark.parametrize(
    ("code", "status", "note"),
    [
        ("print('tests/a.py::test_b PASSED [100%]')", "passed", ""),
        ("print('tests/a.py::test_b SKIPPED (needs CUDA) [100%]')", "failed", "no test was passed"),
        ("print('collected 0 items'); import sys; sys.exit(5)", "failed", ""),
    ],
)
def test_tests_of_which_none_passed_are_no_pass(
    tmp_path: Path, environment: Step, code: str, status: str, note: str
) -> None:
    groups = [Group(1, 20, (environment, python("tests", code, runs_tests=True)))]
    check = Check(groups, tmp_path, "gpu_check_1", 60)
    check.run()
    assert (check.outcomes[1].status, check.outcomes[1].note) == (status, note)


def test_a_result_of_another_check_is_not_taken_for_a_failed_step_s(
    tmp_path: Path, environment: Step
) -> None:
    path = tmp_path / "speed_h100.json"
    path.write_text('{"cases": [{"tokens_per_s": {"hybridpar": 1234.0}}]}')
    os.utime(path, (0, 0))
    broken = Step("broken", 20, lambda context: [[1]], runs_tests=True)  # type: ignore[list-item]
    steps = (environment, python("speed", "import sys; sys.exit(1)", result="speed"), broken)
    check = Check(
        [Group(1, 40, (step,), is_parallel=step is broken) for step in steps],
        tmp_path,
        "gpu_check_1",
        60,
    )
    assert check.run() == 1
    assert [outcome.status for outcome in check.outcomes] == ["passed", "failed", "failed"]
    assert check.outcomes[1].note == ""
    assert "TypeError" in check.outcomes[2].note


def test_a_step_whose_program_is_missing_is_left_out_on_a_gpu(
    tmp_path: Path, environment: Step
) -> None:
    groups = [Group(1, 20, (environment, python("memcheck", "pass", needs="no-such-program")))]
    assert Check(groups, tmp_path, "gpu_check_1", 60).run() == 1
    assert report_of(tmp_path)["steps"][1]["note"] == "no no-such-program on this machine"


@pytest.mark.thorough
def test_pytest_s_lines_are_counted_with_and_without_workers(tmp_path: Path) -> None:
    """Lines that this machine's pytest and pytest-xdist print."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("""
import pytest
@pytest.mark.parametrize("value", ["a b", "c"])
def test_good(value): pass
def test_bad(): assert False
def test_skipped(): pytest.skip("why (not)")
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
""")
    expected = {"passed": 2, "failed": 1, "skipped": 1, "errors": 1}
    pytest.importorskip("xdist")
    for workers in ([], ["-n", "2", "--dist", "worksteal"]):
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-vv",
                "-p",
                "no:cacheprovider",
                *workers,
                "tests",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        outcome = Outcome("tests")
        for line in run.stdout.splitlines():
            outcome.read(line.rstrip(), collects=False)
        assert outcome.tests == expected, run.stdout
        assert sorted(outcome.failed_tests) == [
            "tests/test_x.py::test_bad",
            "tests/test_x.py::test_error",
        ]


# -- what must be there


@pytest.mark.thorough
def test_an_extension_that_does_not_load_stops_the_check_at_once(tmp_path: Path) -> None:
    """In a copy of the checkout, all of links but the extensions."""
    package = tmp_path / "hybridpar"
    package.mkdir()
    for name in ("scripts", "benchmarks", "tests", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    for path in (ROOT / "hybridpar").iterdir():
        if not path.name.startswith("_C"):
            (package / path.name).symlink_to(path)
    (package / "_C.abi3.so").write_text("this is no shared object")
    out = tmp_path / "out"
    run = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "gpu_check.sh"), str(out), "smoke"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""},
    )
    assert run.returncode == 3, run.stdout + run.stderr
    assert (
        "environment: stop: the extension hybridpar._C is not built or does not load" in run.stdout
    )
    assert "HYBRIDPAR_BUILD=cpu python setup.py build_ext --inplace" in run.stdout
    report = json.loads((out / "gpu_check_cpu.json").read_text())
    assert [(step["step"], step["status"]) for step in report["steps"]] == [
        ("environment", "failed")
    ]
    assert report["extensions"]["hybridpar._C"]


LOADS = dict.fromkeys(("hybridpar._C", "hybridpar._C_cuda", "hybridpar._C_recorder"))


@pytest.mark.parametrize(
    ("broken", "on_gpu", "has_cuda_file", "triton", "stops"),
    [
        ("", True, True, None, False),
        ("hybridpar._C", True, True, None, True),
        ("hybridpar._C_cuda", True, True, None, True),
        ("hybridpar._C_cuda", True, False, None, True),
        ("hybridpar._C_cuda", False, False, None, False),
        ("hybridpar._C_cuda", False, True, None, True),
        ("hybridpar._C_recorder", True, True, None, False),
        ("", True, True, "norm cannot be imported", True),
    ],
)
def test_only_the_recorder_may_be_missing_on_a_gpu(
    broken: str, on_gpu: bool, has_cuda_file: bool, triton: str | None, stops: bool
) -> None:
    extensions = LOADS | {broken: "it does not load"} if broken else LOADS
    reasons = list(
        reasons_to_stop(extensions, on_gpu=on_gpu, has_cuda_file=has_cuda_file, triton=triton)
    )
    assert bool(reasons) is stops
    if broken == "hybridpar._C_cuda" and stops:
        assert (
            "HYBRIDPAR_BUILD=cuda HYBRIDPAR_CUDA_ARCHS=90a python setup.py build_ext --inplace"
            in reasons[0]
        )


def test_reports_are_written_without_torch() -> None:
    code = (
        "import sys, benchmarks.gpu_check; sys.exit(bool({'torch', 'hybridpar', 'numpy'} & "
        "sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_results_are_named_after_the_card(name: str, card: str) -> None:
    assert card_of(name) == card


def test_a_peer_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled one would be no peer, and ours alone a pass."""
    monkeypatch.setattr(sys, "argv", ["single", "--peers", "autocast gelu_tanh"])
    with pytest.raises(SystemExit):
        single.main()
    assert "--peers 'autocast gelu_tanh': names no peer" in capsys.readouterr().err
    for step in STEPS:
        for text in values(step, "--peers"):
            assert text == "none" or text in [f"{name} compiled" for name in single.PEERS["bf16"]]


def test_steps_and_calls_are_chosen_by_name() -> None:
    groups, stem = choose(["fp8", "2"])
    names = [step.name for group in groups for step in group.steps]
    assert names[:4] == ["environment", "fp8", "1.3B-peer", "345M-peer"]
    assert stem == "gpu_check_2"
    assert choose([]) == ([*GROUPS], "gpu_check")
    with pytest.raises(
        SystemExit, match=r"step = 'nonsense': unknown\. Valid: 1, 2, 3, environment, smoke"
    ):
        choose(["nonsense"])
