"""LayerNorm and RMSNorm over the last dimension, alone or of residual + dropout(x + bias); forward
and backward.

A program has whole rows in registers. Traffic a bf16 element: norm reads x and writes y, 4 bytes,
add_norm 8; backward reads dy and x and writes dx, 6 bytes, and 2 each for the gradient of the sum
and the one after dropout. The gradients of weight and biases are sums of columns, see rows.py, of
which a program of the backward keeps its own in registers: that ends at _WIDEST columns
(norm_wide.py has more), and with the bias before dropout at _WIDEST_BIAS: beyond, dropout is a pass
of its own (residual.py), 2 bytes more. So it is where rows do not begin at a counter of their own.
Source: arXiv 1607.06450, arXiv 1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import norm_wide
from .options import OPTIONS
from .philox import _counter
from .residual import (
    WORDS,
    _added,
    _keep,
    bias_dropout_add,
    bias_dropout_add_backward,
    dropout_words,
)
from .rows import _both, add_up, check, launch, share, tile

OPERATORS = {"norm": (), "norm_backward": (), "add_norm": (), "add_norm_backward": ()}

_WIDEST_FORWARD = 16384
_WIDEST = 8192
_WIDEST_BIAS = 4096
_OF_THREAD = (
    8  # elements, in the backward: with 16, what is kept for each would allow half as many warps
)
_OF_THREAD_FORWARD = 16
_STAGES = ((4,), (2,), (1,))
"""Options of the backward: tiles that are on their way from memory; at most 2 where rows are wider
than _WIDEST_BIAS. 4 tiles of three tensors of 4096 float32 columns need 144 KiB of shared memory,
which RTX cards do not have. The results have the same bits with each option."""
_PROGRAMS = 256  # that sum columns: nearly whole rounds on 132 SMs (H100) and 108 (A100)
_LEAST = 8  # rows that one sums
_KEEP_ALL = ((None, 0, 0, 0, 1.0, 1, 0, 0), 0)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor]:
    """The normalised rows, and [rows, 2]: mean (0 if not `centre`), 1 / deviation.

    Shapes: x [.., h], weight, bias [h], all contiguous -> [.., h], [rows, 2].
    """
    check(x=x, weight=weight, bias=bias)
    if x.shape[-1] > _WIDEST_FORWARD:
        return norm_wide.norm(x, weight, bias, eps, centre)
    y, _, stats = _forward(x, None, None, weight, bias, eps, centre, _KEEP_ALL)
    return y, stats


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight, and bias (zeros if not `centre`)."""
    check(dy=dy, x=x, weight=weight)
    if x.shape[-1] > _WIDEST:
        return norm_wide.norm_backward(dy, None, x, weight, stats, centre)
    dx, _, _, dweight, dbias = _backward(dy, None, x, weight, stats, False, centre, _KEEP_ALL)
    return dx, dweight, dbias


def add_norm(
    x: Tensor,
    bias_of_x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised sum, the sum = residual + dropout(x + bias_of_x), and the statistics of
    `norm`."""
    check(x=x, bias_of_x=bias_of_x, residual=residual, weight=weight, bias=bias)
    mask = (key0, key1, counter, threshold, scale, stride, start)
    words, kind = dropout_words(x, *mask)
    if x.shape[-1] > _WIDEST_FORWARD or kind == 2:
        total = bias_dropout_add(x, bias_of_x, residual, *mask)
        y, stats = norm(total, weight, bias, eps, centre)
        return y, total, stats
    return _forward(x, bias_of_x, residual, weight, bias, eps, centre, (words, kind))


def add_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    weight: Tensor,
    stats: Tensor,
    with_bias: bool,
    centre: bool,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of: residual, x (empty without dropout: the residual's), bias_of_x (empty
    without one), weight, bias (zeros if not `centre`)."""
    check(dy=dy, dsum=dsum, sum=sum, weight=weight)
    mask = (key0, key1, counter, threshold, scale, stride, start)
    cols = sum.shape[-1]
    words, kind = dropout_words(sum, *mask)
    if cols <= (_WIDEST_BIAS if with_bias or kind else _WIDEST) and kind < 2:
        return _backward(dy, dsum, sum, weight, stats, with_bias, centre, (words, kind))
    if cols <= _WIDEST:
        dx, _, _, dweight, dbias = _backward(dy, dsum, sum, weight, stats, False, centre, _KEEP_ALL)
    else:
        dx, dweight, dbias = norm_wide.norm_backward(dy, dsum, sum, weight, stats, centre)
    dropped, dbias_of_x = bias_dropout_add_backward(dx, with_bias, *mask)
    return dx, dropped, dbias_of_x, dweight, dbias


def _forward(
    x: Tensor,
    bias_of_x: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    mask: tuple[tuple[Any, ...], int],
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    y, stats = torch.empty_like(x), x.new_empty((rows, 2), dtype=torch.float32)
    total = y if residual is None else torch.empty_like(x)
    words, kind = mask
    size = tile(cols, _WIDEST_FORWARD, _OF_THREAD_FORWARD)
    launch(
        norm_kernel,
        triton.cdiv(rows, size["ROWS"]),
        x,
        bias_of_x,
        residual,
        weight,
        bias,
        None if residual is None else total,
        y,
        stats,
        rows,
        cols,
        eps,
        *words,
        CENTRE=centre,
        DROP=kind,
        EARLY=x.element_size() == 2
        or (residual is None and cols > _WIDEST and not _is_blackwell(x)),
        **size,
    )
    return y, total, stats


def _is_blackwell(x: Tensor) -> bool:
    """Whether x is on a GPU for which the compiler would spill registers to load early in the
    widest rows."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (10, 0)


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    stats: Tensor,
    with_bias: bool,
    centre: bool,
    mask: tuple[tuple[Any, ...], int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    words, kind = mask
    dx = torch.empty_like(x)
    dropped = torch.empty_like(x) if kind else x.new_empty(0)
    dweight, dbias, dbias_of_x = (
        torch.empty_like(weight),
        torch.empty_like(weight),
        x.new_empty(cols * with_bias),
    )
    size = tile(cols, _WIDEST, _OF_THREAD if cols <= _WIDEST_BIAS else 2 * _OF_THREAD)
    rows_each, programs = share(rows, _PROGRAMS, _LEAST, size["ROWS"])
    partial = x.new_empty((programs, 1 + centre + with_bias, cols), dtype=torch.float32)
    candidates = _STAGES if cols <= _WIDEST_BIAS else _STAGES[1:]
    key = f"norm_backward_kernel {x.dtype} {cols} {'sum' * (dsum is not None)} {kind}"
    OPTIONS.launch(
        key,
        candidates,
        lambda stages: launch(
            norm_backward_kernel,
            programs,
            dy,
            dsum,
            x,
            weight,
            stats,
            dx,
            dropped if kind else None,
            partial,
            rows,
            cols,
            rows_each,
            *words,
            CENTRE=centre,
            WITH_BIAS=with_bias,
            DROP=kind,
            STAGES=stages[0],
            **size,
        ),
    )
    of_norm, of_x = (dweight, dbias), (dbias_of_x,) * with_bias
    add_up(partial, (*of_norm, *of_x) if centre else (dweight, *of_x, dbias))
    return dx, dropped, dbias_of_x, dweight, dbias


@triton.jit(do_not_specialize=["rows", "eps", *WORDS])
def norm_kernel(
    x_ptr,
    bias_of_x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    y_ptr,
    stats_ptr,
    rows,
    cols,
    eps,
    counter_ptr,
    key0,
    key1,
    threshold,
    scale,
    sample_rows,
    stride,
    start,
    CENTRE: tl.constexpr,
    DROP: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    col = tl.arange(0, COLS)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (col < cols)
    place = row.to(tl.int64) * cols + col
    if residual_ptr is None:
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
    else:
        step, sample = _counter(counter_ptr, 0)
        noise = (key0, key1, step, sample, threshold)
        x = _added(
            x_ptr,
            bias_of_x_ptr,
            residual_ptr,
            row,
            col,
            0,
            rows,
            cols,
            noise,
            scale,
            sample_rows,
            stride,
            start,
            DROP,
            COLS,
        )
        tl.store(sum_ptr + place, x, mask=inside)
    if EARLY:  # while x is on its way
        weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0)
    z = tl.where(inside, x.to(tl.float32), 0.0)
    mean = tl.zeros([ROWS, 1], tl.float32)
    if CENTRE:
        mean = tl.sum(z, 1, keep_dims=True) / cols
        z = tl.where(inside, z - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(z * z, 1, keep_dims=True) / cols + eps)
    tl.store(stats_ptr + 2 * row.to(tl.int64), mean, mask=row < rows)
    tl.store(stats_ptr + 2 * row.to(tl.int64) + 1, inverse, mask=row < rows)
    if not EARLY:  # it would need registers
        weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0)
    y = z * inverse * weight.to(tl.float32)
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    tl.store(y_ptr + row.to(tl.int64) * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_each", *WORDS])
def norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    dropped_ptr,
    partial_ptr,
    rows,
    cols,
    rows_each,
    counter_ptr,
    key0,
    key1,
    threshold,
    scale,
    sample_rows,
    stride,
    start,
    CENTRE: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    DROP: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    first = program * rows_each
    end = tl.minimum(first + rows_each, rows)
    col = tl.arange(0, COLS)[None, :]
    step, sample = _counter(counter_ptr, 0)
    noise = (key0, key1, step, sample, threshold)
    weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    dbias_of_x = tl.zeros([ROWS, COLS], tl.float32)
    for at in tl.range(first, end, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        place = row.to(tl.int64) * cols + col
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0)
        x = tl.load(x_ptr + place, mask=inside, other=0.0)
        inverse = tl.load(stats_ptr + 2 * row.to(tl.int64) + 1, mask=row < rows, other=0.0)
        dy = dy.to(tl.float32)
        z = x.to(tl.float32)
        dx = dy * weight.to(tl.float32)
        if CENTRE:
            z -= tl.load(stats_ptr + 2 * row.to(tl.int64), mask=row < rows, other=0.0)
            dbias += dy
        z *= inverse
        dweight += dy * z
        if CENTRE:
            along, level = tl.reduce((dx * z, dx), 1, _both, keep_dims=True)
            dx -= level / cols
        else:
            along = tl.sum(dx * z, 1, keep_dims=True)
        dx = (dx - z * (along / cols)) * inverse
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + place, rounded, mask=inside)
        if WITH_BIAS or DROP:
            dropped = tl.where(inside, rounded.to(tl.float32), 0.0)
            if DROP:
                keep = _keep(row, 0, noise, sample_rows, stride, start, DROP, COLS)
                dropped = tl.where(keep, dropped * scale, 0.0)
                tl.store(dropped_ptr + place, dropped.to(dropped_ptr.dtype.element_ty), mask=inside)
            dbias_of_x += dropped
    sums: tl.constexpr = 1 + CENTRE + WITH_BIAS
    partial_ptr += program.to(tl.int64) * sums * cols + col
    tl.store(partial_ptr, tl.sum(dweight, 0, keep_dims=True), mask=col < cols)
    if CENTRE:
        tl.store(partial_ptr + cols, tl.sum(dbias, 0, keep_dims=True), mask=col < cols)
    if WITH_BIAS:
        tl.store(
            partial_ptr + (sums - 1) * cols, tl.sum(dbias_of_x, 0, keep_dims=True), mask=col < cols
        )
