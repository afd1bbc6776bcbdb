"""Checkpoints that are read beside a job that saves and removes them as quickly as it can, and
misnamed folders."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint.grids import engines, fill
from checkpoint.test_folders import names, save_at
from checkpoint.test_reshard import make
from train.runs import LONG_S, metrics, tiny

from hybridpar import checkpoint
from hybridpar.checkpoint.folders import MOST_HELD, Hold, prune
from hybridpar.checkpoint.huggingface import export_folder
from hybridpar.config import CheckpointConfig, Config, Launch
from hybridpar.errors import CheckpointError
from hybridpar.train.inference.generate import Generator
from hybridpar.train.job import train
from hybridpar.verify.replay import replay

KEEP_ONE = CheckpointConfig(keep=1)
ALL = make({}, checkpoint={"keep": 99})
NUM_READS = 5


# -- readers beside a job


@contextmanager
def saving_for_ever(config: Config) -> Iterator[None]:
    """A real job beside the block, which saves after every step and keeps one checkpoint."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            os.fsync = lambda handle: (
                None
            )  # what counts here is how quickly checkpoints follow each other
            with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
                train(config, Launch.from_environment())
        finally:
            os._exit(1)
    try:
        wait_for_save(config, 2)
        yield
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the job is still there"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_for_save(config: Config, step: int) -> None:
    end = time.monotonic() + LONG_S
    while newest(config) < step:
        assert time.monotonic() < end
        time.sleep(0.01)


def newest(config: Config) -> int:
    return max(checkpoint.saved_steps(config.run.folder / "checkpoints"), default=0)


@pytest.mark.thorough
def test_readers_beside_a_job_that_keeps_one_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path, train={"num_steps": 10**6, "save_interval": 1}, checkpoint={"keep": 1})
    run = config.run.folder
    said: list[str] = []
    with saving_for_ever(config):
        first = newest(config)
        for number in range(NUM_READS):
            Generator.load(run, said.append)
            export_folder(run, tmp_path / f"out{number}", say=said.append)
            checkpoint.find_start(run, config.model)
        assert newest(config) > first + NUM_READS, "checkpoints came and went meanwhile"
        assert replay(run, metrics(run)[-1]["step"], said.append).agrees
        other = replace(
            config,
            train=replace(config.train, num_steps=1, start_from=str(run)),
            run=replace(config.run, name="other"),
        )
        assert train(other, Launch.from_environment()).step == 1
    assert not [line for line in said if "passed over" in line], "none is damaged"
    left = checkpoint.saved_steps(run / "checkpoints")
    assert len(left) <= 1 + MOST_HELD + 1, "the newest, held ones, and one that was not removed yet"


def test_a_save_leaves_the_newest_held_checkpoints_until_the_next(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_at(tmp_path, step, ALL)
    holds = [Hold(tmp_path / f"step_{step:08d}") for step in (1, 2, 3, 4)]
    prune(tmp_path, 5, KEEP_ONE)
    assert checkpoint.saved_steps(tmp_path) == [5, 4, 3]
    assert [hold.is_there for hold in holds] == [False, False, True, True]
    for hold in holds:
        hold.close()
    prune(tmp_path, 5, KEEP_ONE)
    assert names(tmp_path) == ["step_00000005"]


def test_a_killed_reader_holds_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        save_at(tmp_path, step, ALL)
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        hold = Hold(tmp_path / "step_00000001")
        os.write(writes, bytes([hold.is_there]))
        time.sleep(LONG_S)
        os._exit(1)
    assert os.read(reads, 1) == b"\x01"
    prune(tmp_path, 2, KEEP_ONE)
    assert checkpoint.saved_steps(tmp_path) == [2, 1]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    prune(tmp_path, 2, KEEP_ONE)
    assert checkpoint.saved_steps(tmp_path) == [2]


def test_a_reader_whose_hold_is_not_seen_starts_over_with_the_newest(tmp_path: Path) -> None:
    """The job may be on another machine."""
    root = tmp_path / "checkpoints"
    save_at(root, 1, ALL)
    seen: list[str] = []
    said: list[str] = []

    def read(folder: Path) -> int:
        seen.append(folder.name)
        if len(seen) == 1:
            save_at(root, 2, ALL)
            shutil.rmtree(folder)
        return checkpoint.read_manifest(folder).step

    assert checkpoint.read_held(tmp_path, said.append, read) == 2
    assert seen == ["step_00000001", "step_00000002"]
    assert said == [f"{root / 'step_00000001'}: was removed while it was read; starting over"]

    def never_done(folder: Path) -> int:
        seen.append(folder.name)
        save_at(root, len(seen), ALL)
        shutil.rmtree(folder)
        return checkpoint.read_manifest(folder).step

    with pytest.raises(
        CheckpointError, match=r"20 checkpoints in a row were removed .* larger checkpoint\.keep"
    ):
        checkpoint.read_held(tmp_path, said.append, never_done)
    (root / f"step_{len(seen):08d}" / "manifest.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="holds no complete checkpoint"
    ):  # that is damage, and nothing was removed
        checkpoint.read_held(tmp_path, said.append, read)


# -- folders whose names say another step


def test_a_misnamed_checkpoint_is_refused_and_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_at(root, 20, ALL)
    shutil.copytree(root / "step_00000020", root / "step_00000030")
    wrong = (
        r"step_00000030: its manifest is for step 20, so the folder was renamed or copied; "
        r"rename it to "
        r"step_00000020 "
        rf"if that name is free, or move it out of {root}"
    )
    for read in (checkpoint.read_manifest, checkpoint.FullWeights, checkpoint.load_full):
        with pytest.raises(CheckpointError, match=wrong):
            read(root / "step_00000030")
    with pytest.raises(CheckpointError, match=wrong):
        export_folder(root / "step_00000030", tmp_path / "out")
    with pytest.raises(CheckpointError, match=wrong):
        checkpoint.find_start(root / "step_00000030", ALL.model)
    said: list[str] = []
    assert checkpoint.find(tmp_path, said.append) == root / "step_00000020"
    (engine,) = engines(ALL)
    assert checkpoint.resume(root, engine, "corpus", said.append) == 20
    assert len(said) == 2
    assert all(
        "manifest is for step 20" in line and line.endswith(": passed over") for line in said
    )
    shutil.copytree(root / "step_00000020", tmp_path / "mine")
    assert checkpoint.read_manifest(tmp_path / "mine").step == 20, "that name says no step"


def test_a_save_removes_no_misnamed_checkpoint(tmp_path: Path) -> None:
    """It may be the only copy of what its manifest names."""
    said: list[str] = []
    (engine,) = engines(ALL)
    save_at(tmp_path, 20, ALL)
    (tmp_path / "step_00000020").rename(tmp_path / "step_00000010")
    save_at(tmp_path, 12, make({}, checkpoint={"keep": 1}))
    assert names(tmp_path) == ["step_00000010", "step_00000012"]
    save_at(tmp_path, 13, make({}, checkpoint={"keep": 2}))
    assert names(tmp_path) == ["step_00000010", "step_00000012", "step_00000013"], (
        "it counts for none that stay"
    )
    saver = checkpoint.Saver(tmp_path, engine, "corpus", said.append)
    fill(engine, 10)
    saver.start(beside=False)
    saver.settle()
    moved = "step_00000010.is_step_00000020"
    assert names(tmp_path) == ["step_00000010", moved, "step_00000012", "step_00000013"]
    assert said[0] == (
        f"{tmp_path / 'step_00000010'}: its manifest is for step 20, so it was moved to {moved} "
        f"instead of being removed"
    )
    (tmp_path / moved).rename(tmp_path / "step_00000020")
    assert checkpoint.resume(tmp_path, engine, "corpus", said.append) == 20
