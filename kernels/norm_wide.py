"""LayerNorm and RMSNorm of rows that do not fit in registers: kernels that go through a row by
blocks, twice.

Traffic a bf16 element: forward reads x twice and writes y, 6 bytes; backward reads dy and x three
times and writes dx, 14 bytes, plus 2 for the gradient of the sum. The second reading of a row finds
it in the cache (its program has just read it), so 4 and 10 come from memory. Sums of columns are a
kernel of their own (the third reading).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import add_up, launch, share, tile

_BLOCK = {"COLS": 4096, "num_warps": 8}
_NARROW = 512  # columns of a program that sums them
_PROGRAMS = 2048  # that sum columns, of all columns
_LEAST = 32  # rows that one sums


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor]:
    """norm.norm for rows of any width."""
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    y, stats = torch.empty_like(x), x.new_empty((rows, 2), dtype=torch.float32)
    launch(wide_norm_kernel, rows, x, weight, bias, y, stats, cols, eps, CENTRE=centre, **_BLOCK)
    return y, stats


def norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, stats: Tensor, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """norm.norm_backward for rows of any width; dsum, if any, is added to the gradient of x."""
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    launch(
        wide_backward_kernel, rows, dy, dsum, x, weight, stats, dx, cols, CENTRE=centre, **_BLOCK
    )
    size = tile(cols, _NARROW)
    blocks = triton.cdiv(cols, size["COLS"])
    rows_each, groups = share(rows, max(1, _PROGRAMS // blocks), _LEAST, size["ROWS"])
    partial = x.new_empty((groups, 1 + centre, cols), dtype=torch.float32)
    launch(
        columns_kernel,
        groups * blocks,
        dy,
        x,
        stats,
        partial,
        rows,
        cols,
        blocks,
        rows_each,
        CENTRE=centre,
        **size,
    )
    add_up(partial, (dweight, dbias))
    return dx, dweight, dbias


@triton.jit(do_not_specialize=["eps"])
def wide_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    cols,
    eps,
    CENTRE: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * cols
    y_ptr += row * cols
    lane = tl.arange(0, COLS)
    mean = 0.0
    squares = 0.0
    for at in range(0, cols, COLS):
        inside = at + lane < cols
        x = tl.load(x_ptr + at + lane, mask=inside, other=0.0).to(tl.float32)
        if CENTRE:  # adds a block's squares about its mean to the blocks' before (Chan et al. 1983)
            size = tl.minimum(cols - at, COLS)
            apart = tl.sum(x) / size - mean
            x = tl.where(inside, x - mean - apart, 0.0)
            mean += apart * size / (at + size)
            squares += apart * apart * (size * (at / (at + size)))
        squares += tl.sum(x * x)
    inverse = tl.rsqrt(squares / cols + eps)
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, inverse)
    for at in range(0, cols, COLS):
        inside = at + lane < cols
        x = tl.load(x_ptr + at + lane, mask=inside, other=0.0).to(tl.float32)
        y = (
            (x - mean)
            * inverse
            * tl.load(weight_ptr + at + lane, mask=inside, other=0.0).to(tl.float32)
        )
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at + lane, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def wide_backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    cols,
    CENTRE: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(stats_ptr + 2 * row)
    inverse = tl.load(stats_ptr + 2 * row + 1)
    lane = tl.arange(0, COLS)
    along = tl.zeros([COLS], tl.float32)
    level = tl.zeros([COLS], tl.float32)
    for at in range(0, cols, COLS):
        dx, z = _wide_parts(dy_ptr, x_ptr, weight_ptr, row, at + lane, cols, mean, inverse)
        along += dx * z
        level += dx
    c1 = tl.sum(along) / cols
    c0 = tl.sum(level) / cols if CENTRE else 0.0
    for at in range(0, cols, COLS):
        dx, z = _wide_parts(dy_ptr, x_ptr, weight_ptr, row, at + lane, cols, mean, inverse)
        inside = at + lane < cols
        dx = (dx - c0 - z * c1) * inverse
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * cols + at + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * cols + at + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wide_parts(dy_ptr, x_ptr, weight_ptr, row, col, cols, mean, inverse):
    """The gradient of the normalised elements, and those."""
    inside = col < cols
    dy = tl.load(dy_ptr + row * cols + col, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * cols + col, mask=inside, other=0.0).to(tl.float32)
    return dy * tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32), (
        x - mean
    ) * inverse


@triton.jit(do_not_specialize=["rows", "rows_each"])
def columns_kernel(
    dy_ptr,
    x_ptr,
    stats_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    group = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(group * rows_each, tl.minimum((group + 1) * rows_each, rows), ROWS):
        row = at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        place = row.to(tl.int64) * cols + col
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + 2 * row.to(tl.int64), mask=row < rows, other=0.0)
        inverse = tl.load(stats_ptr + 2 * row.to(tl.int64) + 1, mask=row < rows, other=0.0)
        dweight += dy * ((x - mean) * inverse)
        dbias += dy
    partial_ptr += group.to(tl.int64) * (1 + CENTRE) * cols + col
    tl.store(partial_ptr, tl.sum(dweight, 0, keep_dims=True), mask=col < cols)
    if CENTRE:
        tl.store(partial_ptr + cols, tl.sum(dbias, 0, keep_dims=True), mask=col < cols)
