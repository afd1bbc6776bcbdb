"""Runs whose console is lost train on to the bits of one that is read, and say so in their
folder."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from train.forked import Forked, held
from train.runs import LONG_S, metrics, run_job, steps, write_config

from hybridpar.cli import main

TRAIN = (sys.executable, "-m", "hybridpar", "train")


def notes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()]


def calm(config: Path, *flags: str) -> list[tuple[int, float, float]]:
    """The steps of the same run in this process."""
    assert main(["train", str(config), *flags, "--run.name", "calm"]) == 0
    return steps(metrics(config.parent / "runs" / "calm"))


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_killed_tee_ends_neither_ranks_nor_their_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed after it is still seen, and started again."""
    config = write_config(tmp_path)
    flags = ("--parallel.pp", "2", "--train.num_steps", "24")
    run_job(2, "train", config, *flags, "--run.name", "calm")
    (log := tmp_path / "log").touch()
    _, over = held(monkeypatch, tmp_path)
    reads, writes = os.pipe()
    tee = subprocess.Popen(["tee", str(log)], stdin=reads, stdout=subprocess.DEVNULL)
    faults = ("--inject", "slow link 0-1 at step 9 for 1 s", "kill rank 1 at step 13")
    job = Forked(
        (*TRAIN, str(config), "--ranks", "2", *flags, *faults), os.environ, writes, closed=(reads,)
    )
    os.close(reads)
    os.close(writes)
    while job.poll() is None and "step 6/24   loss" not in log.read_text():
        time.sleep(0.02)
    tee.kill()
    tee.wait()
    over.touch()
    assert job.wait(LONG_S) == 0
    assert "step 9/24   loss" not in log.read_text(), (
        "the console was lost in the middle of the run"
    )
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "failures.jsonl").read_text())["text"].startswith(
        "rank 1 (stage 1, replica 0, tensor"
    )
    assert steps(metrics(run)) == steps(metrics(tmp_path / "runs" / "calm"))
    lost = [note["note"] for note in notes(run)]
    assert lost == ["stderr is lost (Broken pipe); training continues in silence"] * 2, (
        "once by each start"
    )
    assert (run / "checkpoints" / "step_00000024").exists()
    assert (run / "sample.txt").exists()


@pytest.mark.thorough
def test_a_console_that_takes_nothing_keeps_nothing_from_being_done(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    flags = ("--train.num_steps", "4", "--json")
    full = os.open("/dev/full", os.O_WRONLY)
    jobs = {
        "No space left on device": Forked(
            (*TRAIN, str(config), *flags, "--run.name", "full"), os.environ, full
        ),
        "it was closed from the start": subprocess.Popen(
            [
                "sh",
                "-c",
                'exec "$@" >&- 2>&-',
                "sh",
                *TRAIN,
                str(config),
                *flags,
                "--run.name",
                "closed",
            ]
        ),
    }
    os.close(full)
    expected = calm(config, *flags)
    for name, (why, job) in zip(("full", "closed"), jobs.items(), strict=True):
        assert job.wait(LONG_S) == 0
        run = tmp_path / "runs" / name
        assert [note["note"] for note in notes(run)] == [
            f"stderr is lost ({why}); training continues in silence"
        ]
        assert steps(metrics(run)) == expected
        assert (run / "sample.txt").exists()


@pytest.mark.thorough
def test_a_terminal_that_is_closed_stops_the_bar_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    flags = ("--train.num_steps", "40", "--train.eval_interval", "1")
    ours, theirs = pty.openpty()
    job = Forked((*TRAIN, str(config), *flags), os.environ, theirs, closed=(ours,))
    os.close(theirs)
    seen = b""
    while (
        b"step 3   loss" not in seen
    ):  # what a terminal holds for its reader is less than a run says
        seen += os.read(ours, 1024)
    os.close(ours)
    assert job.wait(LONG_S) == 0
    run = tmp_path / "runs" / "run"
    assert [note["note"] for note in notes(run)] == [
        "stderr is lost (Input/output error); training continues in silence"
    ]
    assert steps(metrics(run)) == calm(config, *flags)


def test_a_command_whose_output_nobody_reads_ends(tmp_path: Path) -> None:
    """Its output is its purpose, as ever."""
    reads, writes = os.pipe()
    os.close(reads)
    job = Forked((*TRAIN[:3], "simulate", str(write_config(tmp_path))), os.environ, writes)
    os.close(writes)
    assert job.wait(LONG_S) == 1
