"""Products of a linear layer whose factors have 8 bits (float8 e4m3), each of their rows with a scale of its own.

    y = x W^T      a scale for each row of x and each row of W
    dx = dy W      a scale for each row of dy and each column of W
    dW = dy^T x    in the layer's own type, as ever

Scales are made from what is multiplied, in every product: nothing is remembered. That of a token's row depends on the
token alone, so neither micro-batches, stages nor replicas change a bit; tensor parallelism would, as it cuts rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WANTED = "eight_bits"
"""Attribute of a leaf: true where its products are these."""

MULTIPLE = 16
"""What both dimensions of a weight are multiples of, for torch._scaled_mm."""
_TYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_TYPE).max
_LEAST = 1e-30


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, outside of autograd. Shapes: x [.., i], weight [o, i], bias [o] -> [.., o]."""
    y = _product(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        y.add_(bias)
    whole: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))  # as torch's own: no view for autograd
    return whole


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W, outside of autograd. Shapes: dy [rows, o], weight [o, i] -> [rows, i]."""
    return _product(dy, weight.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T, rounded to the type of a. Shapes: [m, k], [n, k] -> [m, n]."""
    (a8, a_scale), (b8, b_scale) = _rounded(a), _rounded(b)
    return torch._scaled_mm(a8, b8.t(), a_scale, b_scale.t(), out_dtype=a.dtype, use_fast_accum=True)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in 8 bits, without gaps, and what each is to be multiplied by.

    The factor is rounded to the type of x, so that no tensor of float32 is made; the scale is the inverse of what it
    was rounded to.
    Shapes: [rows, cols] -> [rows, cols], float32 [rows, 1].
    """
    largest = torch.linalg.vector_norm(x, math.inf, 1, keepdim=True, dtype=torch.float32)
    factor = (_LARGEST / largest.clamp_(min=_LEAST)).to(x.dtype)
    return (x * factor).to(_TYPE).contiguous(), factor.float().reciprocal_()
