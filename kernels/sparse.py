"""The elements of a tensor with large magnitudes, packed into values and places, and added to
another.

hybridpar/ops/sparse.py describes messages. A piece of a tensor is some rows of places: 8
elements of a byte of bits, or 255 with a count. How many elements each piece has is counted first,
so where it writes follows from counts alone, and bytes equal the reference's. The k-th largest
magnitude is found by its digits of 8 bits, highest first.

Traffic an element of float32: a threshold reads 16 bytes, counting 4, packing 8 (it counts again),
and what is sent is read and written once; adding touches what is sent alone, but for the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .largest import _bfloat16_bits, _size
from .rows import check, launch

OPERATORS = {
    "sparse_threshold": (),
    "sparse_count": (),
    "sparse_pack_": ("x", "values", "places"),
    "sparse_add_": ("x",),
}

_DIGIT = 256
_SPAN = 16384  # elements of which a program counts digits
_BLOCK = 1024  # at a time
_FORMS = {True: {"ROWS": 256, "COLS": 8, "WIDTH": 8}, False: {"ROWS": 8, "COLS": 256, "WIDTH": 255}}
"""PipelineShape of pieces, by whether places are bits."""


def sparse_threshold(x: Tensor, k: int) -> Tensor:
    """The k-th largest size, never 0 but for k = all. Shapes: x [..], without gaps -> [1]."""
    check(x=x)
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    if k == x.numel():
        return found.view(x.dtype)
    rest = torch.full((1,), k, dtype=torch.int64, device=x.device)
    programs = triton.cdiv(x.numel(), _SPAN)
    partial = torch.empty((programs, _DIGIT), dtype=torch.int32, device=x.device)
    for shift in (24, 16, 8, 0):
        launch(
            digits_kernel,
            programs,
            x,
            found,
            partial,
            x.numel(),
            shift,
            SPAN=_SPAN,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        counts = partial.sum(0).flip(0)
        with_higher = counts.cumsum(0)
        place = (with_higher < rest).sum().view(1)
        found |= ((_DIGIT - 1 - place) << shift).int()
        rest -= (with_higher - counts)[place]
    return found.clamp_(min=1).view(x.dtype)


def sparse_count(x: Tensor, threshold: Tensor) -> Tensor:
    """How many elements are at least that large. Shapes: -> int64 [1]."""
    return _counts(x, threshold, _BLOCK).sum().view(1)


def sparse_pack_(x: Tensor, threshold: Tensor, values: Tensor, places: Tensor) -> None:
    """Packs the first elements that are, as many as values have room for, and takes them off x."""
    check(x=x, threshold=threshold)
    count, n = values.numel(), x.numel()
    if count == n:
        values.copy_(x.view(-1))
        x.view(-1).sub_(values)
        return
    form = _form(n, count)
    piece = form["ROWS"] * form["WIDTH"]
    ends = _counts(x, threshold, piece).cumsum(0)
    if count > (int(ends[-1]) if n else 0):
        raise RuntimeError("there are fewer such elements than are to be packed")
    if count == 0:
        places.zero_()
        return
    launch(
        pack_kernel,
        len(ends),
        x,
        threshold,
        values.view(torch.int16) if _rounded(x, values) else values,
        places,
        ends,
        n,
        count,
        triton.cdiv(n, form["WIDTH"]),
        ROUNDED=_rounded(x, values),
        **form,
        num_warps=8,
    )


def sparse_add_(x: Tensor, values: Tensor, places: Tensor, overwrite: bool) -> None:
    """Adds a message to x; overwrite: to zero."""
    check(x=x)
    count, n = values.numel(), x.numel()
    if count == n:
        x.view(-1).copy_(values) if overwrite else x.view(-1).add_(values)
        return
    form = _form(n, count)
    rows = triton.cdiv(n, form["WIDTH"])
    counts = torch.empty(triton.cdiv(rows, form["ROWS"]), dtype=torch.int64, device=x.device)
    launch(
        places_kernel,
        len(counts),
        places,
        counts,
        rows,
        BITS=form["COLS"] == 8,
        ROWS=form["ROWS"],
        num_warps=4,
    )
    ends = counts.cumsum(0)
    if int(ends[-1]) != count:
        raise RuntimeError(f"the message is damaged: {int(ends[-1])} places of {count} values")
    if overwrite:
        x.zero_()
    if count:
        launch(
            add_kernel,
            len(ends),
            x,
            values.view(torch.int16) if _rounded(x, values) else values,
            places,
            ends,
            n,
            count,
            rows,
            ROUNDED=_rounded(x, values),
            **form,
            num_warps=8,
        )


def _form(n: int, count: int) -> dict[str, int]:
    return _FORMS[triton.cdiv(n, 8) <= triton.cdiv(n, 255) + count]


def _rounded(x: Tensor, values: Tensor) -> bool:
    assert values.dtype in (x.dtype, torch.bfloat16), (
        f"values must be {x.dtype} or bfloat16, not {values.dtype}"
    )
    return values.dtype != x.dtype


def _counts(x: Tensor, threshold: Tensor, piece: int) -> Tensor:
    """Return how many marked elements each piece has. Shapes: -> int64 [pieces]."""
    check(x=x, threshold=threshold)
    counts = torch.empty(triton.cdiv(x.numel(), piece), dtype=torch.int64, device=x.device)
    launch(
        count_kernel, len(counts), x, threshold, counts, x.numel(), piece, BLOCK=_BLOCK, num_warps=4
    )
    return counts


@triton.jit(do_not_specialize=["n", "shift"])
def digits_kernel(x_ptr, found_ptr, partial_ptr, n, shift, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """How often each value of a digit comes, among sizes whose higher digits are those that are
    found."""
    found = tl.load(found_ptr)
    counts = tl.zeros([256], tl.int32)
    first = tl.program_id(0).to(tl.int64) * SPAN
    for at in range(0, tl.minimum(SPAN, n - first), BLOCK):
        i = first + at + tl.arange(0, BLOCK)
        size = _size(tl.load(x_ptr + i, mask=i < n, other=0.0))
        same = (i < n) & ((((size ^ found) >> shift) >> 8) == 0)
        counts += tl.histogram((size >> shift) & 255, 256, mask=same)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256), counts)


@triton.jit(do_not_specialize=["n", "piece"])
def count_kernel(x_ptr, threshold_ptr, counts_ptr, n, piece, BLOCK: tl.constexpr):
    least = _size(tl.load(threshold_ptr))
    first = tl.program_id(0).to(tl.int64) * piece
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(0, piece, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = (i < piece) & (first + i < n)
        size = _size(tl.load(x_ptr + first + i, mask=inside, other=0.0))
        counts += (inside & (size >= least)).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(counts))


@triton.jit(do_not_specialize=["n", "count", "rows"])
def pack_kernel(
    x_ptr,
    threshold_ptr,
    values_ptr,
    places_ptr,
    ends_ptr,
    n,
    count,
    rows,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    least = _size(tl.load(threshold_ptr))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    i = row * WIDTH + col
    x = tl.load(x_ptr + i, mask=(col < WIDTH) & (i < n), other=0.0)
    keep = (col < WIDTH) & (i < n) & (_size(x) >= least)
    at = _numbers(ends_ptr, keep.to(tl.int32))
    keep = keep & (at < count)
    if ROUNDED:
        bits = _bfloat16_bits(x)
        tl.store(values_ptr + at, bits.to(tl.int16), mask=keep)
        left = x - (bits << 16).to(tl.float32, bitcast=True)
    else:
        tl.store(values_ptr + at, x, mask=keep)
        left = x - x
    tl.store(x_ptr + i, left, mask=keep)
    if WIDTH == 8:
        of_places = tl.sum(keep.to(tl.int32) << col, 1, keep_dims=True)
    else:
        of_places = tl.sum(keep.to(tl.int32), 1, keep_dims=True)
        tl.store(places_ptr + rows + at, (col + row * 0).to(tl.uint8), mask=keep)
    tl.store(places_ptr + row, of_places.to(tl.uint8), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def places_kernel(places_ptr, counts_ptr, rows, BITS: tl.constexpr, ROWS: tl.constexpr):
    """How many places each piece of a message has."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.load(places_ptr + row, mask=row < rows, other=0).to(tl.int32)
    if BITS:
        byte = byte - ((byte >> 1) & 0x55)
        byte = (byte & 0x33) + ((byte >> 2) & 0x33)
        byte = (byte + (byte >> 4)) & 0x0F
    tl.store(counts_ptr + tl.program_id(0), tl.sum(byte))


@triton.jit(do_not_specialize=["n", "count", "rows"])
def add_kernel(
    x_ptr,
    values_ptr,
    places_ptr,
    ends_ptr,
    n,
    count,
    rows,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    byte = tl.load(places_ptr + row, mask=row < rows, other=0).to(tl.int32)
    marked = (byte >> col) & 1 if WIDTH == 8 else (col < byte).to(tl.int32)
    at = _numbers(ends_ptr, marked)
    keep = (marked == 1) & (at < count)
    if WIDTH == 8:
        i = row * WIDTH + col
    else:
        i = row * WIDTH + tl.load(places_ptr + rows + at, mask=keep, other=0).to(tl.int64)
    keep = keep & (i < n)
    value = tl.load(values_ptr + at, mask=keep, other=0)
    if ROUNDED:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=keep, other=0.0) + value, mask=keep)


@triton.jit
def _numbers(ends_ptr, marked):
    """Return the index of each element of this piece among all marked elements.

    Triton 3.6 scans no tensor that is one column.
    """
    of_row = tl.sum(marked, 1)
    before = tl.load(ends_ptr + tl.program_id(0)) - tl.sum(of_row) + tl.cumsum(of_row, 0) - of_row
    return before[:, None] + tl.cumsum(marked, 1) - 1
