"""The local passes of the vocabulary-parallel cross-entropy over logits [rows, columns], of any
number of columns.

Traffic a bf16 logit: statistics reads it, 2 bytes, and writes a few numbers a row; the gradient
reads and overwrites it, 4 bytes. Arithmetic: one exponential each, about 10 operations, below what
the traffic takes on A100 and H100. A thread keeps the maximum and the sum of what it reads itself;
threads meet once a row. Rows are read 16 bytes at a time where their number of columns is a
multiple of 16; how many of them are real columns does not matter: the others are read too, and left
out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import _exp, check, launch, tile

OPERATORS = {"cross_entropy": (), "cross_entropy_backward_": ("gradient",)}

_WARPS = 4
_WIDEST = 2048  # columns of a program of the gradient
_OF_THREAD = 16


def cross_entropy(logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
    """[3, rows]: maximum of the first num_real, sum of exponentials of what they are below it, the
    logit at `column` (0 if not among them); [4, rows] with the sum of what they are below the
    maximum.

    Shapes: logits [rows, v], column int64 [rows], contiguous -> float32.
    """
    _check(logits, column)
    rows, cols = logits.shape
    out = logits.new_empty((3 + with_sum, rows), dtype=torch.float32)
    vector = 16 // logits.element_size()
    launch(
        statistics_kernel,
        rows,
        logits,
        column,
        out,
        rows,
        cols,
        num_real,
        WITH_SUM=with_sum,
        LANES=32 * _WARPS,
        VECTOR=vector,
        num_warps=_WARPS,
    )
    return out


def cross_entropy_backward_(
    gradient: Tensor, logits: Tensor, column: Tensor, numbers: Tensor, num_real: int
) -> None:
    """gradient becomes exp(logits - top) * factor - level, less `target` at column; 0 beyond
    num_real.

    Shapes: gradient and logits [rows, v], which may be one; column int64 [rows]; numbers float32
        [4, rows]: top,
    factor, target, level.
    """
    _check(logits, column)
    check(gradient=gradient, logits=logits)
    check(numbers=numbers)
    assert numbers.dtype == torch.float32, f"numbers must be float32, got {numbers.dtype}"
    rows, cols = logits.shape
    size = tile(cols, _WIDEST, _OF_THREAD)
    blocks = triton.cdiv(cols, size["COLS"])
    launch(
        gradient_kernel,
        triton.cdiv(rows, size["ROWS"]) * blocks,
        gradient,
        logits,
        column,
        numbers,
        rows,
        cols,
        blocks,
        num_real,
        **size,
    )


def _check(logits: Tensor, column: Tensor) -> None:
    check(logits=logits)
    check(column=column)
    assert column.dtype == torch.int64, f"column must be int64, got {column.dtype}"


@triton.jit(do_not_specialize=["rows", "num_real"])
def statistics_kernel(
    logits_ptr,
    column_ptr,
    out_ptr,
    rows,
    cols,
    num_real,
    WITH_SUM: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * cols
    hidden = float("-inf")
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full(
        [LANES], hidden, tl.float32
    )  # of each lane, which adds its own: lanes meet at the end
    total = tl.zeros([LANES], tl.float32)
    origin = tl.zeros([LANES], tl.float32)  # the lane's first maximum: what `apart` is about
    apart = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.float32)
    x_next = tl.load(logits_ptr + lane, mask=lane < cols, other=0.0)
    for at in range(0, num_real, LANES * VECTOR):
        real = at + lane < num_real
        x = tl.where(real, x_next.to(tl.float32), hidden)
        following = at + LANES * VECTOR + lane
        x_next = tl.load(logits_ptr + following, mask=following < cols, other=0.0)
        above = tl.maximum(top, tl.max(x, 1))
        level = tl.where(
            above == hidden, 0.0, above
        )  # where nothing is above -infinity yet, subtract nothing
        parts = _exp(x - level[:, None])
        total = total * _exp(top - level) + tl.sum(parts, 1)
        top = above
        if WITH_SUM:
            origin = tl.where(at == 0, level, origin)
            apart += tl.sum(tl.where(real, x - origin[:, None], 0.0), 1)
            count += tl.sum(real.to(tl.float32), 1)
    highest = tl.max(top, 0)
    level = tl.where(highest == hidden, 0.0, highest)
    column = tl.load(column_ptr + row)
    here = (column >= 0) & (column < num_real)
    tl.store(out_ptr + row, highest)
    tl.store(out_ptr + rows + row, tl.sum(total * _exp(top - level), 0))
    tl.store(
        out_ptr + 2 * rows + row, tl.load(logits_ptr + column, mask=here, other=0.0).to(tl.float32)
    )
    if WITH_SUM:
        below = tl.where(count > 0, apart + count * (origin - level), 0.0)
        tl.store(out_ptr + 3 * rows + row, tl.sum(below, 0))


@triton.jit(do_not_specialize=["rows", "num_real"])
def gradient_kernel(
    gradient_ptr,
    logits_ptr,
    column_ptr,
    numbers_ptr,
    rows,
    cols,
    blocks,
    num_real,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    begin = tl.program_id(0) % blocks * COLS
    col = begin + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    at = row.to(tl.int64) * cols + col
    x = tl.load(logits_ptr + at, mask=inside, other=0.0)
    top = tl.load(numbers_ptr + row, mask=row < rows, other=0.0)
    factor = tl.load(numbers_ptr + rows + row, mask=row < rows, other=0.0)
    level = tl.load(numbers_ptr + 3 * rows + row, mask=row < rows, other=0.0)
    column = tl.load(column_ptr + row, mask=row < rows, other=-1)
    gradient = _exp(x.to(tl.float32) - top) * factor - level
    here = (column >= begin) & (column < begin + COLS)
    if tl.max(here.to(tl.int32)) > 0:  # few blocks have a label
        target = tl.load(numbers_ptr + 2 * rows + row, mask=here, other=0.0)
        gradient -= tl.where(col == column, target, 0.0)
    if begin + COLS > num_real:
        gradient = tl.where(col < num_real, gradient, 0.0)
    tl.store(gradient_ptr + at, gradient.to(x.dtype), mask=inside)
