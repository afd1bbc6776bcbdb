"""The update rules, written out for full float64 tensors; they share no code with hybridpar.optim.

A rule maps weights and gradients, by name, to the next weights, and keeps its state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridpar.config import OptimConfig, import_rule
from hybridpar.nn.placement import Placement

Tensors = dict[str, Tensor]


class Rule:
    """Base class of the rules: the number of updates, running averages, which parameters decay."""

    def __init__(self, optim: OptimConfig, placements: Mapping[str, Placement]):
        self.optim = optim
        self.placements = placements
        self.steps = 0
        self.nesterov = optim.nesterov or optim.staleness == "nesterov"
        self.state: dict[tuple[str, str], Tensor] = {}

    def __call__(self, weights: Tensors, gradients: Tensors, lr: float) -> Tensors:
        """Return the weights after one more update."""
        self.steps += 1
        after = {}
        for name, weight in weights.items():
            placement = self.placements[name]
            if placement.sign_step:
                after[name] = weight - placement.sign_step * gradients[name].sign()
            else:
                after[name] = self.one(name, weight, gradients[name], lr * placement.lr)
        return after

    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        raise AssertionError

    def decay(self, name: str) -> float:
        return self.optim.weight_decay * self.placements[name].weight_decay

    def average(self, kind: str, name: str, value: Tensor, beta: float) -> Tensor:
        old = self.state.get((kind, name), torch.zeros_like(value))
        self.state[kind, name] = new = beta * old + (1 - beta) * value
        return new

    def adam(self, name: str, g: Tensor) -> Tensor:
        b1, b2 = self.optim.betas
        mean = self.average("mean", name, g, b1) / (1 - b1**self.steps)
        square = self.average("square", name, g * g, b2) / (1 - b2**self.steps)
        return mean / (square.sqrt() + self.optim.eps)


class AdamWRule(Rule):
    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        return w * (1 - lr * self.decay(name)) - lr * self.adam(name, g)


class NAdamWRule(Rule):
    """Dozat 2016 with the schedule of torch.optim.NAdam, and decoupled weight decay."""

    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        b1, b2 = self.optim.betas
        t = self.steps
        mu = [b1 * (1 - 0.5 * 0.96 ** (0.004 * i)) for i in range(1, t + 2)]
        mean = self.average("mean", name, g, b1)
        square = self.average("square", name, g * g, b2) / (1 - b2**t)
        ahead = mu[t] * mean / (1 - math.prod(mu)) + (1 - mu[t - 1]) * g / (1 - math.prod(mu[:t]))
        return w * (1 - lr * self.decay(name)) - lr * ahead / (square.sqrt() + self.optim.eps)


class LambRule(Rule):
    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        direction = self.adam(name, g) + self.decay(name) * w
        size = w.norm().item()
        length = direction.norm().item()
        ratio = (
            size / length if self.placements[name].weight_decay and min(size, length) > 0 else 1.0
        )
        return w - lr * ratio * direction


class SgdRule(Rule):
    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        g = g + self.decay(name) * w
        mu = self.optim.momentum
        velocity = self.state.get(("velocity", name))
        self.state["velocity", name] = velocity = g if velocity is None else mu * velocity + g
        return w - lr * (g + mu * velocity if self.nesterov else velocity)


class MuonRule(AdamWRule):
    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        if not self.placements[name].matrices:
            return super().one(name, w, g, lr)
        mu = self.optim.momentum
        mean = self.average("momentum", name, g, mu)
        direction = (1 - mu) * g + mu * mean if self.nesterov else mean
        step = torch.zeros_like(w)
        for ranges in self.placements[name].matrices:
            rows = [row for start, stop in ranges for row in range(start, stop)]
            step[rows] = (
                0.2 * math.sqrt(max(len(rows), w.shape[1])) * orthogonalized(direction[rows])
            )
        return w * (1 - lr * self.decay(name)) - lr * step


def orthogonalized(x: Tensor) -> Tensor:
    """Apply Muon's polynomial five times to the singular values of x / |x|."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / max(float(s.norm()), 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vh


class Extrapolated:
    """A rule whose updates are applied once more, less the previous update."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.previous: Tensors = {}

    def __call__(self, weights: Tensors, gradients: Tensors, lr: float) -> Tensors:
        after = self.rule(weights, gradients, lr)
        updates = {
            n: after[n] - w for n, w in weights.items() if not self.rule.placements[n].sign_step
        }
        result = after | {
            n: after[n] + u - self.previous.get(n, torch.zeros_like(u)) for n, u in updates.items()
        }
        self.previous = updates
        return result


class OwnRule(Rule):
    """The user's custom rule, on full parameters."""

    def one(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        rule = import_rule(self.optim.spec)(self.optim)
        after = w.clone()
        state = {
            key: self.state.setdefault((key, name), torch.zeros_like(w)) for key in rule.state_names
        }
        rule.update(after, g.clone(), state, lr=lr, decay=self.decay(name), step=self.steps)
        return after


RULES: dict[str, type[Rule]] = {
    "adamw": AdamWRule,
    "lamb": LambRule,
    "muon": MuonRule,
    "own": OwnRule,
    "sgd": SgdRule,
}


def build_rule(optim: OptimConfig, placements: Mapping[str, Placement]) -> Rule | Extrapolated:
    """Return the rule that `optim` names."""
    if optim.name == "adamw" and optim.staleness == "nesterov":
        return NAdamWRule(optim, placements)
    rule = RULES[optim.name](optim, placements)
    return Extrapolated(rule) if optim.staleness == "extrapolation" else rule
