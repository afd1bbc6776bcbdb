"""The optimizers do what the rules, written without them, say."""

from __future__ import annotations

import pytest
import torch
from optim.cases import ONE, placements, random_tensors, slots

from hybridpar.config import OptimConfig
from hybridpar.optim import OPTIMIZERS, build_optimizer
from hybridpar.verify.rules import RULES, build_rule, orthogonalized

STALENESS = ("none", "extrapolation", "nesterov")
NAMES = list(placements(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("staleness", STALENESS)
def test_optimizers_follow_the_rules(name: str, staleness: str) -> None:
    if name in ("lamb", "own") and staleness == "nesterov":
        return
    settings = OptimConfig(
        name, "optim.rules:Adam" * (name == "own"), weight_decay=0.1, staleness=staleness
    )  # type: ignore[arg-type]
    rule = build_rule(settings, placements(1))
    weights = dict(zip(NAMES, random_tensors(0), strict=True))
    parameters = random_tensors(0)
    optimizer = build_optimizer(settings, slots(1, 0), ONE)
    for step in range(12):
        lr = 0.02 / (1 + step)
        weights = rule(
            weights, {n: 0.3 * g for n, g in zip(NAMES, random_tensors(step + 50), strict=True)}, lr
        )
        optimizer.step(parameters, random_tensors(step + 50), lr=lr, gradient_scale=0.3)
    for got, wanted in zip(parameters, weights.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_there_is_a_rule_for_every_optimizer() -> None:
    assert RULES.keys() == OPTIMIZERS.keys()


def test_orthogonalized() -> None:
    torch.testing.assert_close(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))
    x = orthogonalized(torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(x, x[0, 0] * torch.eye(5, dtype=torch.float64))
    assert 0.68 < x[0, 0] < 1.21
