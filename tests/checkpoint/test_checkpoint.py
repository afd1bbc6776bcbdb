"""A checkpoint is whole or passed over, and goes on only in the run that it is of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_resume import make_config
from engines import start
from ranks import run_ranks

import hybridpar
from hybridpar import checkpoint
from hybridpar.checkpoint.compatible import CONTINUABLE
from hybridpar.checkpoint.format.manifest import ShardFile
from hybridpar.checkpoint.format.shards import SavedShard, header_of
from hybridpar.checkpoint.format.tensorfile import write_tensors
from hybridpar.config import Config, from_mapping
from hybridpar.errors import CheckpointError
from hybridpar.nn.placement import Init, Placement, Shard


def one_rank(schedule: str = "1f1b") -> Config:
    return make_config(schedule, pp=1)


def save_steps(root: Path, num_steps: int) -> None:
    engine, loader = start(one_rank())
    for _ in range(num_steps):
        engine.train(loader, 1, lambda step: None)
        checkpoint.save(root, engine, "corpus")


SHARD = "pp0-tp0.safetensors"
MANIFEST = "manifest.json"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_in_the_header(path: Path) -> None:
    """A digit of a placement, which stays valid JSON."""
    flip(path, path.read_bytes().index(b"[37, ") + 2)


def change_a_number(path: Path) -> None:
    """Change the type of the updates to another possible one."""
    path.write_text(path.read_text().replace('"num_updates": 3', '"num_updates": 2'))


def empty(path: Path) -> None:
    path.write_text("{")


@pytest.mark.parametrize(
    ("damage", "file", "says"),
    [
        (cut, SHARD, "bytes, but must have"),
        (flip, SHARD, "the checksum of its bytes 0 to"),
        (flip_in_the_header, SHARD, "the checksum of its header"),
        (Path.unlink, SHARD, "No such file"),
        (empty, MANIFEST, "is damaged"),
        (change_a_number, MANIFEST, "its checksum"),
        (Path.unlink, MANIFEST, "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], file: str, says: str
) -> None:
    save_steps(tmp_path, 3)
    damage(tmp_path / "step_00000003" / file)
    engine, _ = start(one_rank())
    said: list[str] = []
    assert checkpoint.resume(tmp_path, engine, "corpus", said.append) == 2
    assert engine.batches_done == 2
    assert len(said) == 1
    assert said[0].startswith(str(tmp_path / "step_00000003" / file))
    assert says in said[0]
    assert said[0].endswith("passed over")
    assert checkpoint.newest(tmp_path, said.append) == tmp_path / "step_00000002"
    assert said[1] == said[0]
    if file == SHARD:
        damage(tmp_path / "step_00000002" / file)
        with pytest.raises(CheckpointError, match="none of the 2 checkpoints is complete"):
            checkpoint.resume(tmp_path, engine, "corpus", said.append)


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    flip(tmp_path / "step_00000003" / SHARD)
    engine, loader = start(one_rank())
    checkpoint.resume(tmp_path, engine, "corpus", print)
    engine.train(loader, 1, lambda step: None)
    checkpoint.save(tmp_path, engine, "corpus")
    fresh, _ = start(one_rank())
    assert checkpoint.resume(tmp_path, fresh, "corpus", print) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    engine, _ = start(one_rank())
    assert checkpoint.resume(tmp_path / "none", engine, "corpus", print) == 0
    with pytest.raises(CheckpointError, match=r"no complete checkpoint$"):
        checkpoint.newest(tmp_path, print)
    (tmp_path / "step_00000004").mkdir()
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint; of the newest, .*step_00000004.*manifest"
    ):
        checkpoint.newest(tmp_path, print)


def test_another_model_is_refused_field_by_field(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    config = one_rank()
    other = replace(config, model=replace(config.model, hidden_size=24, num_layers=3))
    engine, _ = start(other)
    before = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
    with pytest.raises(
        CheckpointError, match=r"2 there and 3 here; model.hidden_size is 12 there and 24"
    ):
        checkpoint.resume(tmp_path, engine, "corpus", print)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state.tensors().items())


@pytest.mark.parametrize(
    ("change", "named", "wanted"),
    [
        ({"model": {"dropout": 0.3}}, (), ["model.dropout"]),
        (
            {"model": {"dropout": 0.3, "label_smoothing": 0.1}, "train": {"micro_batch_size": 4}},
            ("model.dropout",),
            ["model.dropout", "model.label_smoothing", "train.micro_batch_size"],
        ),
        (
            {"pipeline": {"num_microbatches": 1}},
            ("data.corpus",),
            ["data.corpus", "pipeline.num_microbatches"],
        ),
        ({"train": {"seed": 5}}, (), ["train.seed"]),
    ],
)
def test_a_refusal_names_what_would_allow_it(
    change: dict[str, Any], named: tuple[str, ...], wanted: list[str]
) -> None:
    config = one_rank()
    other = from_mapping(change, from_mapping({"train": {"continue_with": named}}, config))
    with pytest.raises(
        CheckpointError, match=re.escape(f"train.continue_with = {json.dumps(wanted)}.")
    ):
        checkpoint.check_compatible(config, other, Path("run"))
    allowed = from_mapping({"train": {"continue_with": tuple(wanted)}}, other)
    checkpoint.check_compatible(config, allowed, Path("run"))


def test_other_data_under_the_same_name_and_another_mix_are_named() -> None:
    config = one_rank()
    mixed = from_mapping({"data": {"corpus": ("stdlib", "a.txt"), "weights": (1.0, 2.0)}}, config)
    for other, keys in ((config, ["data.corpus"]), (mixed, ["data.corpus", "data.weights"])):
        with pytest.raises(
            CheckpointError, match=f"a version of hybridpar .*{re.escape(json.dumps(keys))}"
        ):
            checkpoint.check_compatible(config, other, Path("run"), ("old", "new"))
        checkpoint.check_compatible(config, other, Path("run"), ("same", "same"))
        named = from_mapping({"train": {"continue_with": tuple(keys)}}, other)
        checkpoint.check_compatible(config, named, Path("run"), ("old", "new"))


def test_another_model_is_refused_whatever_is_named() -> None:
    config = one_rank()
    other = from_mapping(
        {"model": {"num_layers": 3}, "train": {"continue_with": CONTINUABLE}}, config
    )
    with pytest.raises(
        CheckpointError, match=r"is 2 there and 3 here \(its weights belong to that model"
    ):
        checkpoint.check_compatible(config, other, Path("run"))


@pytest.mark.parametrize(
    ("dp", "micro_batches", "micro_batch", "says"),
    [
        (
            2,
            2,
            2,
            r"batches of 4 samples \(micro_batch_size 2 x num_microbatches 2 x dp 1\), this "
            r"configuration has 8 samples .*; try pipeline.num_microbatches = 1",
        ),
        (1, 2, 3, "try train.micro_batch_size = 1, pipeline.num_microbatches = 4"),
        (3, 2, 2, "try a parallel.dp that divides 4"),
    ],
)
def test_another_batch_size_is_refused_saying_how_to_keep_it(
    dp: int, micro_batches: int, micro_batch: int, says: str
) -> None:
    config = one_rank()
    other = from_mapping(
        {
            "parallel": {"dp": dp},
            "pipeline": {"num_microbatches": micro_batches},
            "train": {"micro_batch_size": micro_batch},
        },
        config,
    )
    with pytest.raises(CheckpointError, match=says):
        checkpoint.check_compatible(config, other, Path("run"))


def test_changes_allowed_between_two_runs() -> None:
    config = one_rank()
    for change in (
        {"train": {"num_steps": 99, "threads": 3}, "optim": {"lr": 1.0, "staleness": "nesterov"}},
        {"parallel": {"tp": 2, "pp": 2, "dp": 2, "zero": 1}, "pipeline": {"num_microbatches": 1}},
        {"pipeline": {"schedule": "2bw", "early_switch": 1, "sync_steps": 3}},
    ):
        checkpoint.check_compatible(config, from_mapping(change, config), Path("run"))
    for section, change in (
        ("train", {"seed": 5}),
        ("optim", {"name": "sgd"}),
        ("train", {"dtype": "bf16"}),
    ):
        other = replace(config, **{section: replace(getattr(config, section), **change)})
        with pytest.raises(CheckpointError, match=f"{section}.{next(iter(change))} is"):
            checkpoint.check_compatible(config, other, Path("run"))


def test_a_position_table_may_be_named_or_not() -> None:
    """Runs from before model.max_positions have a table of seq_length rows."""
    config = one_rank()
    length = config.model.seq_length
    named = from_mapping({"model": {"max_positions": length}}, config)
    checkpoint.check_compatible(config, named, Path("run"))
    with pytest.raises(
        CheckpointError, match=rf"model\.max_positions is {length} there and {length + 1} here"
    ):
        checkpoint.check_compatible(
            config, from_mapping({"model": {"max_positions": length + 1}}, config), Path("run")
        )
    rotary = from_mapping({"model": {"position": "rotary"}}, config)
    checkpoint.check_compatible(
        rotary, from_mapping({"model": {"max_positions": length + 1}}, rotary), Path("run")
    )


def test_the_manifest_tells_what_a_later_reshard_needs(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    plain = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    assert plain["grid"] == {"tp": 1, "pp": 1, "dp": 1}
    assert plain["shards"][0].keys() == {
        "name",
        "pp",
        "tp",
        "dp",
        "blocks",
        "num_bytes",
        "checksums",
    }
    assert plain["data"] == {"corpus": "corpus", "samples": 4}
    assert plain["versions"] == {"hybridpar": hybridpar.__version__, "torch": torch.__version__}
    assert checkpoint.read_manifest(tmp_path / "step_00000001").config == one_rank()


def test_placements_survive_a_file(tmp_path: Path) -> None:
    init = Init("zeros")
    parts = {"blocks.1.b": (2, 4)}
    placements = {
        "blocks.0.a": Placement((6, 4), init, Shard(0, (((0, 2), (4, 5)), ((2, 4), (5, 6))))),
        "blocks.1.b": Placement((5,), init, weight_decay=False),
        "blocks.2.c": Placement((3, 3), init, tied="words"),
    }
    size, digest = write_tensors(tmp_path / "pp0-tp1.safetensors", {}, header_of(placements, parts))
    shard = SavedShard(
        tmp_path, ShardFile({"pp": 0, "tp": 1, "dp": 0}, (0, 3), size, digest), make_config(tp=2)
    )
    assert shard.placements == placements
    assert shard.parts == parts


def damage_one_rank(root: Path) -> tuple[int, list[str]]:
    config = make_config("2bw")
    engine, loader = start(config)
    for _ in range(2):
        engine.train(loader, 1, lambda step: None)
        checkpoint.save(root, engine, "corpus")
    if engine.grid.rank == 1:
        path = root / "step_00000002" / "pp1-tp0.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    fresh, _ = start(config)
    said: list[str] = []
    return checkpoint.resume(root, fresh, "corpus", said.append), said


@pytest.mark.ranks
def test_all_ranks_pass_over_what_one_of_them_cannot_read(tmp_path: Path) -> None:
    for step, said in run_ranks(damage_one_rank, 2, tmp_path):
        assert step == 1
        assert "pp1-tp0" in said[0]


def fail_to_write(root: Path) -> str:
    engine, _ = start(make_config("1f1b"))
    try:
        checkpoint.save(root / "in_the_way" / "checkpoints", engine, "corpus")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_checkpoint_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "in_the_way").write_text("a file")
    first, second = run_ranks(fail_to_write, 2, tmp_path)
    assert first == second
    assert "rank 0 (stage 0" in first
    assert "cannot write the checkpoint" in first
