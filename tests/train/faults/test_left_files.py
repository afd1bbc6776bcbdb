"""A killed launch leaves nothing in the temporary folder, and the next start removes what it has
left in its own."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from train.forked import Job
from train.runs import LONG_S, write_config

from hybridpar.checkpoint import saved_steps
from hybridpar.errors import ConfigError
from hybridpar.train.folder import in_use

pytestmark = pytest.mark.ranks


def test_a_killed_launch_leaves_nothing_that_the_next_one_does_not_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = write_config(tmp_path)
    run = tmp_path / "runs" / "run"
    command = (
        "hybridpar",
        "train",
        config,
        "--ranks",
        "2",
        "--parallel.pp",
        "2",
        "--train.eval_interval",
        "0",
    )
    job = Job(*command, "--train.num_steps", "1000000", "--train.save_interval", "1")
    job.wait_for(run / "checkpoints" / "step_00000002")
    os.kill(job.pid, signal.SIGKILL)
    job.process.wait()
    left = [
        ".config.toml.part",
        ".part.loss.png",
        "..part.costs.json.part",
        ".job-0123456789abcdef",
    ]
    for name in left:  # each is there for a moment only, in which a process may be killed
        (run / name).touch()
    (run / ".mine.part").touch()
    await_end_of_ranks(run)
    end = max(saved_steps(run / "checkpoints")) + 2
    code, out = Job(*command, "--train.num_steps", str(end), "--train.save_interval", "0").end()
    assert code == 0, out
    assert [name for name in left if (run / name).exists()] == []
    assert (run / ".mine.part").exists(), "a job writes no such file"
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert list(temporary.glob("torchelastic*")) + list(temporary.glob("hybridpar*")) == []


def await_end_of_ranks(run: Path) -> None:
    """They end with their supervisor, a moment later."""
    give_up = time.monotonic() + LONG_S
    while True:
        try:
            with in_use(run):
                return
        except ConfigError:
            assert time.monotonic() < give_up
            time.sleep(0.05)
