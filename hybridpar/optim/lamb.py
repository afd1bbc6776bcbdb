"""LAMB: layer-wise adaptive moments for large batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpar.comm.collectives import all_reduce
from hybridpar.ops.update import Weights
from hybridpar.optim.adamw import AdamW
from hybridpar.optim.norm import squares_by_slot
from hybridpar.optim.slots import ParameterSlot


class Lamb(AdamW):
    """AdamW whose step is rescaled, parameter by parameter, to the parameter's norm (the trust
    ratio).

    With m and v the bias-corrected moments: u = m / (sqrt(v) + eps) + weight_decay * x,
    x -= lr * |x| / |u| * u. Norms are taken over the global parameter, so the result does not
    depend on the grid. The ratio is 1 if either norm is 0, and for parameters without weight
    decay (biases and normalisations, as in the authors' BERT code).

    Collectives: one all-reduce over tp for all norms, two float64 numbers a parameter.
    Source: You et al., arXiv 1904.00962, algorithm 2, with the identity for phi.
    """

    @classmethod
    def divisible(cls, slot: ParameterSlot) -> bool:
        return False  # the trust ratio needs the norm of all of it

    def _update(
        self, weights: Weights, gradients: list[Tensor], lr: float, scale: float | Tensor
    ) -> None:
        moments = self._state_parts("exp_avg"), self._state_parts("exp_avg_sq")
        parts = self._weight_parts(weights)
        directions = self._parts(gradients)
        self._passes.adam_directions(
            parts.old, directions, moments, self._decays, self._adam_step(scale)
        )
        ratios = self._trust_ratios(weights.old, gradients)
        factors = [
            lr * slot.placement.lr * ratio
            for slot, ratio in zip(self.slots, ratios, strict=True)
            for _ in range(slot.num_parts)
        ]
        self._passes.move(parts, directions, [1.0] * len(factors), factors)

    def _trust_ratios(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> list[float]:
        norms = torch.stack(
            [squares_by_slot(x, self.slots, self.backend) for x in (parameters, directions)]
        )
        value_norms, direction_norms = all_reduce(norms, self.tp).sqrt().tolist()
        return [
            x / u if slot.placement.weight_decay and x > 0 and u > 0 else 1.0
            for x, u, slot in zip(value_norms, direction_norms, self.slots, strict=True)
        ]
