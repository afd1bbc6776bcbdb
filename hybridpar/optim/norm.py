"""The global gradient norm: every element of every parameter counted once over the whole grid."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from hybridpar.ops import optimizer as passes_for
from hybridpar.optim.slots import ParameterSlot


def counted(gradients: Sequence[Tensor], slots: Sequence[ParameterSlot]) -> list[Tensor]:
    """Return views of the parts of the gradients that this rank counts.

    Each element is counted once over the grid. Gradients are reduced already (over dp, shared rows,
    tied parameters). Shapes: the slots' local shapes.
    """
    return [
        part
        for gradient, slot in zip(gradients, slots, strict=True)
        if slot.counts
        for part in slot.counted_parts(gradient)
    ]


def sums_of_squares(tensors: Sequence[Tensor], backend: str = "auto") -> Tensor:
    """Return the sum of the squares of each tensor's elements; float64 [number of tensors].

    Inf and NaN propagate: the caller skips the update if the norm is not finite.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if tensors[0].dtype == torch.bfloat16:  # one at a time, for less memory
        return torch.cat([sums_of_squares([x.float()], backend) for x in tensors])
    return passes_for(tensors[0], backend).sum_squares(tensors)


def squares_by_slot(
    tensors: Sequence[Tensor], slots: Sequence[ParameterSlot], backend: str = "auto"
) -> Tensor:
    """Return this rank's contribution to the squared norm of each parameter; float64 [number of
    slots].

    Summed over the tp axis, each element is counted once.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    parts = [slot.counted_parts(x) for x, slot in zip(tensors, slots, strict=True)]
    sums = passes_for(tensors[0], backend).sum_squares(
        [part for of_slot in parts for part in of_slot]
    )
    return torch.stack(
        [of_slot.sum() for of_slot in sums.to(tensors[0].device).split(list(map(len, parts)))]
    )


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient of norm `norm` down to `max_norm`: min(1,
    max_norm / norm).

    No epsilon (torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm): a clipped gradient has norm
    `max_norm`, and one of norm 0 does not change. `max_norm` 0 turns clipping off. The norm must be
    finite.
    """
    assert isfinite(norm), f"gradient norm {norm}: the update should have been skipped"
    return max_norm / norm if 0 < max_norm < norm else 1.0
