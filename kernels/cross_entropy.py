"""The local passes of the vocabulary-parallel cross-entropy over logits [rows, columns], of any number of columns.

Traffic a bf16 logit: statistics reads it, 2 bytes, and writes a few numbers a row; the gradient reads and overwrites
it, 4 bytes. Arithmetic: one exponential each, about 10 operations, below what the traffic takes on A100 and H100.
Rows are read 16 bytes at a time where their number of columns is a multiple of 16; how many of them are real columns
does not matter: the others are read too, and left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import check, launch, tile

_BLOCK = 4096  # columns whose maximum is found before their exponentials are summed
_WIDEST = 2048  # columns of a program of the gradient


def cross_entropy(logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
    """[3, rows]: maximum of the first num_real, sum of exponentials of what they are below it, the logit at `column` (0
    if not among them); [4, rows] with the sum of what they are below the maximum.

    Shapes: logits [rows, v], column int64 [rows], contiguous -> float32.
    """
    _check(logits, column)
    rows, cols = logits.shape
    out = logits.new_empty((3 + with_sum, rows), dtype=torch.float32)
    size = tile(cols, _BLOCK)
    launch(statistics_kernel, triton.cdiv(rows, size["ROWS"]), logits, column, out, rows, cols, num_real,
           WITH_SUM=with_sum, **size)
    return out


def cross_entropy_backward_(gradient: Tensor, logits: Tensor, column: Tensor, numbers: Tensor, num_real: int) -> None:
    """gradient becomes exp(logits - top) * factor - level, less `target` at column; 0 beyond num_real.

    Shapes: gradient and logits [rows, v], which may be one; column int64 [rows]; numbers float32 [4, rows]: top,
    factor, target, level.
    """
    _check(logits, column)
    check(gradient=gradient, logits=logits)
    check(numbers=numbers)
    assert numbers.dtype == torch.float32, f"numbers must be float32, got {numbers.dtype}"
    rows, cols = logits.shape
    size = tile(cols, _WIDEST)
    blocks = triton.cdiv(cols, size["COLS"])
    launch(gradient_kernel, triton.cdiv(rows, size["ROWS"]) * blocks, gradient, logits, column, numbers, rows, cols,
           blocks, num_real, **size)


def _check(logits: Tensor, column: Tensor) -> None:
    check(logits=logits)
    check(column=column)
    assert column.dtype == torch.int64, f"column must be int64, got {column.dtype}"


@triton.jit(do_not_specialize=["rows", "num_real"])
def statistics_kernel(logits_ptr, column_ptr, out_ptr, rows, cols, num_real, WITH_SUM: tl.constexpr,
                      ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    logits_ptr += row.to(tl.int64) * cols
    hidden = float("-inf")
    top = tl.full([ROWS, 1], hidden, tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)  # of each lane, so that a block needs one reduction
    origin = tl.zeros([ROWS, 1], tl.float32)  # the first block's maximum: what the sum is about until the last
    apart = tl.zeros([ROWS, COLS], tl.float32)
    for at in tl.range(0, num_real, COLS, num_stages=2):
        col = at + tl.arange(0, COLS)[None, :]
        x = tl.load(logits_ptr + col, mask=inside & (col < cols), other=0.0).to(tl.float32)
        x = tl.where(col < num_real, x, hidden)
        above = tl.maximum(top, tl.max(x, 1, keep_dims=True))
        level = tl.where(above == hidden, 0.0, above)  # where nothing is above -infinity yet, subtract nothing
        total = total * tl.exp(top - level) + tl.exp(x - level)
        top = above
        if WITH_SUM:
            origin = tl.where(at == 0, level, origin)
            apart += tl.where(col < num_real, x - origin, 0.0)
    column = tl.load(column_ptr + row, mask=inside, other=-1)
    here = (column >= 0) & (column < num_real)
    tl.store(out_ptr + row, top, mask=inside)
    tl.store(out_ptr + rows + row, tl.sum(total, 1, keep_dims=True), mask=inside)
    tl.store(out_ptr + 2 * rows + row, tl.load(logits_ptr + column, mask=here, other=0.0).to(tl.float32), mask=inside)
    if WITH_SUM:
        below = tl.sum(apart, 1, keep_dims=True) + num_real * (origin - top)
        tl.store(out_ptr + 3 * rows + row, tl.where(num_real > 0, below, 0.0), mask=inside)


@triton.jit(do_not_specialize=["rows", "num_real"])
def gradient_kernel(gradient_ptr, logits_ptr, column_ptr, numbers_ptr, rows, cols, blocks, num_real,
                    ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    top = tl.load(numbers_ptr + row, mask=row < rows, other=0.0)
    factor = tl.load(numbers_ptr + rows + row, mask=row < rows, other=0.0)
    target = tl.load(numbers_ptr + 2 * rows + row, mask=row < rows, other=0.0)
    level = tl.load(numbers_ptr + 3 * rows + row, mask=row < rows, other=0.0)
    column = tl.load(column_ptr + row, mask=row < rows, other=-1)
    at = row.to(tl.int64) * cols + col
    x = tl.load(logits_ptr + at, mask=inside, other=0.0)
    gradient = tl.exp(x.to(tl.float32) - top) * factor - level
    gradient -= tl.where(col == column, target, 0.0)
    tl.store(gradient_ptr + at, tl.where(col < num_real, gradient, 0.0).to(x.dtype), mask=inside)
