"""AdamW on torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.optim.base import Optimizer, scale_for_fused


class AdamW(Optimizer):
    """Adam with decoupled weight decay: one pass over parameter, gradient and both moments.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2 (decay multiplied by lr, as in torch.optim.AdamW).
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float, scale: float | Tensor) -> None:
        divisor = scale_for_fused(gradients, scale)
        count = torch.full((), float(self.num_updates), device=parameters[0].device)
        columns = (parameters, gradients, self._state["exp_avg"], self._state["exp_avg_sq"])
        for decay, (values, grads, means, squares) in self._groups(*columns):
            torch._fused_adamw_(
                values, grads, means, squares, [], [count] * len(values), lr=lr, beta1=self.settings.betas[0],
                beta2=self.settings.betas[1], weight_decay=decay, eps=self.settings.eps, amsgrad=False,
                maximize=False, grad_scale=divisor, found_inf=None)
