"""LAMB: layer-wise adaptive moments for large batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridpar.comm.collectives import all_reduce
from hybridpar.optim.base import Optimizer
from hybridpar.optim.norm import squares_by_slot

BLOCK = 1 << 16  # elements; on a CPU four float32 blocks stay in the second-level cache through all passes


class Lamb(Optimizer):
    """AdamW whose step is rescaled, parameter by parameter, to the parameter's own norm (the trust ratio).

    With m and v the bias-corrected moments: u = m / (sqrt(v) + eps) + weight_decay * x, x -= lr * |x| / |u| * u. Norms
    are those of the global parameter, so the result does not depend on the grid. The ratio is 1 where either norm is 0
    and for parameters without weight decay (biases and normalisations, as in the authors' BERT code).
    Collectives: one all-reduce over tp for all norms, two float64 numbers a parameter.
    Source: You et al., arXiv 1904.00962, algorithm 2, with the identity for phi.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float, scale: float | Tensor) -> None:
        columns = (parameters, gradients, self._state["exp_avg"], self._state["exp_avg_sq"])
        for decay, group in self._groups(*columns):
            for block in _blocks(group):
                self._directions(*block, decay, scale)
        ratios = self._trust_ratios(parameters, gradients)
        for value, direction, ratio in zip(parameters, gradients, ratios, strict=True):
            value.add_(direction, alpha=-lr * ratio)

    def _directions(self, values: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor],
                    decay: float, scale: float | Tensor) -> None:
        """Updates the moments and writes u over the gradients."""
        (beta1, beta2), count = self.settings.betas, self.num_updates
        if isinstance(scale, Tensor) or scale != 1.0:
            torch._foreach_mul_(grads, scale)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        torch._foreach_copy_(grads, squares)
        torch._foreach_sqrt_(grads)
        torch._foreach_div_(grads, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(grads, self.settings.eps)
        torch._foreach_mul_(grads, 1 - beta1**count)
        torch._foreach_reciprocal_(grads)
        torch._foreach_mul_(grads, means)
        if decay:
            torch._foreach_add_(grads, values, alpha=decay)

    def _trust_ratios(self, parameters: list[Tensor], directions: list[Tensor]) -> list[float]:
        norms = torch.stack([squares_by_slot(parameters, self.slots), squares_by_slot(directions, self.slots)])
        value_norms, direction_norms = all_reduce(norms, self.tp).sqrt().tolist()
        return [x / u if slot.placement.weight_decay and x > 0 and u > 0 else 1.0
                for x, u, slot in zip(value_norms, direction_norms, self.slots, strict=True)]


def _blocks(columns: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The same columns in pieces: all at once on an accelerator, cache-sized ones on a CPU (six times faster)."""
    if columns[0][0].device.type != "cpu":
        yield columns
        return
    for tensors in zip(*columns, strict=True):
        for pieces in zip(*(t.view(-1).split(BLOCK) for t in tensors), strict=True):
            yield [[piece] for piece in pieces]
