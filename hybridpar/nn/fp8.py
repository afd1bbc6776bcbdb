"""Linear layers whose products have float8 e4m3 factors, with one scale for each row of each factor
(train.fp8).

    y = x W^T      scales of the rows of x (tokens) and of the rows of W
    dx = dy W      scales of the rows of dy (tokens) and of the columns of W
    dW = dy^T x    in bfloat16

Activations and gradients are quantized in each product. The scale of a token depends on that token
alone, so neither micro-batches, stages nor replicas change a bit. Weights are quantized once a
version (state/fp8.py), and all products on that version use the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.ops.fp8 import FP8, quantize_fp8, quantize_fp8_weight_

MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this, for torch._scaled_mm."""


class Fp8Weight:
    """Both quantized forms of a weight, in buffers that stay in place: a CUDA graph may read them.

    Shapes: weight [o, i], rows [o, i], row_scale [o, 1], columns [i, o] (the transpose),
        column_scale [i, 1].
    """

    def __init__(self, weight: Tensor):
        o, i = weight.shape
        self.weight = weight.detach()
        self.rows = weight.new_zeros((o, i), dtype=FP8)
        self.row_scale = weight.new_zeros((o, 1), dtype=torch.float32)
        self.columns = weight.new_zeros((i, o), dtype=FP8)
        self.column_scale = weight.new_zeros((i, 1), dtype=torch.float32)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The buffers."""
        return self.rows, self.row_scale, self.columns, self.column_scale

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the current weight."""
        quantize_fp8_weight_(self.weight, *self.tensors())


def linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, outside of autograd. Shapes: x [.., i], bias [o] -> [.., o]."""
    y = _product(x.reshape(-1, x.shape[-1]), weight.rows, weight.row_scale, bias)
    shape = (*x.shape[:-1], y.shape[-1])
    shaped: Tensor = torch.ops.aten._unsafe_view(y, shape)  # as in F.linear: autograd sees no view
    return shaped


def input_gradient(dy: Tensor, weight: Fp8Weight) -> Tensor:
    """dy W, outside of autograd. Shapes: dy [rows, o] -> [rows, i]."""
    return _product(dy, weight.columns, weight.column_scale, None)


def _product(a: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """a b^T + bias, rounded to the type of a. Shapes: a [m, k], b [n, k], b_scale [n, 1], bias [n]
    -> [m, n]."""
    codes, scale = quantize_fp8(a)
    return torch._scaled_mm(
        codes, b.t(), scale, b_scale.t(), bias=bias, out_dtype=a.dtype, use_fast_accum=True
    )
