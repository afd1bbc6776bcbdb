"""The passes of an optimizer over lists of tensors, each in one launch however many there are; sums
of squares in two.

A program takes a chunk of one tensor. What it is told of it lies in device memory: which chunk of
which tensor it has, and the tensors' addresses. These depend on addresses and sizes alone, so they
are made once for each list of tensors that comes by: a pipeline's few buffers take turns. Numbers
that vary from step to step (learning rate, clipping) are sent along from page-locked memory, which
waits for nothing. A CUDA graph would hold on to the table and numbers of its capture: these are not
for graphs.

Products and sums are rounded one by one (no fused multiply-add), so an element's bits depend
neither on its place nor on how its neighbours are read: 16 bytes at a time where every tensor
begins at a multiple of 16. The float32 square root and quotient of Adam are the GPU's own, good to
2 units in the last place.

Traffic an element, float32 weights with a bfloat16 working copy: Adam reads weight, gradient and
two moments and writes weight, moments and copy, 30 bytes; a move 14; squares are read, 4, and
summed in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import launch

OPERATORS = {
    "adam_": ("means", "squares", "new", "working"),
    "move_": ("new", "working"),
    "extrapolate_": ("new", "previous", "working"),
    "sum_squares": (),
}

_CHUNK = 8192  # elements of a program
# at a time: 4 a thread, so that types of 4 bytes and 2 are read and written by the same threads
_BLOCK = 512
_SUMS = 1024  # at a time, where they are only read
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def adam_(
    old: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    new: Sequence[Tensor],
    working: Sequence[Tensor],
    keeps: Sequence[float],
    numbers: Sequence[float],
    predicted: bool,
) -> None:
    """A step of Adam; see hybridpar/ops/update.py.

    `numbers`: scale, 1 - beta1, beta2, of_mean, of_gradient, 1 / root, eps, in the terms of csrc.
    `new` may be `old`, or the gradients.
    """
    assert len(keeps) == len(old), (
        f"adam_: needs a keep for each of {len(old)} tensors, got {len(keeps)}"
    )
    assert len(numbers) == 7, f"adam_: needs 7 numbers, got {len(numbers)}"
    _run(
        adam_kernel,
        (old, gradients, means, squares, new),
        working,
        [*numbers, 1 - numbers[2], *keeps],
        PREDICTED=predicted,
        NESTEROV=numbers[4] != 0,
    )


def move_(
    old: Sequence[Tensor],
    directions: Sequence[Tensor],
    new: Sequence[Tensor],
    working: Sequence[Tensor],
    keeps: Sequence[float],
    factors: Sequence[float],
    predicted: bool,
) -> None:
    """new = keep old + factor direction, with a keep and a factor for each tensor."""
    assert len(keeps) == len(factors) == len(old), (
        f"move_: needs a keep and a factor for each of {len(old)} tensors"
    )
    _run(move_kernel, (old, directions, new), working, [*keeps, *factors], PREDICTED=predicted)


def extrapolate_(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    previous: Sequence[Tensor],
    working: Sequence[Tensor],
) -> None:
    """new += u - previous and previous = u, where u = new - old."""
    _run(extrapolate_kernel, (old, new, previous), working, (), PREDICTED=False)


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, float64 [number of tensors], in an order that depends on
    its size alone."""
    assert tensors, "sum_squares: there are no tensors, and so no device"
    table = _table_of((tensors,))
    chunks = len(table.chunks)
    partial = tensors[0].new_empty(chunks, dtype=torch.float64)
    out = tensors[0].new_empty(len(tensors), dtype=torch.float64)
    launch(
        squares_kernel,
        chunks,
        table.chunks,
        table.addresses,
        table.sizes,
        partial,
        TYPE=_TYPES[tensors[0].dtype],
        ALIGNED=table.aligned,
        CHUNK=_CHUNK,
        BLOCK=_SUMS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    launch(add_squares_kernel, len(tensors), table.firsts, partial, out, BLOCK=_SUMS, num_warps=4)
    return out


class Table(NamedTuple):
    """The addresses of lists of tensors, on their device.

    Shapes: chunks int32 [number of chunks, 2]: tensor, which of its chunks; addresses int64 [lists,
        tensors]; sizes
    int64 [tensors]; firsts int64 [tensors + 1]: each tensor's first chunk, and how many there are.
    """

    chunks: Tensor
    addresses: Tensor
    sizes: Tensor
    firsts: Tensor
    aligned: bool


@functools.lru_cache(maxsize=256)  # a table for each learning rate of each buffer
def _table(
    device: torch.device, sizes: tuple[int, ...], addresses: tuple[tuple[int, ...], ...]
) -> Table:
    """A function of its arguments alone, so it does not matter whose tensors these were."""
    counts = torch.tensor([triton.cdiv(size, _CHUNK) for size in sizes])
    firsts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    tensor = torch.repeat_interleave(counts)
    chunks = torch.stack((tensor, torch.arange(len(tensor)) - firsts[tensor]), 1).int()
    parts = (chunks, torch.tensor(addresses), torch.tensor(sizes), firsts)
    return Table(
        *(_send(x, device) for x in parts), all(a % 16 == 0 for column in addresses for a in column)
    )


def _table_of(columns: Sequence[Sequence[Tensor]]) -> Table:
    """Looks at every tensor in C, not in Python: there may be thousands, and the GPU waits."""
    sizes = tuple(map(Tensor.numel, columns[0]))
    for column in columns:
        assert len(column) == len(sizes), (
            f"lists must be as long as each other, got {list(map(len, columns))}"
        )
        assert all(map(Tensor.is_contiguous, column)), "tensors must be contiguous"
        others, types = tuple(map(Tensor.numel, column)), {x.dtype for x in column}
        assert others == sizes, (
            f"tensors must be as large as each other, got {sizes} and {others} elements"
        )
        assert len(types) == 1, f"tensors must be of one type, got {types}"
    return _table(
        columns[0][0].device,
        sizes,
        tuple(tuple(map(Tensor.data_ptr, column)) for column in columns),
    )


def _send(x: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _run(
    kernel: object,
    columns: Sequence[Sequence[Tensor]],
    working: Sequence[Tensor],
    numbers: Sequence[float],
    **constants: object,
) -> None:
    """Starts an elementwise kernel over float32 or float64 `columns`, and the working copies if
    any."""
    if not columns[0]:
        return
    like = columns[0][0]
    assert like.dtype in (torch.float32, torch.float64), (
        f"needs float32 or float64 weights, not {like.dtype}"
    )
    assert all(column[0].dtype == like.dtype for column in columns), (
        "weights, gradients and state must be of one type"
    )
    table = _table_of((*columns, working) if working else columns)
    values = [_send(torch.tensor(numbers, dtype=torch.float64), like.device)] if numbers else []
    launch(
        kernel,
        len(table.chunks),
        table.chunks,
        table.addresses,
        table.sizes,
        *values,
        len(table.sizes),
        TYPE=_TYPES[like.dtype],
        COPY=_TYPES[working[0].dtype] if working else None,
        ALIGNED=table.aligned,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **constants,
    )


@triton.jit(do_not_specialize=["count"])
def adam_kernel(
    chunks_ptr,
    addresses_ptr,
    sizes_ptr,
    numbers_ptr,
    count,
    TYPE: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICTED: tl.constexpr,
    NESTEROV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, at, whole, end = _chunk(chunks_ptr, sizes_ptr, CHUNK, BLOCK)
    addresses_ptr += which
    old_ptr = _at(addresses_ptr, TYPE, ALIGNED)
    gradient_ptr = _at(addresses_ptr + count, TYPE, ALIGNED)
    mean_ptr = _at(addresses_ptr + 2 * count, TYPE, ALIGNED)
    square_ptr = _at(addresses_ptr + 3 * count, TYPE, ALIGNED)
    new_ptr = _at(addresses_ptr + 4 * count, TYPE, ALIGNED)
    copy_ptr = new_ptr if COPY is None else _at(addresses_ptr + 5 * count, COPY, ALIGNED)
    scale = tl.load(numbers_ptr).to(TYPE)
    rest1 = tl.load(numbers_ptr + 1).to(TYPE)
    beta2 = tl.load(numbers_ptr + 2).to(TYPE)
    of_mean = tl.load(numbers_ptr + 3).to(TYPE)
    of_gradient = tl.load(numbers_ptr + 4).to(TYPE)
    inverse_root = tl.load(numbers_ptr + 5).to(TYPE)
    eps = tl.load(numbers_ptr + 6).to(TYPE)
    rest2 = tl.load(numbers_ptr + 7).to(TYPE)
    keep = tl.load(numbers_ptr + 8 + which).to(TYPE)
    for i in range(at, whole, BLOCK):
        _adam(
            old_ptr,
            gradient_ptr,
            mean_ptr,
            square_ptr,
            new_ptr,
            copy_ptr,
            i,
            end,
            scale,
            rest1,
            beta2,
            rest2,
            of_mean,
            of_gradient,
            inverse_root,
            eps,
            keep,
            COPY,
            PREDICTED,
            NESTEROV,
            False,
            BLOCK,
        )
    if whole < end:
        _adam(
            old_ptr,
            gradient_ptr,
            mean_ptr,
            square_ptr,
            new_ptr,
            copy_ptr,
            whole,
            end,
            scale,
            rest1,
            beta2,
            rest2,
            of_mean,
            of_gradient,
            inverse_root,
            eps,
            keep,
            COPY,
            PREDICTED,
            NESTEROV,
            True,
            BLOCK,
        )


@triton.jit
def _adam(
    old_ptr,
    gradient_ptr,
    mean_ptr,
    square_ptr,
    new_ptr,
    copy_ptr,
    at,
    end,
    scale,
    rest1,
    beta2,
    rest2,
    of_mean,
    of_gradient,
    inverse_root,
    eps,
    keep,
    COPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    NESTEROV: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x = _load(old_ptr, at, end, PARTIAL, BLOCK)
    g = _load(gradient_ptr, at, end, PARTIAL, BLOCK) * scale
    m = _load(mean_ptr, at, end, PARTIAL, BLOCK)
    v = _load(square_ptr, at, end, PARTIAL, BLOCK)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    root = tl.sqrt(v) * inverse_root + eps
    change = (of_mean * m + of_gradient * g) / root if NESTEROV else of_mean * (m / root)
    _store(mean_ptr, m, at, end, PARTIAL, BLOCK)
    _store(square_ptr, v, at, end, PARTIAL, BLOCK)
    _write(new_ptr, copy_ptr, x, keep * x - change, at, end, COPY, PREDICTED, PARTIAL, BLOCK)


@triton.jit(do_not_specialize=["count"])
def move_kernel(
    chunks_ptr,
    addresses_ptr,
    sizes_ptr,
    numbers_ptr,
    count,
    TYPE: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICTED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, at, whole, end = _chunk(chunks_ptr, sizes_ptr, CHUNK, BLOCK)
    addresses_ptr += which
    old_ptr = _at(addresses_ptr, TYPE, ALIGNED)
    direction_ptr = _at(addresses_ptr + count, TYPE, ALIGNED)
    new_ptr = _at(addresses_ptr + 2 * count, TYPE, ALIGNED)
    copy_ptr = new_ptr if COPY is None else _at(addresses_ptr + 3 * count, COPY, ALIGNED)
    keep = tl.load(numbers_ptr + which).to(TYPE)
    factor = tl.load(numbers_ptr + count + which).to(TYPE)
    for i in range(at, whole, BLOCK):
        _move(
            old_ptr,
            direction_ptr,
            new_ptr,
            copy_ptr,
            i,
            end,
            keep,
            factor,
            COPY,
            PREDICTED,
            False,
            BLOCK,
        )
    if whole < end:
        _move(
            old_ptr,
            direction_ptr,
            new_ptr,
            copy_ptr,
            whole,
            end,
            keep,
            factor,
            COPY,
            PREDICTED,
            True,
            BLOCK,
        )


@triton.jit
def _move(
    old_ptr,
    direction_ptr,
    new_ptr,
    copy_ptr,
    at,
    end,
    keep,
    factor,
    COPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x = _load(old_ptr, at, end, PARTIAL, BLOCK)
    fresh = keep * x + factor * _load(direction_ptr, at, end, PARTIAL, BLOCK)
    _write(new_ptr, copy_ptr, x, fresh, at, end, COPY, PREDICTED, PARTIAL, BLOCK)


@triton.jit(do_not_specialize=["count"])
def extrapolate_kernel(
    chunks_ptr,
    addresses_ptr,
    sizes_ptr,
    count,
    TYPE: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    PREDICTED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, at, whole, end = _chunk(chunks_ptr, sizes_ptr, CHUNK, BLOCK)
    addresses_ptr += which
    old_ptr = _at(addresses_ptr, TYPE, ALIGNED)
    new_ptr = _at(addresses_ptr + count, TYPE, ALIGNED)
    previous_ptr = _at(addresses_ptr + 2 * count, TYPE, ALIGNED)
    copy_ptr = new_ptr if COPY is None else _at(addresses_ptr + 3 * count, COPY, ALIGNED)
    for i in range(at, whole, BLOCK):
        _extrapolate(
            old_ptr, new_ptr, previous_ptr, copy_ptr, i, end, COPY, PREDICTED, False, BLOCK
        )
    if whole < end:
        _extrapolate(
            old_ptr, new_ptr, previous_ptr, copy_ptr, whole, end, COPY, PREDICTED, True, BLOCK
        )


@triton.jit
def _extrapolate(
    old_ptr,
    new_ptr,
    previous_ptr,
    copy_ptr,
    at,
    end,
    COPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x = _load(new_ptr, at, end, PARTIAL, BLOCK)
    update = x - _load(old_ptr, at, end, PARTIAL, BLOCK)
    fresh = x + update - _load(previous_ptr, at, end, PARTIAL, BLOCK)
    _store(previous_ptr, update, at, end, PARTIAL, BLOCK)
    _write(new_ptr, copy_ptr, x, fresh, at, end, COPY, PREDICTED, PARTIAL, BLOCK)


@triton.jit
def squares_kernel(
    chunks_ptr,
    addresses_ptr,
    sizes_ptr,
    partial_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which, at, whole, end = _chunk(chunks_ptr, sizes_ptr, CHUNK, BLOCK)
    x_ptr = _at(addresses_ptr + which, TYPE, ALIGNED)
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(at, whole, BLOCK):
        x = _load(x_ptr, i, end, False, BLOCK).to(tl.float64)
        total += x * x
    if whole < end:
        x = _load(x_ptr, whole, end, True, BLOCK).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def add_squares_kernel(firsts_ptr, partial_ptr, out_ptr, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    begin = tl.load(firsts_ptr + which)
    end = tl.load(firsts_ptr + which + 1)
    total = tl.zeros([BLOCK], tl.float64)
    for at in range(begin, end, BLOCK):
        total += _load(partial_ptr, at, end, True, BLOCK)
    tl.store(out_ptr + which, tl.sum(total, 0))


@triton.jit
def _chunk(chunks_ptr, sizes_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The tensor of a program; where its part begins, where its whole blocks end, and where it
    ends."""
    which = tl.load(chunks_ptr + 2 * tl.program_id(0))
    begin = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    end = tl.minimum(begin + CHUNK, tl.load(sizes_ptr + which))
    return which, begin, begin + (end - begin) // BLOCK * BLOCK, end


@triton.jit
def _at(address_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that lies there."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(ptr, at, end, PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    """The block at `at`; zero from `end` on where it is `PARTIAL`: without a mask it is read 16
    bytes at a time."""
    i = at + tl.arange(0, BLOCK)
    return tl.load(ptr + i, mask=i < end, other=0.0) if PARTIAL else tl.load(ptr + i)


@triton.jit
def _store(ptr, x, at, end, PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    i = at + tl.arange(0, BLOCK)
    if PARTIAL:
        tl.store(ptr + i, x, mask=i < end)
    else:
        tl.store(ptr + i, x)


@triton.jit
def _write(
    new_ptr,
    copy_ptr,
    old,
    fresh,
    at,
    end,
    COPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The new weights, and what follows of them as the working copy."""
    _store(new_ptr, fresh, at, end, PARTIAL, BLOCK)
    if COPY is not None:
        copy = fresh
        if PREDICTED:
            copy = 2.0 * fresh - old  # twice is exact: one rounding
        _store(copy_ptr, copy.to(COPY), at, end, PARTIAL, BLOCK)
