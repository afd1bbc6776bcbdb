"""residual + dropout(x + bias), and its gradients.

Traffic a bf16 element: forward reads x and the residual and writes the sum, 6 bytes; backward reads
the sum's gradient and writes x's, 4 bytes (2 without dropout, for the bias alone). Masks are
recomputed (philox.py): about 25 integer operations an element, which is more than the arithmetic,
and hides behind the traffic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .philox import _counter, _generate, _signed, _words
from .rows import add_up, check, launch, share, tile

OPERATORS = {"bias_dropout_add": (), "bias_dropout_add_backward": ()}

WORDS = ("key0", "key1", "threshold", "scale", "sample_rows", "stride", "start")
"""The kernels' arguments of dropout: they vary from call to call; one compiled kernel takes all
values."""
_WIDEST = 512
_OF_THREAD = 8  # elements, in the backward
_PROGRAMS = 2048  # that sum columns, of all columns
_LEAST = 32  # rows that one sums


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> Tensor:
    """Return residual + dropout(x + bias), rounded once.

    Shapes: x, residual [.., h], bias [h] -> [.., h], all contiguous.
    """
    check(x=x, bias=bias, residual=residual)
    out = torch.empty_like(x)
    words, kind = dropout_words(x, key0, key1, counter, threshold, scale, stride, start)
    size = tile(x.shape[-1], _WIDEST)
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    blocks = triton.cdiv(cols, size["COLS"])
    launch(
        add_kernel,
        triton.cdiv(rows, size["ROWS"]) * blocks,
        x,
        bias,
        residual,
        out,
        rows,
        cols,
        blocks,
        *words,
        DROP=kind,
        **size,
    )
    return out


def bias_dropout_add_backward(
    dsum: Tensor,
    with_bias: bool,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of x (empty without dropout: the sum's) and of the bias (empty without one)."""
    check(dsum=dsum)
    rows, cols = dsum.shape[:-1].numel(), dsum.shape[-1]
    dropped = torch.empty_like(dsum) if threshold else dsum.new_empty(0)
    dbias = dsum.new_empty(cols if with_bias else 0)
    words, kind = dropout_words(dsum, key0, key1, counter, threshold, scale, stride, start)
    if not with_bias and not threshold:
        return dropped, dbias
    size = tile(cols, _WIDEST, _OF_THREAD)
    blocks = triton.cdiv(cols, size["COLS"])
    rows_each, groups = share(rows, max(1, _PROGRAMS // max(blocks, 1)), _LEAST, size["ROWS"])
    partial = dsum.new_empty((groups, 1, cols), dtype=torch.float32) if with_bias else None
    launch(
        drop_kernel,
        groups * blocks,
        dsum,
        dropped if threshold else None,
        partial,
        rows,
        cols,
        blocks,
        rows_each,
        *words,
        DROP=kind,
        **size,
    )
    if partial is not None:
        add_up(partial, (dbias,))
    return dropped, dbias


def dropout_words(
    x: Tensor,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> tuple[tuple[Any, ...], int]:
    """The arguments of kernels for a mask on x [samples, .., h]: the counter, then WORDS; and the
    mask's kind.

    Kinds: 0 drops nothing; 1: rows begin at quads of their own, so that a quad's four words serve
    four neighbours; 2: any other.
    """
    rows = max(1, x.shape[:-1].numel() // max(1, x.shape[0] if x.dim() > 1 else 1))
    aligned = stride % 4 == 0 and start % 4 == 0
    kind = (1 if aligned else 2) if threshold else 0
    return (counter, *_signed(key0, key1, threshold), scale, rows, stride, start), kind


@triton.jit(do_not_specialize=["rows", *WORDS])
def add_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    sum_ptr,
    rows,
    cols,
    blocks,
    counter_ptr,
    key0,
    key1,
    threshold,
    scale,
    sample_rows,
    stride,
    start,
    DROP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    begin = tl.program_id(0) % blocks * COLS
    col = begin + tl.arange(0, COLS)[None, :]
    step, sample = _counter(counter_ptr, 0)
    noise = (key0, key1, step, sample, threshold)
    total = _added(
        x_ptr,
        bias_ptr,
        residual_ptr,
        row,
        col,
        begin,
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
    tl.store(sum_ptr + row.to(tl.int64) * cols + col, total, mask=(row < rows) & (col < cols))


@triton.jit(do_not_specialize=["rows", "rows_each", *WORDS])
def drop_kernel(
    dsum_ptr,
    dropped_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    counter_ptr,
    key0,
    key1,
    threshold,
    scale,
    sample_rows,
    stride,
    start,
    DROP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    group = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * COLS
    col = begin + tl.arange(0, COLS)[None, :]
    step, sample = _counter(counter_ptr, 0)
    noise = (key0, key1, step, sample, threshold)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(group * rows_each, tl.minimum((group + 1) * rows_each, rows), ROWS):
        row = at + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (col < cols)
        place = row.to(tl.int64) * cols + col
        dx = tl.load(dsum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            keep = _keep(row, begin, noise, sample_rows, stride, start, DROP, COLS)
            dx = tl.where(keep, dx * scale, 0.0)
            tl.store(dropped_ptr + place, dx.to(dropped_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            sums += dx
    if partial_ptr is not None:
        tl.store(
            partial_ptr + group.to(tl.int64) * cols + col,
            tl.sum(sums, 0, keep_dims=True),
            mask=col < cols,
        )


@triton.jit
def _added(
    x_ptr,
    bias_ptr,
    residual_ptr,
    row,
    col,
    begin,
    rows,
    cols,
    noise,
    scale,
    sample_rows,
    stride,
    start,
    DROP: tl.constexpr,
    COLS: tl.constexpr,
):
    """A tile of the sum, in the type of x; row [ROWS, 1], col [1, COLS] = begin, begin + 1, .."""
    inside = (row < rows) & (col < cols)
    place = row.to(tl.int64) * cols + col
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    value = x.to(tl.float32)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    if DROP:
        keep = _keep(row, begin, noise, sample_rows, stride, start, DROP, COLS)
        value = tl.where(keep, value * scale, 0.0)
    return (tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32) + value).to(
        x.dtype
    )


@triton.jit
def _keep(row, begin, noise, sample_rows, stride, start, DROP: tl.constexpr, COLS: tl.constexpr):
    """The elements that stay, in rows [ROWS, 1] of all samples and the COLS columns from `begin`, a
    multiple of 4."""
    key0, key1, step, sample, threshold = noise
    first = start.to(tl.int64) + begin + (row % sample_rows).to(tl.int64) * stride
    number = sample + row // sample_rows
    if DROP == 1:
        bits = _generate(first // 4 + tl.arange(0, COLS // 4)[None, :], key0, key1, step, number)
    else:  # an element's own counter, of whose words it takes one
        index = first + tl.arange(0, COLS)[None, :]
        word = index % 4
        c0, c1, c2, c3 = _words(index // 4, key0, key1, step, number)
        bits = tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3))
    return bits >= threshold.to(tl.uint32, bitcast=True)
