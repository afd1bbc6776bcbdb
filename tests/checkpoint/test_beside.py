"""A save beside training: what is written is the state at which it began, and failures come to all
ranks."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.grids import engines, fill
from checkpoint.test_reshard import make
from checkpoint.test_resume import make_config
from engines import start
from ranks import run_ranks
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint import background, folders, handover, snapshot
from hybridpar.checkpoint.format import part
from hybridpar.checkpoint.format.manifest import ShardFile
from hybridpar.checkpoint.snapshot import Snapshot
from hybridpar.comm import barrier
from hybridpar.config import Config, from_mapping
from hybridpar.errors import CheckpointError
from hybridpar.flight import NO_FLIGHT, Flight, Record
from hybridpar.grid import sizes_of
from hybridpar.train.engine import StepResult


def slowly(action: Callable[..., Any], seconds: float = 0.1) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return action(*args)

    return slow


def train_on(config: Config, root: Path) -> None:
    """Steps go on at once and change all there is; copying begins late and writing later still."""
    snapshot._copy = slowly(snapshot._copy)
    part.write_tensors = slowly(part.write_tensors)
    steps: list[list[StepResult]] = [[], []]
    for beside in (False, True):
        engine, loader = start(config)
        saver = checkpoint.Saver(root / str(beside), engine, "corpus")
        for num_steps in (2, 2, 3):
            engine.train(loader, num_steps, steps[beside].append)
            saver.start(1.5, beside=beside)
            folder = saver.settle() if not beside or engine.batches_done == 7 else None
        assert folder == root / str(beside) / "step_00000007"
        assert saver.settle() is None, "nothing is under way"
    assert steps[0] == steps[1]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({"pipeline": {"schedule": "2bw"}}, "bf16"),
        ({"pipeline": {"schedule": "2bw"}, "optim": {"name": "sgd"}}, "fp32"),
        (
            {
                "pipeline": {"schedule": "2bw"},
                "parallel": {"zero": 1, "dp": 2, "pp": 1},
                "optim": {"staleness": "prediction"},
            },
            "fp32",
        ),
        ({"pipeline": {"schedule": "pipedream"}}, "fp32"),
    ],
    ids=str,
)
def test_training_on_changes_no_bit_of_what_is_saved(
    tmp_path: Path, sections: dict[str, Any], dtype: str
) -> None:
    config = from_mapping(sections | {"checkpoint": {"keep": 3}}, make_config(dtype=dtype))
    run_ranks(train_on, 2, config, tmp_path)
    waited, beside = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "False", tmp_path / "True")
    )
    assert len(waited) == 3 * 3
    assert waited == beside


def test_a_copy_stays_and_its_memory_is_used_again() -> None:
    tensors: Mapping[str, Tensor] = {
        "a": torch.arange(5.0),
        "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "c": torch.tensor(3.0).double(),
        "d": torch.empty(0),
    }
    memory = Snapshot()
    for _ in range(2):
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        copies = memory.begin(tensors)()
        for tensor in tensors.values():
            tensor += 1
        assert copies.keys() == expected.keys()
        assert all(torch.equal(copies[name], tensor) for name, tensor in expected.items())
        assert memory.num_bytes == 4 * 64 - 64, "each at a multiple of 64 bytes"
        where = {name: copy.data_ptr() for name, copy in copies.items()}
    assert where == {name: copy.data_ptr() for name, copy in memory.begin(tensors)().items()}


# -- failures


Outcome = tuple[str, list[str], list[int]]


def meet_a_full_disk(root: Path, failing: int, wait: bool) -> Outcome:
    """In the second save, on one rank; then there is room again. What is said, what is left, what
    is saved at last."""
    engine, loader = start(make_config("2bw"))
    saver = checkpoint.Saver(root, engine, "corpus")
    write = part.write_tensors

    def fail(*args: Any) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2, 3):
        engine.train(loader, 1, lambda step: None)
        part.write_tensors = fail if (step, engine.grid.rank) == (2, failing) else write
        saver.start()
        try:
            while saver.settle(wait=wait) is None:
                pass
        except CheckpointError as error:
            said = str(error)
            barrier(engine.grid.world)
            left = sorted(path.name for path in root.iterdir())
            barrier(engine.grid.world)
    return said, left, checkpoint.saved_steps(root)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("failing", "wait"), [(0, True), (1, False)])
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing(
    tmp_path: Path, failing: int, wait: bool
) -> None:
    first, second = run_ranks(meet_a_full_disk, 2, tmp_path, failing, wait)
    assert first == second
    said, left, saved = first
    assert said.startswith(
        f"rank {failing} (stage {failing}, replica 0, tensor part 0) cannot write the checkpoint: "
    )
    assert "No space left on device; it takes 7" in said
    assert "e-05 GB, beside those that are kept" in said
    assert left == ["step_00000001"]
    assert saved == [3, 1]


def test_without_room_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = engines(make({}))
    fill(engine, 4)
    checkpoint.save(tmp_path, engine, "corpus")
    monkeypatch.setattr(
        folders.shutil, "disk_usage", lambda path: SimpleNamespace(total=10, free=5)
    )
    with pytest.raises(
        CheckpointError, match=r"5e-09 GB are free: .*; it takes .* checkpoint.keep = 1"
    ):
        checkpoint.save(tmp_path, engine, "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]
    monkeypatch.setattr(
        folders.shutil, "disk_usage", lambda path: SimpleNamespace(total=0, free=0)
    )  # does not say
    checkpoint.save(tmp_path, engine, "corpus")


def test_errors_not_of_the_disk_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = engines(make({}))
    fill(engine, 4)
    monkeypatch.setattr(part, "write_tensors", lambda *args: 1 / 0)
    with pytest.raises(
        CheckpointError, match="cannot write the checkpoint: ZeroDivisionError"
    ) as error:
        checkpoint.save(tmp_path, engine, "corpus")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert not list(tmp_path.iterdir())


def test_a_save_and_a_load_say_how_far_they_have_come(tmp_path: Path) -> None:
    """So that a slow disk is no hang, however large the state is."""
    config = from_mapping(
        {"faults": {"save_timeout_s": 7.0}, "checkpoint": {"read_back": True}}, make_config(pp=1)
    )
    (engine, _), seen = start(config), []
    flight = engine.grid.flight = Flight(tmp_path / "flight")

    def note() -> Record:
        record = flight.read()
        assert record is not None
        seen.append(record)
        return record

    def noted(write: background.Write) -> background.Write:
        def write_and_note(tensors: dict[str, Tensor]) -> handover.Written:
            note()
            written = write(tensors)
            note()
            return written

        return write_and_note

    saver = checkpoint.Saver(tmp_path / "root", engine, "corpus", flight=flight)
    saver.write_with(noted)
    saver.start(beside=False)
    saver.settle()
    note()
    writing = "writing the checkpoint of step 0", 7.0
    assert [(one.phase, one.limit_s) for one in seen] == [writing, writing, ("idle", 0.0)]
    num_tensors = len(engine.state.tensors())
    assert seen[1].count - seen[0].count >= num_tensors
    assert seen[2].count - seen[1].count >= num_tensors, "it is read back"
    checkpoint.resume(tmp_path / "root", engine, "corpus", print)
    assert note().count - seen[2].count >= num_tensors


def test_without_the_note_of_a_rank_nothing_is_published(tmp_path: Path) -> None:
    """A killed rank leaves no note. The others leave theirs and continue."""
    config = make({"pp": 2, "dp": 2, "zero": 1})
    shards = [
        ShardFile(where, (2 * where["pp"], 2 * where["pp"] + 2), 8, "00" * 4)
        for where in handover.writers(sizes_of(config.parallel), config.replicas_differ)
    ]
    assert len(shards) == 4
    for shard in shards[:-1]:
        handover.leave(tmp_path, (shard, (4, 5)))
    task = background.Task(
        tmp_path,
        lambda stop: Path(str(handover.collect(tmp_path, config, stop))),
        background.Note(NO_FLIGHT, 1, 60.0),
        gives_way=True,
    )
    task.start()
    task.join(0.3)
    assert task.is_alive()
    task.given_up.set()
    task.join()
    assert (task.error, task.folder) == (None, None)
    handover.leave(tmp_path, (shards[-1], (4, 5)))
    assert handover.collect(tmp_path, config, Event()) == [(shard, (4, 5)) for shard in shards]
    assert not list(tmp_path.iterdir())
