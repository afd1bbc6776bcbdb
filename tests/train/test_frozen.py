"""Frozen parameters keep their bits and take no state, on every grid, and are saved like any
other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import samples
from torch import Tensor, nn

import hybridpar as hp
from hybridpar import checkpoint
from hybridpar.config import Config, ParallelConfig
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.job.stage_split import stage_split
from hybridpar.prediction.predict import predict
from hybridpar.prediction.work import block_work
from hybridpar.train.engine import Engine
from hybridpar.validate import problems

WIDTH = 8


@dataclass(frozen=True)
class Partly(hp.SequentialSpec):
    """Four layers, of which some are frozen."""

    frozen: tuple[int, ...] = (0,)

    def layers(self) -> Any:
        for number in range(4):
            layer = nn.Linear(3 if number == 0 else WIDTH, 1 if number == 3 else WIDTH)
            layer.requires_grad_(number not in self.frozen)
            yield nn.Sequential(layer, nn.Tanh()) if number < 3 else layer

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out[:, 0], batch["y"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=3).astype(np.float32)
        return {"x": x, "y": x[0]}


@dataclass(frozen=True)
class Square(Partly):
    """Three layers of one size."""

    def layers(self) -> Any:
        for number in range(3):
            yield nn.Linear(64, 64).requires_grad_(number not in self.frozen)

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.ones(64, np.float32), "y": np.float32(1)}


def make(frozen: tuple[int, ...], **sections: Any) -> Config:
    sections = {
        "train": {"num_steps": 8, "micro_batch_size": 2, "dtype": "fp64"},
        "optim": {"lr": 1e-2},
    } | sections
    config = hp.Trainer(Partly(frozen), **sections).config
    return replace(config, parallel=replace(config.parallel, dp=1))


def engine_of(config: Config) -> Engine:
    return Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), torch.device("cpu"))


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.state.weights.full_weights().items()}


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon", "sgd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_frozen_parameters_keep_their_bits_and_take_no_state(optimizer: str, dtype: str) -> None:
    config = make(
        (0, 2),
        train={"num_steps": 4, "micro_batch_size": 2, "dtype": dtype},
        optim={"name": optimizer, "lr": 1e-2, "weight_decay": 0.1},
        pipeline={"schedule": "2bw", "num_microbatches": 2},
    )
    engine = engine_of(config)
    before = weights_of(engine)
    engine.train(samples(engine), 3, lambda step: None)
    changed = {
        layer_of(name)
        for name, weight in weights_of(engine).items()
        if not torch.equal(weight, before[name])
    }
    assert changed == {1, 3}
    keys = [key for key in engine.state.tensors() if "blocks.0." in key or "blocks.2." in key]
    assert len(keys) == 4  # once for both versions, and nothing else of them
    assert all(key.startswith("weights/3/") for key in keys)
    assert {layer_of(name) for name in engine.state.gradients.layout.names} == {1, 3}


def test_the_norm_and_the_update_are_those_of_torch() -> None:
    config = make(
        (0, 2),
        optim={
            "lr": 1e-2,
            "min_lr": 1e-2,
            "decay": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.1,
            "clip_grad": 0.0,
        },
        pipeline={"num_microbatches": 2},
    )
    engine = engine_of(config)
    start = weights_of(engine)
    loader = samples(engine)
    steps = []
    engine.train(loader, 5, steps.append)
    shapes = ((3, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
    net = [nn.Linear(*shape, dtype=torch.float64) for shape in shapes]
    for name, weight in start.items():
        getattr(net[layer_of(name)], name.rpartition(".")[2]).data.copy_(weight)
    for number, module in enumerate(net):
        module.requires_grad_(number not in (0, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": [net[n].weight for n in (1, 3)], "weight_decay": 0.1},
            {"params": [net[n].bias for n in (1, 3)], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=config.optim.betas,
        eps=config.optim.eps,
    )
    for batch in range(5):
        optimizer.zero_grad()
        for index in range(2):
            given = loader.microbatch(batch, index)
            x = given["x"].double()
            for number, module in enumerate(net):
                x = module(x)
                x = x.tanh() if number < 3 else x
            ((x[:, 0] - given["y"].double()).square().sum() / 4).backward()
        norm = torch.stack(
            [p.grad.norm() for module in net for p in module.parameters() if p.grad is not None]
        ).norm()
        assert steps[batch].grad_norm == pytest.approx(float(norm), rel=1e-9)
        optimizer.step()
    for name, weight in weights_of(engine).items():
        theirs = getattr(net[layer_of(name)], name.rpartition(".")[2])
        torch.testing.assert_close(weight, theirs.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"pp": 2}, {"pipeline": {"schedule": "2bw", "num_microbatches": 4}}),
        (
            {"pp": 2},
            {
                "pipeline": {
                    "schedule": "1f1b",
                    "num_microbatches": 4,
                    "split_backward": True,
                    "zero_bubble": True,
                }
            },
        ),
        (
            {"pp": 2},
            {
                "memory": {"host_optimizer": True},
                "pipeline": {"schedule": "2bw", "num_microbatches": 4},
            },
        ),
        ({"dp": 2}, {"parallel": {"zero": 2}}),
        ({"dp": 2}, {"parallel": {"zero": 3}}),
        (
            {"pp": 2, "dp": 2},
            {"parallel": {"zero": 3}, "pipeline": {"schedule": "2bw", "num_microbatches": 4}},
        ),
        ({"dp": 2}, {"parallel": {"zero": 3}, "memory": {"budget": 40000}}),
        ({"dp": 2}, {"memory": {"budget": 40000}, "pipeline": {"recompute": "all"}}),
    ],
)
def test_frozen_stages_on_grids(grid: dict[str, int], sections: dict[str, Any]) -> None:
    for frozen in ((0, 1), (1, 3)):  # the whole first stage of two; a layer of each
        assert hp.Trainer(Partly(frozen), **sections).verify(grid, num_batches=3).ok


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("before", "after"), [((0, 2), (2,)), ((2,), (0, 2)), ((0, 2), (0, 2))])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_with_other_parameters_frozen(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], dtype: str
) -> None:
    sections = {
        "train": {"num_steps": 8, "micro_batch_size": 2, "dtype": dtype},
        "pipeline": {"schedule": "2bw", "num_microbatches": 2},
    }
    one = engine_of(make(before, **sections))
    one.train(samples(one), 3, lambda step: None)
    checkpoint.save(tmp_path, one, "")
    config = make(after, **sections)
    two = engine_of(config)
    two.config = one.config  # the same model to a checkpoint: in practice code says what is frozen
    assert checkpoint.resume(tmp_path, two, "", print) == 3
    saved = weights_of(one)
    loaded = weights_of(two)
    for name, weight in saved.items():
        expected = (
            weight.to(torch.bfloat16).to(weight.dtype)
            if dtype == "bf16" and layer_of(name) in after
            else weight
        )
        assert torch.equal(loaded[name].to(weight.dtype), expected), name
    two.train(samples(two), 2, lambda step: None)
    changed = {
        layer_of(n) for n, weight in weights_of(two).items() if not torch.equal(weight, loaded[n])
    }
    assert changed == {0, 1, 2, 3} - set(after)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have at least one parameter to train"):
        hp.Trainer(Partly((0, 1, 2, 3))).verify({"tp": 1}, num_batches=1)
    assert not problems(make((0, 1, 2)), 1)


def test_predicted_memory_of_the_state_is_what_it_takes() -> None:
    config = make((0, 2), train={"num_steps": 4, "micro_batch_size": 2, "dtype": "bf16"})
    state = engine_of(config).state
    state.allocate()
    (predicted,) = predict(JobPlan(config), device=torch.device("cpu"))
    for column, num_bytes in state.num_bytes().items():
        assert getattr(predicted, column) == num_bytes, column


def test_costs_count_trained_parameters_alone() -> None:
    cpu = torch.device("cpu")
    assert [block_work(make((0, 2)), number, cpu).parameters for number in range(4)] == [
        0,
        72,
        0,
        9,
    ]
    for frozen, sizes in (
        (0, [2, 1]),
        (2, [1, 2]),
    ):  # as much work either way, but not as much state
        config = Config(model=Square((frozen,)), parallel=ParallelConfig(pp=2))
        assert [len(blocks) for blocks in stage_split(config)] == sizes
