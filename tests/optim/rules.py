"""Optimizers as users would write them, right and wrong ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridpar import UpdateRule


class Lion(UpdateRule):
    """Chen et al., arXiv 2302.06675, algorithm 2."""

    state_names = ("momentum",)

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        direction = torch.lerp(gradient, state["momentum"], 0.9).sign_()
        weight.mul_(1 - lr * decay).sub_(direction, alpha=lr)
        state["momentum"].lerp_(gradient, 0.01)


class Adam(UpdateRule):
    state_names = ("mean", "square")

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        one, two = self.settings.betas
        mean = state["mean"].lerp_(gradient, 1 - one)
        square = state["square"].lerp_(gradient * gradient, 1 - two)
        root = (square / (1 - two**step)).sqrt() + self.settings.eps
        weight.mul_(1 - lr * decay).sub_(mean / (1 - one**step) / root, alpha=lr)


class Sgd(UpdateRule):
    """Its own parts are what the wrong ones below get wrong."""

    state_names = ("momentum",)

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        self.move(weight, gradient, state, lr)

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> Any:
        state["momentum"].mul_(0.9).add_(gradient)
        weight.sub_(state["momentum"], alpha=lr)


class OfTheWhole(Sgd):
    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
        weight.sub_(gradient / gradient.norm(), alpha=lr)


class Noisy(Sgd):
    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
        weight.sub_(torch.rand_like(weight), alpha=lr)


class Returning(Sgd):
    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
        return weight - lr * gradient


class Counting(Sgd):
    seen = 0

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
        self.seen += 1
        weight.sub_(gradient, alpha=lr / self.seen)


class Undeclared(Sgd):
    state_names = ()


class Replacing(Sgd):
    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float) -> None:
        state["momentum"] = 0.9 * state["momentum"] + gradient
        weight.sub_(state["momentum"], alpha=lr)


class Unmakeable(Sgd):
    def __init__(self, settings: Any, beta: float):
        super().__init__(settings)


class Uncallable(UpdateRule):
    def update(self, weight: Tensor, gradient: Tensor) -> None:  # type: ignore[override]
        weight.sub_(gradient)


class Unwritten(UpdateRule):
    state_names = ("momentum",)
