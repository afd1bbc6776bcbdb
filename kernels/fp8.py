"""Quantizes bfloat16 matrices to float8 e4m3, with one scale for each row, or for each row and each
column.

`quantize_fp8` is for activations. A program holds whole rows in registers, up to _WIDEST columns.
Traffic of an element: 2 bytes read, 1 written. A wider row is read twice: 4 bytes read, 1 written.

`quantize_fp8_weight_` makes both forms that a linear layer multiplies by: W by rows for y = x W^T,
and W^T by rows (the columns of W) for dx = dy W. The scale of a column needs the whole column, so a
first kernel finds the largest magnitude of each row and column, and a second one reads W again and
writes both forms. Traffic of an element: 2 + 2 bytes read, 1 + 1 written. The maxima are combined
by atomic maxima of integers, which give the same bits in any order.

Rounding follows hybridpar/ops/fp8.py: the factor of a row is rounded to bfloat16, the product
with it to bfloat16, and that to e4m3. Magnitudes are compared as integers, so NaN is the largest
and reaches the scale.

Triton's interpreter rounds to bfloat16 and to float8 wrongly, so there the same roundings are made
of integer operations. Codes are written as bytes in both cases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import _INTERPRETED, check, launch, tile

OPERATORS = {
    "quantize_fp8": (),
    "quantize_fp8_weight_": ("rows", "row_scale", "columns", "column_scale"),
}

_WIDEST = 16384
_OF_THREAD = 16
_TILE = 128  # rows and columns of a weight's tile: 128 neighbouring bytes of both results
_TILE_WARPS = 8
_LARGEST = tl.constexpr(448.0)  # of e4m3
_LEAST = tl.constexpr(1e-30)
_ROUNDING = tl.constexpr(
    12582912.0
)  # added and taken away: to the nearest integer, to even where two are


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the rows of a matrix.

    Shapes: x [rows, cols], contiguous -> float8_e4m3fn [rows, cols], float32 [rows, 1].
    """
    check(x=x)
    rows, cols = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((rows, 1), dtype=torch.float32)
    size = tile(cols, _WIDEST, _OF_THREAD)
    launch(
        quantize_rows_kernel,
        triton.cdiv(rows, size["ROWS"]),
        x,
        codes.view(torch.uint8),
        scale,
        rows,
        cols,
        WHOLE=cols <= size["COLS"],
        **size,
    )
    return codes, scale


def quantize_fp8_weight_(
    weight: Tensor, rows: Tensor, row_scale: Tensor, columns: Tensor, column_scale: Tensor
) -> None:
    """Write both quantized forms of a weight.

    Shapes: weight [o, i], rows float8_e4m3fn [o, i], row_scale float32 [o, 1], columns
        float8_e4m3fn [i, o],
    column_scale float32 [i, 1], all contiguous.
    """
    check(weight=weight)
    check(rows=rows, columns=columns)
    check(row_scale=row_scale, column_scale=column_scale)
    o, i = weight.shape
    maxima = torch.zeros(o + i, dtype=torch.int32, device=weight.device)
    across = triton.cdiv(i, _TILE)
    programs = triton.cdiv(o, _TILE) * across
    constants = {"TILE": _TILE, "num_warps": _TILE_WARPS}
    launch(weight_maxima_kernel, programs, weight, maxima, o, i, across, **constants)
    launch(
        quantize_weight_kernel,
        programs,
        weight,
        maxima,
        rows.view(torch.uint8),
        row_scale,
        columns.view(torch.uint8),
        column_scale,
        o,
        i,
        across,
        **constants,
    )


@triton.jit(do_not_specialize=["rows"])
def quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    start = row.to(tl.int64) * cols
    col = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + start + col, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(_magnitude(x), 1, keep_dims=True)
    if not WHOLE:
        for at in range(COLS, cols, COLS):
            inside = (row < rows) & (at + col < cols)
            x = tl.load(x_ptr + start + at + col, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(_magnitude(x), 1, keep_dims=True))
    factor = _factor(largest)
    tl.store(
        scale_ptr + row, tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), factor), mask=row < rows
    )
    if WHOLE:
        tl.store(codes_ptr + start + col, _code(x * factor), mask=inside)
    else:
        for at in range(0, cols, COLS):
            inside = (row < rows) & (at + col < cols)
            x = tl.load(x_ptr + start + at + col, mask=inside, other=0.0).to(tl.float32)
            tl.store(codes_ptr + start + at + col, _code(x * factor), mask=inside)


@triton.jit
def weight_maxima_kernel(weight_ptr, maxima_ptr, o, i, across, TILE: tl.constexpr):
    row = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    col = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    x = _load_tile(weight_ptr, row, col, o, i)
    size = _magnitude(x)
    tl.atomic_max(maxima_ptr + row, tl.max(size, 1), mask=row < o, sem="relaxed")
    tl.atomic_max(maxima_ptr + o + col, tl.max(size, 0), mask=col < i, sem="relaxed")


@triton.jit
def quantize_weight_kernel(
    weight_ptr,
    maxima_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    o,
    i,
    across,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    col = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    row_factor = _factor(tl.load(maxima_ptr + row, mask=row < o, other=0))
    column_factor = _factor(tl.load(maxima_ptr + o + col, mask=col < i, other=0))
    one = tl.full([TILE], 1.0, tl.float32)
    if tl.program_id(0) % across == 0:
        tl.store(row_scale_ptr + row, tl.div_rn(one, row_factor), mask=row < o)
    if tl.program_id(0) // across == 0:
        tl.store(column_scale_ptr + col, tl.div_rn(one, column_factor), mask=col < i)
    x = _load_tile(weight_ptr, row, col, o, i)
    tl.store(
        rows_ptr + row[:, None].to(tl.int64) * i + col[None, :],
        _code(x * row_factor[:, None]),
        mask=(row < o)[:, None] & (col < i)[None, :],
    )
    turned = tl.trans(_code(x * column_factor[None, :]))
    tl.store(
        columns_ptr + col[:, None].to(tl.int64) * o + row[None, :],
        turned,
        mask=(col < i)[:, None] & (row < o)[None, :],
    )


@triton.jit
def _load_tile(weight_ptr, row, col, o, i):
    inside = (row < o)[:, None] & (col < i)[None, :]
    return tl.load(
        weight_ptr + row[:, None].to(tl.int64) * i + col[None, :], mask=inside, other=0.0
    ).to(tl.float32)


@triton.jit
def _magnitude(x):
    """|x| as an integer that orders as |x| does; NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _factor(largest):
    """The number that takes `largest`, bits of a float32, to at most 448; rounded to bfloat16."""
    size = largest.to(tl.float32, bitcast=True)
    size = tl.where(size < _LEAST, _LEAST, size)  # not tl.maximum, which loses NaN
    return _rounded(tl.div_rn(tl.zeros_like(size) + _LARGEST, size))


@triton.jit
def _rounded(x):
    """x rounded to bfloat16, as float32."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _code(x):
    """The byte of x as e4m3, after rounding to bfloat16. x: at most 448.875, or NaN."""
    x = _rounded(x)
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = ((tl.where(size < 0x3C800000, tl.abs(x), 0.0) * 512.0 + _ROUNDING) - _ROUNDING).to(
            tl.int32
        )
        code = tl.where(size < 0x3C800000, small, normal)  # below 2^-6 codes are multiples of 2^-9
        code = tl.where(x == x, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
