"""SGD with momentum on torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.ops.update import Weights, divisor_of, grouped
from hybridpar.optim.base import Optimizer
from hybridpar.optim.slots import ParameterSlot


class SGD(Optimizer):
    """Stochastic gradient descent like torch.optim.SGD: (Nesterov) momentum without dampening.

    Without momentum it has no state. Weight decay is L2: it is added to the gradient before the
    momentum, not decoupled.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        super().__init__(slots, settings, tp, backend)
        if settings.momentum > 0:
            self.state_names = ("momentum",)  # type: ignore[misc]

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        with weights.updating() as values:
            divisor = divisor_of(gradients, scale)
            momenta = [self._state_parts("momentum")] if self.state_names else []
            columns = (self._parts(values), self._parts(gradients), *momenta)
            factors = list(zip(self._decays, self._rates, strict=True))
            for (decay, rate), (x, grads, *rest) in grouped(factors, *columns):
                torch._fused_sgd_(
                    x,
                    grads,
                    rest[0] if rest else [],
                    weight_decay=decay,
                    momentum=self.settings.momentum,
                    lr=lr * rate,
                    dampening=0.0,
                    nesterov=self.settings.nesterov,
                    maximize=False,
                    is_first_step=False,  # momentum starts as zeros, which says the same
                    grad_scale=divisor,
                    found_inf=None,
                )
