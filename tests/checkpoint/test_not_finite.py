"""A state that is not finite is no checkpoint: it is neither written nor loaded, and the one before
stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.exchange import OURS, save_ours
from checkpoint.test_checkpoint import one_rank, save_steps
from engines import gpt, start
from ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.format import tensorfile
from hybridpar.checkpoint.format.tensorfile import TensorFile, write_tensors
from hybridpar.checkpoint.huggingface import export_folder
from hybridpar.checkpoint.stages import load_stage
from hybridpar.config import Config
from hybridpar.errors import CheckpointError, NotFiniteError
from hybridpar.grid import Axis
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.engine import StepResult

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHUNK = 64
"""Bytes under one checksum here, so that a small tensor has several chunks."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70])
def test_no_file_is_written_or_read_with_such_a_number(
    tmp_path: Path, dtype: torch.dtype, value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile, "CHUNK", CHUNK)
    healthy = torch.full((71,), torch.finfo(dtype).max, dtype=dtype)
    healthy[1], healthy[2] = -healthy[0], torch.finfo(dtype).smallest_normal / 2
    path = tmp_path / "file"
    write_tensors(path, {"x": healthy, "empty": torch.empty(0, dtype=dtype)}, {})
    TensorFile(path).check()
    bad = healthy.clone()
    bad[place] = value
    with pytest.raises(NotFiniteError, match="bad is not finite"):
        write_tensors(path, {"x": healthy, "bad": bad}, {})
    save_file({"x": healthy, "bad": bad}, path)
    file, target = TensorFile(path), torch.empty(71, dtype=dtype)
    file.read("x", np.array([[0, 0, 71]]), target)
    for read in (file.check, lambda: file.read("bad", np.array([[place, 0, 1]]), target)):
        with pytest.raises(
            NotFiniteError,
            match=f"{path}: bad has NaN or infinite values; use an earlier checkpoint",
        ):
            read()


# -- saves


def make(parallel: dict[str, int], **sections: dict[str, Any]) -> Config:
    return gpt(
        (3, 24, 4, 6, 37), {"parallel": {"dp": 1} | parallel, "checkpoint": {"keep": 1}}, sections
    )


def save_a_bad_state(
    config: Config, root: Path, rank: int, pick: Callable[[str], bool], beside: bool
) -> list[Any]:
    """Saves, trains on, spoils a number of one tensor on one rank and saves; what was said, with
    the step."""
    engine, loader = start(config)
    saver = checkpoint.Saver(root, engine, "corpus")
    for spoils in (False, True):
        engine.train(loader, 2, lambda step: None)
        if spoils and engine.grid.rank == rank:
            tensor = next(tensor for key, tensor in engine.state.tensors().items() if pick(key))
            with engine.state.memory.writing(tensor):
                tensor.view(-1)[-1:].fill_(math.inf)
        saver.start(beside=beside)
        if beside:
            engine.train(loader, 1, lambda step: None)
        try:
            saver.settle()
        except NotFiniteError as error:
            return [str(error), error.step]
    return []


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("sections", "rank", "kind"),
    [
        ({"parallel": {"pp": 2}}, 1, "weights/"),
        ({"parallel": {"tp": 2}, "train": {"dtype": "bf16"}}, 1, "master/"),
        ({"parallel": {"dp": 2, "zero": 1}}, 1, "optimizer/"),
        ({"parallel": {"dp": 3, "zero": 3}}, 2, "shares/"),
        (
            {"parallel": {"dp": 2}, "memory": {"host_optimizer": True}, "train": {"dtype": "fp16"}},
            0,
            "master/",
        ),
        ({"parallel": {"dp": 2}, "memory": {"budget": 150_000}}, 0, "weights/"),
        ({"parallel": {"dp": 2}, "compression": {"gradients": "int8"}}, 1, "feedback/"),
        ({"parallel": {"sites": 2}}, 1, "weights/"),
        ({"parallel": {"sites": 2}}, 0, "anchor/"),
    ],
    ids=str,
)
def test_all_ranks_refuse_the_state_of_one(
    tmp_path: Path, sections: dict[str, Any], rank: int, kind: str, beside: bool
) -> None:
    config = make(**sections)
    beside = beside and not config.memory.budget  # with which a run waits
    said = run_ranks(
        save_a_bad_state, config.parallel.num_ranks, config, tmp_path, rank, Starts(kind), beside
    )
    assert said == [said[0]] * config.parallel.num_ranks
    text, step = said[0]
    assert text.startswith(kind)
    assert text.endswith(" is not finite")
    assert step == (5 if beside else 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"], (
        "with checkpoint.keep = 1"
    )


class Starts:
    """Says whether a key is of a kind; it can be sent to other processes."""

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, key: str) -> bool:
        return key.startswith(self.kind)


@pytest.mark.parametrize(
    ("dtype", "optim", "key"),
    [
        ("fp16", {"lr": 1e6}, r"weights/1/"),
        ("fp32", {"name": "sgd", "lr": 1e39}, r"weights/1/"),
        ("fp32", {"clip_grad": 0.0, "lr": 1e-3, "loss": 1e25}, r"optimizer/.*exp_avg_sq"),
    ],
    ids=str,
)
def test_an_update_that_overflows(
    tmp_path: Path, dtype: str, optim: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are finite: rounding of a master to fp16, a step of infinite length, a square
    beyond fp32."""
    optim = dict(optim)
    size = optim.pop("loss", 1.0)
    monkeypatch.setattr(BatchPolicy, "loss_gradient", lambda self, action: size)
    engine, loader = start(
        make({}, train={"dtype": dtype}, optim=optim | {"loss_scale": 1.0, "decay": "constant"})
    )
    steps: list[StepResult] = []
    engine.train(loader, 1, steps.append)
    assert math.isfinite(steps[0].loss)
    assert math.isfinite(steps[0].grad_norm)
    assert not steps[0].skipped
    with pytest.raises(NotFiniteError, match=f"{key}.* is not finite"):
        checkpoint.save(tmp_path, engine, "corpus")
    assert not list(tmp_path.iterdir())


# -- checkpoints that an older version has saved


def spoil_newest(root: Path, num_steps: int) -> None:
    """Saves checkpoints of one process, the last of them with a weight that is NaN, as older
    versions did."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr(tensorfile, "_is_finite", lambda chunk, dtype: True)
        engine, loader = start(one_rank())
        for step in range(1, num_steps + 1):
            engine.train(loader, 1, lambda step: None)
            if step == num_steps:
                weight: Tensor = engine.state.tensors()[f"weights/{step}/blocks.1.mlp.up.weight"]
                weight.view(-1)[3].fill_(math.nan)
            checkpoint.save(root, engine, "corpus")


def test_such_a_checkpoint_is_passed_over_by_name(tmp_path: Path) -> None:
    spoil_newest(tmp_path, 3)
    engine, _ = start(one_rank())
    said: list[str] = []
    assert checkpoint.resume(tmp_path, engine, "corpus", said.append) == 2
    assert checkpoint.newest(tmp_path, said.append) == tmp_path / "step_00000002"
    name = f"{tmp_path}/step_00000003/pp0-tp0.safetensors: weights/3/blocks.1.mlp.up.weight"
    assert (
        said == [f"{name} has NaN or infinite values; use an earlier checkpoint: passed over"] * 2
    )
    spoil_newest(tmp_path / "alone", 1)
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints is complete"):
        checkpoint.resume(tmp_path / "alone", engine, "corpus", said.append)


@pytest.mark.parametrize(
    "use",
    [
        checkpoint.load_full,
        lambda folder: export_folder(folder, folder.parent.parent.parent / "theirs"),
        lambda folder: checkpoint.start_from(folder, start(one_rank())[0]),
        lambda folder: load_stage(checkpoint.FullWeights(folder), Axis("tp"), range(1, 2)),
    ],
    ids=["load", "export", "start_from", "generate"],
)
def test_nobody_takes_weights_from_it(tmp_path: Path, use: Callable[[Path], Any]) -> None:
    spoil_newest(tmp_path / "run" / "checkpoints", 2)
    with pytest.raises(
        CheckpointError, match=r"weights/2/blocks\.1\.mlp\.up\.weight has NaN or infinite values"
    ):
        use(tmp_path / "run" / "checkpoints" / "step_00000002")
    assert not (tmp_path / "theirs").exists()


def test_an_import_of_such_weights_leaves_nothing(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "checkpoints", OURS["gpt2"])
    config, weights = checkpoint.load_full(folder)
    weights["blocks.1.mlp.up.bias"][0] = math.inf
    placements = checkpoint.FullWeights(folder).placements
    with pytest.raises(NotFiniteError, match=r"weights/0/blocks\.1\.mlp\.up\.bias is not finite"):
        checkpoint.save_weights(tmp_path / "other", config, weights, placements)
    assert checkpoint.saved_steps(tmp_path / "other") == []


def test_a_healthy_run_is_saved_as_before(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    assert checkpoint.newest(tmp_path, print) == tmp_path / "step_00000002"
