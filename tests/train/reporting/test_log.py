"""A run's own records: logs that are long, TensorBoard's files, and a rollback while lines wait."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hybridpar.train.reporting import records as module
from hybridpar.train.reporting.log import RunLog, TensorBoard
from hybridpar.train.reporting.progress import Reporter
from hybridpar.train.reporting.records import Records
from hybridpar.train.reporting.run_metrics import read_curves, read_metrics

LINES = 100_000
RESUME = """
import resource, sys
from pathlib import Path
from hybridpar.train.reporting.log import RunLog
from hybridpar.train.reporting.run_metrics import read_curves
from hybridpar.train.reporting.plot import can_plot, plot_loss
from hybridpar.train.reporting.progress import Reporter

def resume(path):
    log = RunLog(path.parent, int(sys.argv[2]), Reporter(), writes=True)
    log.write({"step": int(sys.argv[2]) + 1, "loss": 0.5})
    if can_plot():
        plot_loss(read_curves(path), path.with_name("loss.png"), "")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

path = Path(sys.argv[1])
few = path.parent / "few" / path.name
few.parent.mkdir()
few.write_bytes(b'{"step": 1, "loss": 1.5}\\n{"step": 1, "val_loss": 1.5}\\n')
before = resume(few)
print(resume(path) - before)
"""


@pytest.mark.thorough
def test_a_log_of_many_lines_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, LINES + 1):
            file.write(
                f'{{"step": {step}, "loss": {1 + 1 / step:.6f}, "grad_norm": 1.2345678, "lr": '
                f"0.0003}}\n"
            )
    inode = path.stat().st_ino
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(path), str(LINES - 3)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert int(done.stdout) < 30, done.stderr
    with path.open("rb") as file:
        file.seek(-300, 2)
        last = [json.loads(line) for line in file.read().splitlines()[-2:]]
    assert [(row["step"], row["loss"]) for row in last] == [(LINES - 3, 1.00001), (LINES - 2, 0.5)]
    assert path.stat().st_ino == inode, "what stays is not written again"


@pytest.mark.parametrize("count", [1, 8, 9, 10, 1000, 1023, 1024, 1025])
def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends(tmp_path: Path, count: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(1, count + 1))
        + f'{{"step": {count}, "val_loss": 2.0}}\n{{"step": {count}, "anomaly": "x", "loss": '
        f"null}}\n"
    )
    rows = read_curves(path, most=8)
    assert rows[-1] == {"step": count, "val_loss": 2.0}
    steps = [row["step"] for row in rows[:-1]]
    assert [row["loss"] for row in rows[:-1]] == [step + 0.5 for step in steps]
    assert (steps[0], steps[-1]) == (1, count)
    assert min(count, 4) <= len(steps) <= 9
    assert len({b - a for a, b in pairwise(steps[:-1])}) <= 1


def test_a_line_without_its_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 1.5}')
    RunLog(tmp_path, 2, Reporter(), writes=True).write({"step": 3, "loss": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_lines_that_wait_are_cut_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, 0, Reporter(), writes=True)
    log.write({"step": 1})
    with monkeypatch.context() as full:
        full.setattr(module.Journal, "write", lambda journal: Path("/dev/full").write_bytes(b"x"))
        for step in (2, 3, 4):
            log.write({"step": step})
        log.cut_back(3)
        log.write({"step": 3, "rolled_back_to": 2})
        log.write({"step": 4, "loss": 0.5})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 3, 4]
    assert len((tmp_path / "notes.jsonl").read_text().splitlines()) == 2


def test_waiting_records_are_bounded_and_drops_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        Path("/dev/full").write_bytes(b"x")

    said: list[str] = []
    records = Records(tmp_path, said.append)
    events = tmp_path / "events"
    lines = tmp_path / "metrics.jsonl"
    records.begin("events", 0, most=2)
    records.begin("metrics.jsonl", 0, most=4)
    monkeypatch.setattr(module, "MOST_FILES", 2)
    with monkeypatch.context() as full:
        full.setattr(module.Journal, "write", fail)
        full.setattr(module, "_replace", fail)
        for i in range(6):
            records.append("events", b"%d" % i)
            records.append("metrics.jsonl", b"%d\n" % i)
        for name in ("a.svg", "b.svg", "a.svg", "c.svg"):
            records.put(name, lambda path: path.write_text("x"))
    records.finish()
    records.close()
    assert (events.read_text(), lines.read_text()) == ("45", "2\n3\n4\n5\n"), "the newest are kept"
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["a.svg", "c.svg"]
    assert len(said) == 2
    assert said[1].endswith(
        "can be written again; the oldest were dropped, too many waited: 4 records of events, "
        "2 records of metrics.jsonl, 1 whole files"
    )


def test_tensorboard_reads_what_is_written_and_forgets_what_a_resumed_run_makes_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = Records(tmp_path, print)
    for resumed in (0, 2):
        board = TensorBoard(records, str(resumed), resumed, print)
        for step in range(resumed + 1, 5):
            board.write(
                {"step": step, "loss": step + resumed / 10, "consumed_tokens": 7, "kind": "x"}
            )
    (tmp_path / "0").rename(tmp_path / "both")
    (later,) = (tmp_path / "2").iterdir()
    later.rename(tmp_path / "both" / f"{later.name}.later")
    events = EventAccumulator(str(tmp_path / "both"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, pytest.approx(3.2)),
        (4, pytest.approx(4.2)),
    ]


def test_tensorboard_forgets_what_a_run_makes_again_after_it_has_gone_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 0, Reporter(), writes=True)
    for back, branch in ((0, 0.0), (2, 0.25), (0, 0.5)):
        if branch:
            log.cut_back(back)
        for step in range(back + 1 if back else 0, 5):
            log.write({"step": step, "loss": step + branch})
    log.cut_back(3)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [
        (0, 0.5),
        (1, 1.5),
        (2, 2.5),
        (3, 3.5),
    ]


def test_a_rank_that_writes_nothing_makes_no_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, Reporter(), writes=False)
    log.write({"step": 1, "loss": 1.0})
    log.note("something")
    log.draw("plan.svg", lambda: "x")
    log.cut_back(0)
    log.finish()
    log.close()
    assert list(tmp_path.iterdir()) == []
