"""Normalisation layers, replicated over the tp axis: no communication, and equal gradients on every rank.

With `sequence` each rank has its own rows, and a partial sum of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar import ops
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.grid import Axis
from hybridpar.nn.dropout import Dropout
from hybridpar.nn.linear import Device
from hybridpar.nn.placement import Init, ParallelModule, Placement
from hybridpar.random import RandomKey


class LayerNorm(ParallelModule):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension. Shapes: [.., hidden] -> same.

    Source: arXiv 1607.06450.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, hidden: int, axis: Axis, *, eps: float = 1e-5, kernels: KernelsConfig = AUTO,
                 sequence: bool = False, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(axis, sequence)
        self.eps, self.kernels = eps, kernels
        for name, init in (("weight", Init("ones")), ("bias", Init("zeros"))):
            self.add_parameter(name, Placement((hidden,), init, weight_decay=False), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps, backend=self.kernels.layer_norm)

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout,
            key: RandomKey | None, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x + bias), and that sum. Shapes: [b, .., hidden], bias [hidden] -> same."""
        return ops.add_norm(x, residual, self.weight, self.bias, self.eps, bias_of_x=bias, p=dropout.p, key=key,
                            site=dropout.site, first_row=first_row, backend=self.kernels.add_norm)


class RMSNorm(ParallelModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Shapes: [.., hidden] -> same.

    Source: arXiv 1910.07467.
    """

    weight: Tensor

    def __init__(self, hidden: int, axis: Axis, *, eps: float = 1e-6, kernels: KernelsConfig = AUTO,
                 sequence: bool = False, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(axis, sequence)
        self.eps, self.kernels = eps, kernels
        self.add_parameter("weight", Placement((hidden,), Init("ones"), weight_decay=False), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, backend=self.kernels.rms_norm)

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout,
            key: RandomKey | None, first_row: int = 0) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x + bias), and that sum. Shapes: [b, .., hidden], bias [hidden] -> same."""
        return ops.add_norm(x, residual, self.weight, None, self.eps, centre=False, bias_of_x=bias, p=dropout.p,
                            key=key, site=dropout.site, first_row=first_row, backend=self.kernels.add_norm)
