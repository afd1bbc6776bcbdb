"""AdamW: one pass over parameter, gradient and both moments."""

from __future__ import annotations

from torch import Tensor

from hybridpar.ops.update import AdamStep, Weights
from hybridpar.optim.base import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2 (decay multiplied by lr, as in torch.optim.AdamW).
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def _update(self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor) -> None:
        moments = self._state_parts("exp_avg"), self._state_parts("exp_avg_sq")
        self._passes.adam(self._weight_parts(weights), self._parts(gradients), moments, self._decays, lr,
                          self._adam_step(scale))

    def _adam_step(self, scale: float | Tensor) -> AdamStep:
        return AdamStep(scale, *self.settings.betas, self.settings.eps, self.num_updates)
