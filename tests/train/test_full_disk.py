"""Runs whose disk is full for a while lose nothing: they end with the bits of one that always had
room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train.forked import Job, held
from train.runs import metrics, run_job, steps, write_config

from hybridpar import flight
from hybridpar.cli import main
from hybridpar.errors import CheckpointError
from hybridpar.train import saves
from hybridpar.train.faults.errors import SaveError
from hybridpar.train.folder import flight_path
from hybridpar.train.saves import Saves

DISK_BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill(disk: Path, room: int = 0) -> Path:
    """A file that leaves so many bytes free, or fewer where a job has written meanwhile."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with ballast.open("wb", buffering=0) as file:
        file.write(bytes(free - room))
    return ballast


def notes(run: Path) -> list[str]:
    return [json.loads(line)["note"] for line in (run / "notes.jsonl").read_text().splitlines()]


def board_steps(run: Path) -> list[int]:
    """The steps whose loss TensorBoard shows."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [scalar.step for scalar in events.Scalars("loss")]


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_rank_dies_and_starts_again_while_nothing_can_be_written(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = held(monkeypatch, tmp_path)
    config = write_config(tmp_path)
    flags = (
        "--parallel.pp",
        "2",
        "--train.num_steps",
        "40",
        "--train.eval_interval",
        "6",
        "--train.save_interval",
        "6",
    )
    run_job(2, "train", config, *flags, "--run.name", "calm")
    job = Job(
        "hybridpar",
        "train",
        config,
        "--ranks",
        "2",
        *flags,
        "--run.dir",
        disk,
        "--checkpoint.max_failed_saves",
        "100",
        "--data.cache",
        tmp_path / "runs" / "data",
        "--inject",
        "slow link 0-1 at step 9 for 1 s",
    )
    job.wait_for("step 6/40 .* val ")
    run = disk / "run"
    job.wait_for(begun)
    ballast = fill(disk)
    second = flight.read(flight_path(run, 1))
    assert second is not None
    os.kill(second.who["pid"], signal.SIGKILL)
    over.touch()
    job.wait_for(r"failures\.jsonl: cannot be written \(No space left on device\)")
    job.wait_for("training continues, and the next save tries again")
    ballast.unlink()
    code, out = job.end()
    assert code == 0, out
    assert "Traceback" not in out
    assert steps(metrics(run)) == steps(metrics(tmp_path / "runs" / "calm"))
    assert board_steps(run)[-20:] == list(range(21, 41))
    assert json.loads((run / "failures.jsonl").read_text())["kind"] == "died"
    assert any(
        "cannot be written (No space left on device); training continues" in text
        for text in notes(run)
    )
    assert any("can be written again" in text for text in notes(run))
    for name in ("plan.svg", "executed.svg", "trace.json", "costs.json", "loss.png", "sample.txt"):
        assert (run / name).stat().st_size, name
    assert (run / "checkpoints" / "step_00000040").exists()
    for name in ("pp0-tp0", "pp1-tp0"):
        file = Path("checkpoints") / "step_00000040" / f"{name}.safetensors"
        assert (run / file).read_bytes() == (tmp_path / "runs" / "calm" / file).read_bytes()
    assert not [path for path in run.rglob("*") if ".part" in path.name], (
        "nothing half-written is left"
    )


@pytest.mark.thorough
def test_the_last_save_waits_for_room(tmp_path: Path, disk: Path) -> None:
    config = write_config(tmp_path)
    flags = ("--train.save_interval", "0", "--train.eval_interval", "0")
    assert main(["train", str(config), *flags]) == 0
    ballast = fill(disk, room=100 << 10)
    job = Job(
        "hybridpar",
        "train",
        config,
        *flags,
        "--run.dir",
        disk,
        "--data.cache",
        tmp_path / "runs" / "data",
    )
    job.wait_for(r"cannot write the checkpoint: \[Errno 28\].*trying again in 1 s")
    ballast.unlink()
    code, out = job.end()
    assert code == 0, out
    assert steps(metrics(disk / "run")) == steps(metrics(tmp_path / "runs" / "run"))
    assert (disk / "run" / "checkpoints" / "step_00000006").exists()


def test_without_room_from_the_start_one_line_says_where(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a flight record is done without."""
    config = write_config(tmp_path)
    fill(disk)
    assert (
        main(["train", str(config), "--run.dir", str(disk), "--data.cache", str(tmp_path / "data")])
        == 1
    )
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("hybridpar:")
    ]
    who = "rank 0 (stage 0, replica 0, tensor part 0)"
    assert line == f"hybridpar: {who}: {disk}/run/config.toml: No space left on device"


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("beside", ["True", "False"])
def test_saves_that_fail_too_often_end_the_run_and_it_is_not_started_again(
    tmp_path: Path, disk: Path, beside: str
) -> None:
    config = write_config(tmp_path)
    fill(disk, room=100 << 10)
    job = Job(
        "hybridpar",
        "train",
        config,
        "--ranks",
        "2",
        "--parallel.pp",
        "2",
        "--run.dir",
        disk,
        "--data.cache",
        tmp_path / "data",
        "--train.num_steps",
        "40",
        "--checkpoint.asynchronous",
        beside,
        "--checkpoint.max_failed_saves",
        "2",
    )
    code, out = job.end()
    assert code == 1, out
    assert (
        "training continues, and the next save tries again (1 of 2 failures in a row that end the "
        "run)" in out
    )
    assert out.count("2 in a row (checkpoint.max_failed_saves)") == 1
    assert "starting again" not in out
    assert "Traceback" not in out
    assert list((disk / "run" / "checkpoints").iterdir()) == []
    assert steps(metrics(disk / "run"))[-1][0] in (4, 6), (
        "the second one is that of step 4, beside which it trains on"
    )


# -- the parts


def failing(results: list[str]) -> Any:
    """A Saver whose saves end so: an error, or empty."""

    def settle(*, wait: bool = True) -> Path | None:
        if text := results.pop(0):
            raise CheckpointError(text)
        return Path("step")

    return SimpleNamespace(start=lambda val_loss, beside: None, settle=settle)


def test_only_misses_in_a_row_count() -> None:
    said: list[str] = []
    saved = Saves(failing(["full", "full", "", "full", "full", "full"]), 3, said.append)
    for _ in range(5):
        saved.finish()
    assert [text.partition("(")[2][:6] for text in said] == ["1 of 3", "2 of 3"] * 2
    with pytest.raises(SaveError, match=r"full; 3 in a row \(checkpoint.max_failed_saves\)"):
        saved.finish()


def test_a_save_that_must_succeed_is_tried_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(saves.time, "sleep", paused.append)
    said: list[str] = []
    Saves(failing(["full", "full", ""]), 1, said.append).insist(None)
    assert (paused, len(said)) == ([1.0, 2.0], 2)
    with pytest.raises(SaveError, match="full; tried 6 times"):
        Saves(failing(["full"] * 9), 3, said.append).insist(None)
    assert paused[2:] == [1.0, 2.0, 4.0, 8.0, 16.0]


SMALL = """
import resource, sys
from pathlib import Path
from hybridpar.train.reporting import records
said, path = [], Path(sys.argv[1])
log = records.Records(path.parent, said.append)
log.begin("log", 0)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for i in range(100):
    log.append("log", b"%04d %s\\n" % (i, b"x" * 30))
    log.retry()
log.put("picture", lambda aside: aside.write_bytes(bytes(5000)))
there = path.read_bytes(), sorted(p.name for p in path.parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.finish()
log.close()
print(there[0].endswith(b"\\n"), len(there[0]), there[1], said)
"""


def test_a_file_that_may_not_grow_ends_with_a_whole_record_and_resumes_with_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", SMALL, str(path)], capture_output=True, text=True, timeout=200
    )
    trouble = (
        f"{path}: cannot be written (File too large); training continues, and what is to be there "
        "waits",
        f"{path}: can be written again; all that has waited is there",
    )
    assert done.stdout == f"True {1000 // 36 * 36} ['log'] {list(trouble)}\n", done.stderr
    assert [line.split()[0] for line in path.read_text().splitlines()] == [
        f"{i:04}" for i in range(100)
    ]
    assert path.with_name("picture").stat().st_size == 5000
