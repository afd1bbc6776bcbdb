"""Biases of a router balance skewed data in training, alike on every grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from engines import start
from ranks import run_ranks
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.config import Config, from_mapping
from hybridpar.train.batches.expert_loads import max_violation

TOKENS = 32
FEATURES = 16
RATE = 0.001
UPDATES = 220


class Tokens(nn.Module):
    def forward(self, x: Tensor | None, batch: Any, key: Any) -> Tensor:
        return batch["x"]


class Experts(nn.Module):
    def __init__(self, rate: float, build: hp.Build):
        super().__init__()
        router = hp.RouterOptions(2, "sigmoid", bias_rate=rate)
        options = hp.ExpertOptions(FEATURES, 8, 12, router=router, init_std=0.25)
        self.layer = hp.MixtureOfExperts(build.axis, options, ep=build.ep, **build.factory)
        self.ranks = build.context.axis

    def forward(self, x: Tensor, batch: Any, key: Any) -> Tensor:
        return self.layer(x, None, hp.sequence_shares(batch, self.ranks))


class Loss(nn.Module):
    def forward(self, x: Tensor, batch: Any, key: Any) -> dict[str, Tensor]:
        return {"loss": (x - batch["x"]).square().sum() / batch["num_targets"]}


@dataclass(frozen=True)
class Balanced(hp.ModelSpec):
    """A layer of experts on tokens that have a direction in common, which some experts prefer."""

    rate: float = 0.0
    context_parallel = True
    max_tp = 2
    num_blocks = 3
    tokens_per_sample = TOKENS

    @property
    def routed_experts(self) -> hp.RoutedExperts | None:
        return hp.RoutedExperts(8, bias_rate=self.rate, blocks=(1,))

    def block(self, number: int, build: hp.Build) -> nn.Module:
        return (Tokens(), Experts(self.rate, build), Loss())[number]

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return (TOKENS, FEATURES)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return TOKENS

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        noise = np.random.default_rng([number, seed]).standard_normal((TOKENS, FEATURES))
        return {"x": (noise + 1).astype(np.float32), "labels": np.zeros(TOKENS, np.int64)}


def config(rate: float, **parallel: int) -> Config:
    """1,024 tokens an update, on any grid."""
    parallel = {"dp": 1} | parallel
    sections: dict[str, Any] = {
        "train": {"micro_batch_size": 32 // parallel["dp"], "dtype": "fp64", "num_steps": UPDATES},
        "pipeline": {"num_microbatches": 1},
        "parallel": parallel,
        "optim": {"lr": 1e-3},
    }
    return replace(from_mapping(sections), model=Balanced(rate))


def violations(config: Config, updates: int = UPDATES) -> list[float]:
    """Return MaxVio of each batch."""
    engine, loader = start(config)
    found: list[float] = []
    engine.train(loader, updates, lambda step: found.append(max_violation(step.loads) or 0.0))
    return found


def test_biases_balance_skewed_tokens() -> None:
    """A bias can move by 0.22 in 220 updates with steps of 0.001. An expert has 256 of a batch's
    choices at balance, so chance alone makes MaxVio about 0.1."""
    with_biases = violations(config(RATE))
    assert min(with_biases[:3]) > 1
    assert fmean(with_biases[-10:]) < 0.2
    assert min(violations(config(0.0), 60)) > 1


@pytest.mark.ranks
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "grid",
    [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "cp": 2, "ep": 4}],
    ids=str,
)
def test_balance_is_equal_on_every_grid(grid: dict[str, int]) -> None:
    """Loads are whole numbers."""
    expected = violations(config(RATE), 20)
    assert expected[0] > expected[-1]
    number = config(RATE, **grid).parallel.num_ranks
    for found in run_ranks(violations, number, config(RATE, **grid), 20):
        assert found == expected
