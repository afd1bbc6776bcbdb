"""Steps of one size against the sign of the gradient, beside any other optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridpar.ops.update import Weights
from hybridpar.optim.base import Optimizer
from hybridpar.optim.slots import ParameterSlot


class SignSteps(Optimizer):
    """Move each element by `Placement.sign_step`, whatever the learning rate and the scale of the
    gradient; an element whose gradient is 0 stays."""

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        with weights.updating() as values:
            for slot, value, gradient in zip(self.slots, values, gradients, strict=True):
                value.sub_(gradient.sign(), alpha=slot.placement.sign_step)


class WithSignSteps(Optimizer):
    """An optimizer for the parameters without sign steps, and SignSteps for the others.

    Args:
        optimizer: The optimizer, of the slots without sign steps, in their order.
        signed: The sign steps, of the other slots.
        slots: All slots.
    """

    def __init__(self, optimizer: Optimizer, signed: SignSteps, slots: Sequence[ParameterSlot]):
        super().__init__(slots, optimizer.settings, optimizer.tp, optimizer.backend)
        self.inner = (optimizer, signed)
        self._indices = [
            [i for i, slot in enumerate(slots) if bool(slot.placement.sign_step) is signs]
            for signs in (False, True)
        ]

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        for indices, inner in zip(self._indices, self.inner, strict=True):
            inner.step(
                weights.only(indices), [gradients[i] for i in indices], lr=lr, gradient_scale=scale
            )
