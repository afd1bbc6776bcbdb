"""AdamW and NAdamW: one pass over parameter, gradient and both moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hybridpar.config import OptimConfig
from hybridpar.grid import Axis
from hybridpar.ops.update import AdamStep, Weights
from hybridpar.optim.base import Optimizer
from hybridpar.optim.slots import ParameterSlot

MOMENTUM_DECAY = 0.004


class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2 (decay multiplied by lr, as in
        torch.optim.AdamW).
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        parts = self._weight_parts(weights)
        step = self._adam_step(scale)
        columns = (
            self._parts(gradients),
            self._state_parts("exp_avg"),
            self._state_parts("exp_avg_sq"),
            self._decays,
        )
        for rate, indices in self._by_rate.items():  # a pass has one learning rate
            grads, means, squares, decays = (
                columns
                if len(self._by_rate) == 1
                else ([column[i] for i in indices] for column in columns)
            )
            self._passes.adam(parts.only(indices), grads, (means, squares), decays, lr * rate, step)

    def _adam_step(self, scale: float | Tensor) -> AdamStep:
        return AdamStep(scale, *self.settings.betas, self.settings.eps, self.num_updates)


class NAdamW(AdamW):
    """torch.optim.NAdam with decoupled_weight_decay: a step of Adam that looks ahead along the
    momentum.

    With mu_t = beta1 (1 - 0.96^(0.004 t) / 2) and P_t the product of mu_1 to mu_t, the mean of
    Adam's step becomes mu_(t+1) / (1 - P_(t+1)) m + (1 - mu_t) / (1 - P_t) g. Gradients that are a
    step old then start from the place to which the momentum leads next, and not from an older one.
    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam"; used against delays, with a
    beta1 of 0.99, by Ajanthan et al., arXiv 2505.01099.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], settings: OptimConfig, tp: Axis, backend: str = "auto"
    ):
        super().__init__(slots, settings, tp, backend)
        self._product = 1.0

    def load_state_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        super().load_state_tensors(tensors, num_updates)
        self._product = 1.0
        for step in range(1, num_updates + 1):  # in the order of training, for the same bits
            self._product *= self._mu(step)

    def _mu(self, step: int) -> float:
        return self.settings.betas[0] * (1 - 0.5 * 0.96 ** (step * MOMENTUM_DECAY))

    def _adam_step(self, scale: float | Tensor) -> AdamStep:
        mu = self._mu(self.num_updates)
        mu_next = self._mu(self.num_updates + 1)
        self._product *= mu
        ahead = mu_next / (1 - self._product * mu_next), (1 - mu) / (1 - self._product)
        return replace(super()._adam_step(scale), nesterov=ahead)
