"""Weights that start at zero and whose gradient is zero in exact arithmetic: rounding errors are no
divergence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from hybridpar import SequentialSpec
from hybridpar.config import (
    Config,
    DataConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.verify.run import Disturbance, compare, run_grid, verify

KEY_BIAS = "blocks.1.layer.k.bias"


class Attention(nn.Module):
    """Attention whose keys have a bias, which no score depends on."""

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        nn.init.zeros_(self.k.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@dataclass(frozen=True)
class KeyBias(SequentialSpec):
    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(3, 16)
        yield Attention(16)
        yield nn.Linear(16, 1)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out.mean(1)[:, 0], batch["y"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=(6, 3)).astype(np.float32)
        return {"x": x, "y": np.float32(x[0, 0] * x[1, 1])}


def make(optimizer: str = "adamw", schedule: str = "1f1b", **parallel: int) -> Config:
    return Config(
        KeyBias(),
        ParallelConfig(**{"dp": 1, **parallel}),
        PipelineConfig(schedule, 2),
        OptimConfig(optimizer, lr=1e-2),
        TrainConfig(5, 2, "fp64"),
        DataConfig(split=0.0),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("optimizer", "schedule", "grid"),
    [
        ("adamw", "1f1b", {"dp": 2}),
        ("adamw", "2bw", {"pp": 2}),
        ("lamb", "1f1b", {"dp": 2}),
        ("muon", "1f1b", {"pp": 2}),
    ],
)
def test_rounding_errors_that_an_optimizer_amplifies_are_no_divergence(
    optimizer: str, schedule: str, grid: dict[str, int]
) -> None:
    report = verify(make(optimizer, schedule), grid, 4, Disturbance(resume_at=2))
    assert report.ok, report.first_divergence


@pytest.mark.ranks
def test_a_divergence_of_such_a_weight_is_found() -> None:
    config = make(dp=2)
    run = run_grid(config, 3)
    assert compare(config, run, 3).ok
    bias = run.weights[1][KEY_BIAS]
    assert 0 < bias.abs().max() < 1e-9
    bias *= 1.001  # a wrong update of what consists of rounding errors
    found = compare(config, run, 3).first_divergence
    assert found is not None
    assert (found.batch, found.what, found.name) == (1, "weight", KEY_BIAS)
    bias /= 1.001
    run.gradients[2][KEY_BIAS][0] += 1e-10  # a wrong gradient, though a small one
    found = compare(config, run, 3).first_divergence
    assert found is not None
    assert (found.batch, found.what, found.name) == (2, "gradient", KEY_BIAS)
