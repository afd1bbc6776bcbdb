"""Normalisation layers, replicated over the tp axis: no communication, and equal gradients on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar import ops
from hybridpar.grid import Axis
from hybridpar.nn.linear import Device
from hybridpar.nn.placement import Init, ParallelModule, Placement


class LayerNorm(ParallelModule):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. Shapes: [.., hidden] -> same.

    Source: arXiv 1607.06450.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, hidden: int, axis: Axis, *, eps: float = 1e-5, device: Device = None,
                 dtype: torch.dtype | None = None):
        super().__init__(axis)
        self.eps = eps
        for name, init in (("weight", Init("ones")), ("bias", Init("zeros"))):
            self.add_parameter(name, Placement((hidden,), init, weight_decay=False), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(ParallelModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Shapes: [.., hidden] -> same.

    Source: arXiv 1910.07467.
    """

    weight: Tensor

    def __init__(self, hidden: int, axis: Axis, *, eps: float = 1e-6, device: Device = None,
                 dtype: torch.dtype | None = None):
        super().__init__(axis)
        self.eps = eps
        self.add_parameter("weight", Placement((hidden,), Init("ones"), weight_decay=False), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
