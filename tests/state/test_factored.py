"""sbpca sends weights of hybridpar's layers as factors, and weights of torch's layers whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import start
from ranks import run_ranks
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.config import UNCOMPRESSED, Config
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.placement import named_placements
from hybridpar.validate import problems

WIDTH = 8


class Both(nn.Module):
    """A layer of hybridpar and one of torch. outside: its forward also uses the weight of the
    former itself."""

    def __init__(self, axis: Axis, outside: bool, factory: dict[str, Any]):
        super().__init__()
        self.ours = hp.ColumnParallelLinear(
            WIDTH, WIDTH, axis, matrices=(((0, WIDTH),),), **factory
        )
        self.theirs = nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> Tensor:
        y: Tensor = self.theirs(self.ours(x).tanh())
        return y * self.ours.weight.sum() if self.outside else y


class First(nn.Linear):
    def forward(self, x: Any, batch: dict[str, Tensor], key: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"])


class Last(nn.Linear):
    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        return {
            "loss": (super().forward(x)[:, 0] - batch["y"]).square().sum() / batch["num_samples"]
        }


@dataclass(frozen=True)
class Mixed(hp.ModelSpec):
    outside: bool = False
    num_blocks = 3

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (WIDTH,)

    def block(self, number: int, build: Any) -> nn.Module:
        return (
            First(3, WIDTH)
            if number == 0
            else Last(WIDTH, 1)
            if number == 2
            else Both(build.axis, self.outside, build.factory)
        )

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=3).astype(np.float32)
        return {"x": x, "y": x[0]}


@dataclass(frozen=True)
class Plain(hp.SequentialSpec):
    """Layers of torch alone."""

    def layers(self) -> Any:
        yield nn.Linear(3, WIDTH)
        yield nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        yield nn.Linear(WIDTH, 1)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out[:, 0], batch["y"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return Mixed().sample(number, seed)


def make(model: hp.ModelSpec, gradients: str, zero: int = 0) -> Config:
    return hp.Trainer(
        model,
        parallel={"dp": 2, "zero": zero},
        train={"num_steps": 4, "micro_batch_size": 2, "dtype": "fp64"},
        pipeline={"num_microbatches": 2},
        optim={"lr": 1e-2},
        compression={
            "gradients": gradients,
            "gradients_smallest": 1,
            "gradients_rank": WIDTH,
            "gradients_blocks": 1,
        },
    ).config


def gradients_of(config: Config) -> tuple[set[str], dict[str, Tensor]]:
    """Parameters that this rank sends as factors, and the sums of the first batch."""
    engine, loader = start(config)
    found: list[dict[str, Tensor]] = []
    engine.train(
        loader,
        1,
        lambda step: None,
        lambda batch, gradients: found.append(
            {name: gradient.clone() for name, gradient in gradients.items()}
        ),
    )
    return set(engine.state.compression.packed), found[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 2])
def test_weights_of_torch_layers_are_sent_whole(zero: int) -> None:
    config = make(Mixed(), "sbpca", zero)
    whole = run_ranks(gradients_of, 2, replace(config, compression=UNCOMPRESSED))
    for (packed, sums), (_, expected) in zip(
        run_ranks(gradients_of, 2, config), whole, strict=True
    ):
        assert packed == {"blocks.1.ours.weight"}
        assert sums.keys() == expected.keys()
        for name in sums.keys() - packed:
            torch.testing.assert_close(sums[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("gradients", ["bf16", "dct", "powersgd"])
def test_other_methods_compress_them(gradients: str) -> None:
    for packed, _ in run_ranks(gradients_of, 2, make(Plain(), gradients)):
        assert "blocks.1.layer.0.weight" in packed


def test_a_model_without_any_factors_is_refused() -> None:
    (problem,) = problems(make(Plain(), "sbpca"), 2)
    assert (problem.field, problem.suggestion) == ("compression.gradients", "powersgd")
    assert not problems(make(Plain(), problem.suggestion), 2)
    assert not problems(make(Mixed(), "sbpca"), 2)


@pytest.mark.ranks
def test_a_weight_that_is_used_outside_its_layer_is_refused() -> None:
    with pytest.raises(
        Exception, match=r"requires the gradient of blocks.1.ours.weight as factors"
    ):
        run_ranks(gradients_of, 2, make(Mixed(outside=True), "sbpca"))


def test_layers_say_whether_they_give_factors() -> None:
    (block,) = build_blocks(Mixed(), Axis("tp"), [1]).values()
    assert {name: place.factored for name, _, place in named_placements(block)} == {
        "ours.weight": True,
        "ours.bias": False,
        "theirs.weight": False,
        "theirs.bias": False,
    }
