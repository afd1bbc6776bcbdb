"""Parameters with a learning rate and a weight decay of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from optim.cases import ONE, placements, random_tensors

from hybridpar.config import OptimConfig
from hybridpar.nn.placement import Placement
from hybridpar.optim import OPTIMIZERS, ParameterSlot, build_optimizer
from hybridpar.verify.rules import build_rule

RATES = (1.0, 0.3, 0.0, 2.0)
DECAYS = (1.0, 0.5, 3.0)


def with_factors() -> dict[str, Placement]:
    return {
        name: replace(place, lr=RATES[i % 4], weight_decay=place.weight_decay * DECAYS[i % 3])
        for i, (name, place) in enumerate(placements(1).items())
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("staleness", ["none", "nesterov", "extrapolation"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_optimizers_follow_the_rules_with_factors(name: str, staleness: str, backend: str) -> None:
    if name in ("lamb", "own") and staleness == "nesterov":
        return
    settings = OptimConfig(
        name, "optim.rules:Adam" * (name == "own"), weight_decay=0.1, staleness=staleness
    )  # type: ignore[arg-type]
    placed = with_factors()
    rule = build_rule(settings, placed)
    weights = dict(zip(placed, random_tensors(0), strict=True))
    parameters = random_tensors(0)
    slots = [ParameterSlot(name, place, {"tp": 0}) for name, place in placed.items()]
    optimizer = build_optimizer(settings, slots, ONE, backend)
    for step in range(6):
        gradients = dict(zip(placed, random_tensors(step + 50), strict=True))
        weights = rule(weights, {n: 0.3 * g for n, g in gradients.items()}, 0.02)
        optimizer.step(parameters, random_tensors(step + 50), lr=0.02, gradient_scale=0.3)
    for got, wanted in zip(parameters, weights.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_adamw_with_factors_is_torch_with_groups(backend: str) -> None:
    settings = OptimConfig("adamw", weight_decay=0.1)
    placed = with_factors()
    mine = random_tensors(0)
    theirs = random_tensors(0)
    slots = [ParameterSlot(name, place, {"tp": 0}) for name, place in placed.items()]
    optimizer = build_optimizer(settings, slots, ONE, backend)
    reference = torch.optim.AdamW(
        [
            {"params": [x], "lr": 0.02 * place.lr, "weight_decay": 0.1 * place.weight_decay}
            for x, place in zip(theirs, placed.values(), strict=True)
        ],
        betas=settings.betas,
        eps=settings.eps,
    )
    for step in range(6):
        for x, gradient in zip(theirs, random_tensors(step + 50), strict=True):
            x.grad = gradient
        reference.step()
        optimizer.step(mine, random_tensors(step + 50), lr=0.02)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
