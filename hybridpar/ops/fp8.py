"""Quantize matrices to float8 e4m3, with one scale for each row.

    factor = bfloat16(448 / largest magnitude of the row)        at least 1e-30 counts as the
        largest
    code   = e4m3(bfloat16(x factor))                            x is about code / factor
    scale  = 1 / factor                                          float32, the factor of a product

The factor is rounded to bfloat16, so the reference makes no float32 copy of the matrix. It exceeds
its exact value by less than 2^-8, so a product stays below 449 and rounds to at most 448. A row
with an infinite number or a NaN has a scale that makes every product with that row NaN or infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridpar.ops.backends.libraries import Shapes, nothing, triton_missing
from hybridpar.ops.backends.registry import resolve

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST = 1e-30
_CAPABILITY = (9, 0)


def quantize_fp8(x: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Quantize each row of a matrix. Every backend makes the same bytes.

    Shapes: x [rows, cols] -> float8_e4m3fn [rows, cols], contiguous, and float32 [rows, 1].
    Raises: ConfigError if the backend cannot run; ValueError if x is not a matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"x must be [rows, cols], got {tuple(x.shape)}")
    codes, scale = resolve("quantize_fp8", backend, x).quantize_fp8(x.contiguous())
    return codes, scale


def quantize_fp8_weight_(
    weight: Tensor,
    rows: Tensor,
    row_scale: Tensor,
    columns: Tensor,
    column_scale: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write a weight quantized by rows, and its transpose quantized by rows.

    Every backend makes the same bytes.
    Shapes: weight [o, i], rows [o, i], row_scale [o, 1], columns [i, o], column_scale [i, 1]; all
    contiguous.
    Raises: ConfigError if the backend cannot run; ValueError for other shapes.
    """
    o, i = weight.shape
    got = tuple(tuple(t.shape) for t in (rows, row_scale, columns, column_scale))
    if got != ((o, i), (o, 1), (i, o), (i, 1)):
        raise ValueError(
            f"rows, row_scale, columns, column_scale do not match weight {(o, i)}: {got}"
        )
    resolve("quantize_fp8", backend, weight).quantize_fp8_weight_(
        weight, rows, row_scale, columns, column_scale
    )


def missing(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Return why the Triton passes cannot take such tensors; None if they can."""
    if (
        device_type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() < _CAPABILITY
    ):
        return "needs a GPU of compute capability 9.0 or more"
    return triton_missing(op, device_type, dtype)


class Passes:
    """The torch reference."""

    @staticmethod
    def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
        largest = torch.linalg.vector_norm(x, math.inf, 1, keepdim=True, dtype=torch.float32)
        factor = (_LARGEST / largest.clamp_(min=_LEAST)).to(torch.bfloat16)
        return (x * factor).to(torch.bfloat16).to(FP8).contiguous(), factor.float().reciprocal_()

    @staticmethod
    def quantize_fp8_weight_(
        weight: Tensor, rows: Tensor, row_scale: Tensor, columns: Tensor, column_scale: Tensor
    ) -> None:
        for matrix, codes, scale in (
            (weight, rows, row_scale),
            (weight.t(), columns, column_scale),
        ):
            made = Passes.quantize_fp8(matrix)
            codes.copy_(made[0])
            scale.copy_(made[1])


PASSES: Shapes = {
    "quantize_fp8": lambda x: (
        torch.empty_like(x, dtype=FP8),
        x.new_empty((len(x), 1), dtype=torch.float32),
    ),
    "quantize_fp8_weight_": nothing,
}
