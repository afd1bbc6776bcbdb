"""softmax(scale * x) over the last dimension with causal and padding masks, forward and backward.

Traffic a bf16 element: forward reads x and writes y, 4 bytes; backward reads dy and y and writes dx, 6. What a causal
mask hides is not read, so half of the reading is saved; the padding mask is read once a row, from the cache.
Rows of up to _WIDEST keys are held in registers; kernels named wide_ go through longer ones by blocks, twice, the
second time mostly from the cache. Rows are read 16 bytes at a time where keys are a multiple of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import check, launch, tile

OPERATORS = {"masked_softmax": (), "masked_softmax_backward": ()}

_WIDEST = 16384
_OF_THREAD = 16
_BLOCK = {"ROWS": 1, "COLS": 2048, "num_warps": 8}


def masked_softmax(x: Tensor, real: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Zeros for keys that are hidden, and for queries that see none.

    Shapes: x [samples, heads, queries, keys], real bool [samples, keys], contiguous -> like x.
    """
    check(x=x)
    assert real is None or (real.is_contiguous() and real.dtype == torch.bool), "real must be bool, contiguous"
    y = torch.empty_like(x)
    _launch(softmax_kernel, wide_softmax_kernel, (x, real, y), y, scale, causal)
    return y


def masked_softmax_backward(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The gradient of x."""
    check(dy=dy, y=y)
    dx = torch.empty_like(y)
    _launch(softmax_backward_kernel, wide_softmax_backward_kernel, (dy, y, dx), y, scale, causal)
    return dx


def _launch(whole, wide, tensors: tuple[Tensor | None, ...], y: Tensor, scale: float, causal: bool) -> None:
    _, heads, queries, keys = y.shape
    if y.numel() == 0:
        return
    rows = y.shape[:-1].numel()
    kernel, size = (whole, tile(keys, _WIDEST, _OF_THREAD)) if keys <= _WIDEST else (wide, _BLOCK)
    launch(kernel, triton.cdiv(rows, size["ROWS"]), *tensors, rows, keys, queries, heads * queries, scale,
           CAUSAL=causal, **size)


@triton.jit(do_not_specialize=["rows", "queries", "sample_rows", "scale"])
def softmax_kernel(x_ptr, real_ptr, y_ptr, rows, keys, queries, sample_rows, scale, CAUSAL: tl.constexpr,
                   ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    seen = _seen(row, rows, keys, queries, CAUSAL)
    x = _scores(x_ptr, real_ptr, row, col, rows, seen, keys, sample_rows, scale)
    x = tl.exp(x - _finite(tl.max(x, 1, keep_dims=True)))
    y = x * _inverse(tl.sum(x, 1, keep_dims=True))
    place = row.to(tl.int64) * keys + col
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(row < rows) & (col < keys))


@triton.jit(do_not_specialize=["rows", "queries", "sample_rows", "scale"])
def softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, rows, keys, queries, sample_rows, scale, CAUSAL: tl.constexpr,
                            ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    seen = _seen(row, rows, keys, queries, CAUSAL)
    dy, y = _gradients(dy_ptr, y_ptr, row, col, seen, keys)
    dx = y * (dy - tl.sum(dy * y, 1, keep_dims=True)) * scale
    place = row.to(tl.int64) * keys + col
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=(row < rows) & (col < keys))


@triton.jit(do_not_specialize=["rows", "queries", "sample_rows", "scale"])
def wide_softmax_kernel(x_ptr, real_ptr, y_ptr, rows, keys, queries, sample_rows, scale, CAUSAL: tl.constexpr,
                        ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = _seen(row, rows, keys, queries, CAUSAL)
    top = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(0, tl.max(seen), COLS):
        x = _scores(x_ptr, real_ptr, row, at + tl.arange(0, COLS)[None, :], rows, seen, keys, sample_rows, scale)
        above = tl.maximum(top, tl.max(x, 1, keep_dims=True))
        total = total * tl.exp(top - _finite(above)) + tl.exp(x - _finite(above))
        top = above
    inverse = _inverse(tl.sum(total, 1, keep_dims=True))
    for at in range(0, keys, COLS):
        col = at + tl.arange(0, COLS)[None, :]
        x = _scores(x_ptr, real_ptr, row, col, rows, seen, keys, sample_rows, scale)
        y = tl.exp(x - _finite(top)) * inverse
        place = row.to(tl.int64) * keys + col
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(row < rows) & (col < keys))


@triton.jit(do_not_specialize=["rows", "queries", "sample_rows", "scale"])
def wide_softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, rows, keys, queries, sample_rows, scale, CAUSAL: tl.constexpr,
                                 ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    seen = _seen(row, rows, keys, queries, CAUSAL)
    along = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(0, tl.max(seen), COLS):
        dy, y = _gradients(dy_ptr, y_ptr, row, at + tl.arange(0, COLS)[None, :], seen, keys)
        along += dy * y
    mean = tl.sum(along, 1, keep_dims=True)
    for at in range(0, keys, COLS):
        col = at + tl.arange(0, COLS)[None, :]
        dy, y = _gradients(dy_ptr, y_ptr, row, col, seen, keys)
        dx = y * (dy - mean) * scale
        place = row.to(tl.int64) * keys + col
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=(row < rows) & (col < keys))


@triton.jit
def _seen(row, rows, keys, queries, CAUSAL: tl.constexpr):
    """Number of keys that rows see at most [ROWS, 1]; none beyond the last row."""
    seen = keys
    if CAUSAL:  # counted from the end
        seen = tl.maximum(row % queries + (keys - queries + 1), 0)
        seen = tl.minimum(seen, keys)
    return tl.where(row < rows, seen, 0)


@triton.jit
def _load_seen(x_ptr, row, col, seen, keys):
    """Zeros where rows do not see; reads by whole 16, so that the mask does not break up vectors."""
    inside = (col < (seen + 15) // 16 * 16) & (col < keys)
    x = tl.load(x_ptr + row.to(tl.int64) * keys + col, mask=inside, other=0.0)
    return tl.where(col < seen, x.to(tl.float32), 0.0)


@triton.jit
def _scores(x_ptr, real_ptr, row, col, rows, seen, keys, sample_rows, scale):
    """Scaled; -infinity where rows do not see."""
    x = _load_seen(x_ptr, row, col, seen, keys) * scale
    visible = col < seen
    if real_ptr is not None:
        inside = (row < rows) & (col < keys)
        real = tl.load(real_ptr + (row // sample_rows).to(tl.int64) * keys + col, mask=inside, other=0)
        visible = visible & (real != 0)
    return tl.where(visible, x, float("-inf"))


@triton.jit
def _gradients(dy_ptr, y_ptr, row, col, seen, keys):
    return _load_seen(dy_ptr, row, col, seen, keys), _load_seen(y_ptr, row, col, seen, keys)


@triton.jit
def _finite(top):
    """The maximum to subtract: nothing from rows that see nothing, as -infinity less itself is not a number."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _inverse(total):
    return tl.where(total == 0.0, 0.0, 1.0 / total)
