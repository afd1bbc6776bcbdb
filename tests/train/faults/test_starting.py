"""The start of a job: what is said while ranks begin, and Ctrl-C before they train."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from train.forked import Job, torchrun
from train.runs import LONG_S, write_config

from hybridpar.cli import main
from hybridpar.config import Config
from hybridpar.flight import Flight, Record
from hybridpar.train import job as loop
from hybridpar.train.faults import starting, supervisor
from hybridpar.train.faults.diagnose import Seen
from hybridpar.train.faults.starting import StartWatch


def test_waits_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr("hybridpar.cores.available_cores", lambda: 2)
    said: list[str] = []
    watch = StartWatch(3, said.append)
    for phases in (
        ("", "importing", "starting"),
        ("connecting", "setting up", "setting up"),
        ("training", "training", "loading"),
        ("training",) * 3,
        ("setting up",) * 3,
    ):
        watch.look(
            [
                Seen(rank, early=Record(1, 0.0, phase, 0.0) if phase else None)
                for rank, phase in enumerate(phases)
            ]
        )
    assert said == [
        "1 of 3 ranks have begun after 0 s: they share 2 cores",
        "0 of 3 ranks train after 0 s (1 connecting, 2 setting up): they share 2 cores",
        "2 of 3 ranks train after 0 s (1 loading): they share 2 cores",
    ]


def test_more_ranks_than_cores_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridpar.cores.available_cores", lambda: 2)
    monkeypatch.setattr(supervisor, "supervise", lambda *args: 0)
    for num_ranks, said in ((64, "hybridpar: starting 64 ranks: they share 2 cores\n"), (2, "")):
        assert main(["train", str(write_config(tmp_path)), "--ranks", str(num_ranks)]) == 0
        assert capsys.readouterr().err == said


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears once rank 0 connects to rank 1, which does not come: it is in C++ code,
    as many are."""
    connect = loop.JobPlace.connect
    mark = tmp_path / "connecting"

    def connect_or_not(self: Any, config: Config, flight: Flight) -> Any:
        if self.job.launch.rank:
            time.sleep(LONG_S)
        mark.touch()
        return connect(self, config, flight)

    monkeypatch.setattr(loop.JobPlace, "connect", connect_or_not)
    return mark


@pytest.mark.ranks
def test_a_job_that_is_interrupted_as_it_starts_ends_at_once(
    tmp_path: Path, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_SAY_EVERY_S", 0.2)
    job = Job("hybridpar", "train", write_config(tmp_path), "--ranks", "2", "--parallel.pp", "2")
    job.wait_for(r"0 of 2 ranks train after \d+ s \(1 connecting, 1 \w+")
    os.kill(job.pid, signal.SIGINT)
    code, out = job.end()
    assert code == 130
    assert (
        out.splitlines()[-1]
        == "hybridpar: SIGINT: ending all 2 ranks, which had not begun to train"
    )
    assert "Traceback" not in out
    assert "terminate" not in out


@pytest.mark.ranks
def test_ranks_of_torchrun_that_are_interrupted_as_they_start_say_nothing(
    tmp_path: Path, late: Path
) -> None:
    """torchrun prints a traceback of its own."""
    job = torchrun(2, "train", write_config(tmp_path), "--parallel.pp", "2")
    job.wait_for(late)
    os.kill(job.pid, signal.SIGINT)
    _, out = job.end()
    assert "KeyboardInterrupt" not in out
    assert "hybridpar: SIGINT" not in out
    assert "terminate called" not in out
