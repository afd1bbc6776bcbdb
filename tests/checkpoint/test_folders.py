"""Checkpoints that stay; one appears whole or not at all, whenever the process that writes it is
killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grids import differing, engines, fill
from checkpoint.test_reshard import make
from ranks import run_ranks

from hybridpar import checkpoint
from hybridpar.checkpoint import folders
from hybridpar.config import CheckpointConfig, Config
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

CONFIG = make({})


def save_at(root: Path, step: int, config: Config = CONFIG, val_loss: float | None = None) -> None:
    (engine,) = engines(config)
    fill(engine, step)
    checkpoint.save(root, engine, "corpus", val_loss)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def is_whole(root: Path, steps: set[int], config: Config = CONFIG) -> int:
    """The step of the newest checkpoint, which must be one of those, and not passed over."""
    (engine,) = engines(config)
    said: list[str] = []
    step = checkpoint.resume(root, engine, "corpus", said.append)
    assert step in steps
    assert not said
    assert not differing(engine)
    return step


# -- what stays


@pytest.mark.parametrize(
    ("keep", "keep_best", "expected"),
    [
        (2, 0, [6, 5]),
        (1, 0, [6]),
        (4, 0, [6, 5, 4, 3]),
        (1, 1, [6, 3]),
        (2, 3, [6, 5, 3, 1]),
        (1, 2, [6, 5, 3]),
        (1, 9, [6, 5, 3, 2, 1]),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, keep: int, keep_best: int, expected: list[int]
) -> None:
    config = make({}, checkpoint={"keep": keep, "keep_best": keep_best})
    for step, loss in enumerate([2.0, 2.5, 1.0, None, 2.0, float("nan")], 1):
        save_at(tmp_path, step, config, loss)
    assert checkpoint.saved_steps(tmp_path) == expected
    assert names(tmp_path) == [f"step_{step:08d}" for step in reversed(expected)]


def test_newest_of_equally_good_checkpoints_is_best(tmp_path: Path) -> None:
    for step, loss in enumerate([1.0, 1.0, 2.0], 1):
        save_at(tmp_path, step, make({}, checkpoint={"keep": 3}), loss)
    assert checkpoint.best_steps(tmp_path) == [2]
    assert checkpoint.best_steps(tmp_path, 3) == [2, 1, 3]
    (tmp_path / "step_00000002" / "manifest.json").write_text("{}")
    assert checkpoint.best_steps(tmp_path) == [1]


def test_losses_of_another_validation_set_do_not_count(tmp_path: Path) -> None:
    """A run may resume with another checkpoint.best_by."""
    for step, (loss, best_by) in enumerate(
        [(1.0, "wiki"), (3.0, "code"), (2.0, "code"), (4.0, "code")], 1
    ):
        save_at(
            tmp_path,
            step,
            make({}, checkpoint={"keep": 1, "keep_best": 1, "best_by": best_by}),
            loss,
        )
    assert checkpoint.saved_steps(tmp_path) == [4, 3]


def test_checkpoints_ahead_of_the_one_that_is_saved_stay(tmp_path: Path) -> None:
    """The newest one was damaged, and training went back."""
    for step in (7, 8, 3, 4, 5):
        save_at(tmp_path, step)
    assert checkpoint.saved_steps(tmp_path) == [8, 7, 5, 4]


def test_a_later_checkpoint_is_not_the_best_in_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """A damaged one, say, from before which training continues."""
    config = make({}, checkpoint={"keep": 1, "keep_best": 1})
    for step, loss in ((8, 1.0), (2, 1.5), (3, 2.0), (4, 1.8)):
        save_at(tmp_path, step, config, loss)
    assert checkpoint.saved_steps(tmp_path) == [8, 4, 2]
    save_at(tmp_path, 8, config, 1.7)
    assert checkpoint.saved_steps(tmp_path) == [8, 2]


def test_other_names_are_let_alone(tmp_path: Path) -> None:
    for name in ("step_x", "step_1", "mine", ".step_00000001.kept", "step_00000001.tmp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
    before = names(tmp_path)
    assert checkpoint.saved_steps(tmp_path) == []
    save_at(tmp_path, 9)
    assert names(tmp_path) == sorted([*before, "step_00000009"])


# -- how one appears


def test_published_files_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before the manifest, both before the folder's own list of names, all that before the
    rename."""
    events: list[str] = []
    fsync = os.fsync
    rename = Path.rename

    def note_sync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    root = tmp_path / "checkpoints"
    save_at(root, 1)
    part = ".step_00000001.part"
    name = "step_00000001"
    file = "pp0-tp0.safetensors"
    note = f"{file}.part -> {file}.json"
    assert events == [file, note, "manifest.json", part, f"{part} -> {name}", "checkpoints"]
    events.clear()
    save_at(root, 1)
    assert events[4:] == [f"{name} -> .step_00000001.old", f"{part} -> {name}", "checkpoints"]
    assert names(root) == [name]


def test_former_holder_of_a_name_counts_until_it_is_taken_again(tmp_path: Path) -> None:
    save_at(tmp_path, 1)
    (tmp_path / "step_00000001").rename(
        tmp_path / ".step_00000001.old"
    )  # as if killed between the two renames
    assert checkpoint.saved_steps(tmp_path) == [1]
    assert is_whole(tmp_path, {1})
    assert checkpoint.newest(tmp_path, print) == tmp_path / ".step_00000001.old"
    save_at(tmp_path, 2)
    assert names(tmp_path) == [".step_00000001.old", "step_00000002"]
    save_at(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def killed(work: Callable[[], Any], after_s: float | None = None) -> bool:
    """Runs `work` in a process of its own, and kills that with SIGKILL; whether it was killed
    before it was done."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def killing(work: Callable[[], Any], number: int) -> Callable[[], None]:
    """`work` that kills itself right before it would do its so-and-so-manieth thing to a file."""
    left = count(number, -1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    def watched() -> None:
        sys.addaudithook(watch)  # for good: in a process that ends
        work()

    return watched


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("before", "keep"), [([1, 2], 2), ([2, 3], 1), ([3], 1)], ids=str)
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, before: list[int], keep: int, request: pytest.FixtureRequest
) -> None:
    """Also of a step that was saved already, and is the only one. Without --thorough at every third
    point."""
    stride = 1 if request.config.getoption("--thorough") else 3
    config = make({}, checkpoint={"keep": keep})
    start = tmp_path / "start"
    for step in before:
        save_at(start, step, make({}, checkpoint={"keep": 3}))
    found = set()
    for number in count(step=stride):
        root = tmp_path / str(number)
        shutil.copytree(start, root)
        was_killed = killed(killing(lambda root=root: save_at(root, 3, config), number))  # type: ignore[misc]
        found.add(is_whole(root, {before[-1], 3}))
        save_at(root, 4, config)
        assert not [name for name in names(root) if name.endswith((".part", ".gone"))]
        if not was_killed:
            break
    assert number > 10, "there are that many points at least"
    assert found == {before[-1], 3}


@pytest.mark.thorough
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, num_kills: int) -> None:
    draw = random.Random(0)
    save_at(tmp_path, 1)
    newest = 1

    def save_more() -> None:
        for step in count(newest + 1):
            save_at(tmp_path, step)

    for i in count():
        if (
            i >= num_kills and newest > 1
        ):  # they got somewhere, which may take longer on a busy machine
            break
        assert killed(save_more, after_s=draw.uniform(0.01, 0.2) * (1 + i / num_kills))
        steps = checkpoint.saved_steps(tmp_path)
        newest = is_whole(tmp_path, set(steps))
        assert newest == steps[0]
    save_at(tmp_path, newest + 1)
    assert names(tmp_path) == [f"step_{newest + i:08d}" for i in (0, 1)]


PAIR = make({"pp": 2}, pipeline={"schedule": "2bw"})


def save_beside(root: Path, newest: int) -> None:
    """One rank of two: the state goes on to be that of the next step as soon as it may."""
    Path(f"{root}-{os.getpid()}").touch()
    engine = Engine(JobPlan(PAIR), ProcessGrid(pp=2), torch.device("cpu"))
    saver = checkpoint.Saver(root, engine, "corpus")
    for step in count(newest + 1):
        fill(engine, step)
        saver.start()


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_kill_while_two_ranks_save_beside_training(tmp_path: Path, num_kills: int) -> None:
    """Locks of both, or of one, which the other may outlive for a while."""
    draw = random.Random(1)
    newest = 0
    root = tmp_path / "root"
    seen: set[int] = set()
    for i in count():
        if i >= num_kills and len(seen) > 2:
            break
        job = os.fork()
        if not job:
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                run_ranks(save_beside, 2, root, newest)  # raises when one is killed
            finally:
                os._exit(1)
        while len(ranks := [int(path.name.split("-")[1]) for path in tmp_path.glob("root-*")]) < 2:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5) * (1 + i / num_kills))
        if i % 2:
            os.kill(draw.choice(ranks), signal.SIGKILL)
            time.sleep(draw.uniform(0, 0.1))
        os.killpg(job, signal.SIGKILL)
        os.waitpid(job, 0)
        for path in tmp_path.glob("root-*"):
            path.unlink()
        if steps := checkpoint.saved_steps(root):
            newest = is_whole(root, set(steps[:1]), make({}, pipeline={"schedule": "2bw"}))
        seen.add(newest)


def test_irremovable_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_at(tmp_path, step)

    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", refuse)
    folders.prune(tmp_path, 2, CheckpointConfig(keep=1))
    assert checkpoint.saved_steps(tmp_path) == [2, 1]
