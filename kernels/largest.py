"""The k numbers of each row with the largest magnitudes, packed with a bit for each number, and
back.

A program takes a row. The k-th largest magnitude is found bit by bit, each by counting how many
magnitudes are above it; of equal ones the first are taken, so bytes equal the reference's
(hybridpar/ops/largest.py). Values are written byte by byte, as rows of a message may begin at odd
addresses.

Traffic: a row is read once from memory and up to 33 times from the cache; values and bits are
written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import check, launch

OPERATORS = {"largest": (), "pick": (), "spread_": ("x",)}

_WIDEST = 1024  # numbers of a row that a program has at a time


def largest(x: Tensor, k: int, rounded: bool) -> Tensor:
    """Shapes: x [rows, cols], without gaps -> uint8 [rows, k values and ceil(cols / 8)]."""
    rows, cols = x.shape
    sizes = _sizes(x, rounded)
    assert 1 <= k <= cols, f"k must be from 1 to {cols}, got {k}"
    message = x.new_empty((rows, k * sizes["ITEM"] + triton.cdiv(cols, 8)), dtype=torch.uint8)
    launch(largest_kernel, rows, x, message, cols, k, message.shape[1], **sizes)
    return message


def pick(x: Tensor, places: Tensor, k: int, rounded: bool) -> Tensor:
    """Shapes: x [rows, cols], places uint8 [rows, ceil(cols / 8)] -> uint8 [rows, k values]."""
    rows, cols = x.shape
    sizes = _sizes(x, rounded)
    values = x.new_empty((rows, k * sizes["ITEM"]), dtype=torch.uint8)
    launch(pick_kernel, rows, x, values, _bytes(places), cols, k, places.stride(0), **sizes)
    return values


def spread_(x: Tensor, values: Tensor, places: Tensor, rounded: bool) -> None:
    """Fills x [rows, cols] with values [rows, k values] at places, and zeros."""
    rows, cols = x.shape
    sizes = _sizes(x, rounded)
    launch(
        spread_kernel,
        rows,
        x,
        _bytes(values),
        _bytes(places),
        cols,
        values.shape[1] // sizes["ITEM"],
        values.stride(0),
        places.stride(0),
        **sizes,
    )


def _sizes(x: Tensor, rounded: bool) -> dict[str, Any]:
    check(x=x)
    cols = min(triton.next_power_of_2(max(x.shape[1], 16)), _WIDEST)
    return {
        "ITEM": 2 if rounded else x.itemsize,
        "ROUNDED": rounded and x.dtype != torch.bfloat16,
        "COLS": cols,
        "num_warps": max(1, cols // 128),
        "num_stages": 1,
    }


def _bytes(x: Tensor) -> Tensor:
    assert x.dtype == torch.uint8, f"messages are bytes, got {x.dtype}"
    assert x.stride(1) == 1 or x.shape[1] <= 1, "rows must be without gaps"
    return x


@triton.jit
def largest_kernel(
    x_ptr,
    message_ptr,
    cols,
    k,
    row_bytes,
    ITEM: tl.constexpr,
    ROUNDED: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * cols
    message_ptr += row * row_bytes
    least = tl.program_id(0) * 0
    for i in range(1, x_ptr.dtype.element_ty.primitive_bitwidth):
        higher = least | (1 << (x_ptr.dtype.element_ty.primitive_bitwidth - 1 - i))
        least = tl.where(_above(x_ptr, cols, higher - 1, COLS) >= k, higher, least)
    ties = k - _above(x_ptr, cols, least, COLS)
    taken = least * 0
    equal = least * 0
    for begin in range(0, cols, COLS):
        col = begin + tl.arange(0, COLS)
        x = tl.load(x_ptr + col, mask=col < cols, other=0.0)
        size = _size(x)
        tied = ((size == least) & (col < cols)).to(tl.int32)
        keep = (size > least) | ((tied == 1) & (equal + tl.cumsum(tied, 0) <= ties))
        kept = keep.to(tl.int32)
        _put(message_ptr, taken + tl.cumsum(kept, 0) - 1, _value(x, ROUNDED), keep, ITEM)
        byte = begin // 8 + tl.arange(0, COLS // 8)
        bits = tl.sum((kept << (tl.arange(0, COLS) % 8)).reshape(COLS // 8, 8), 1)
        tl.store(message_ptr + k * ITEM + byte, bits.to(tl.uint8), mask=byte * 8 < cols)
        taken += tl.sum(kept)
        equal += tl.sum(tied)


@triton.jit
def pick_kernel(
    x_ptr,
    values_ptr,
    places_ptr,
    cols,
    k,
    places_stride,
    ITEM: tl.constexpr,
    ROUNDED: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * k * ITEM
    taken = tl.program_id(0) * 0
    for begin in range(0, cols, COLS):
        col = begin + tl.arange(0, COLS)
        marked, at = _marked(places_ptr + row * places_stride, col, cols, taken)
        x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
        _put(values_ptr, at, _value(x, ROUNDED), (marked == 1) & (at < k), ITEM)
        taken += tl.sum(marked)
    for begin in range(tl.minimum(taken, k) * ITEM, k * ITEM, COLS):
        at = begin + tl.arange(0, COLS)
        tl.store(values_ptr + at, tl.zeros([COLS], tl.uint8), mask=at < k * ITEM)


@triton.jit
def spread_kernel(
    x_ptr,
    values_ptr,
    places_ptr,
    cols,
    k,
    values_stride,
    places_stride,
    ITEM: tl.constexpr,
    ROUNDED: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * values_stride
    taken = tl.program_id(0) * 0
    for begin in range(0, cols, COLS):
        col = begin + tl.arange(0, COLS)
        marked, at = _marked(places_ptr + row * places_stride, col, cols, taken)
        keep = (marked == 1) & (at < k)
        bits = tl.zeros([COLS], tl.int32)
        for i in tl.static_range(ITEM):
            bits |= tl.load(values_ptr + at * ITEM + i, mask=keep, other=0).to(tl.int32) << (8 * i)
        tl.store(
            x_ptr + row * cols + col,
            _number(bits, x_ptr.dtype.element_ty, ROUNDED),
            mask=col < cols,
        )
        taken += tl.sum(marked)


@triton.jit
def _size(x):
    """The bits of sizes, which have the order of sizes."""
    if x.dtype.primitive_bitwidth == 32:
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        size = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return size


@triton.jit
def _above(x_ptr, cols, size, COLS: tl.constexpr):
    """How many numbers of a row are larger."""
    count = tl.zeros([COLS], tl.int32)
    for begin in range(0, cols, COLS):
        col = begin + tl.arange(0, COLS)
        count += (_size(tl.load(x_ptr + col, mask=col < cols, other=0.0)) > size).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _marked(places_ptr, col, cols, taken):
    """Whether numbers are marked, and which value of the row each is, of which `taken` came
    before."""
    byte = tl.load(places_ptr + col // 8, mask=col < cols, other=0).to(tl.int32)
    marked = (byte >> (col % 8)) & 1
    return marked, taken + tl.cumsum(marked, 0) - 1


@triton.jit
def _value(x, ROUNDED: tl.constexpr):
    """Return the bits of numbers that are sent, or of the nearest bfloat16, in the lowest bits."""
    if ROUNDED:
        bits = _bfloat16_bits(x.to(tl.float32))
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return bits


@triton.jit
def _bfloat16_bits(x):
    """Round float32 numbers to 16 bits: to the nearest, ties to even, like torch."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest)


@triton.jit
def _number(bits, TYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """The number of what was sent."""
    if ROUNDED:
        x = (bits << 16).to(tl.float32, bitcast=True).to(TYPE)
    elif TYPE.primitive_bitwidth == 32:
        x = bits.to(TYPE, bitcast=True)
    else:
        x = bits.to(tl.int16).to(TYPE, bitcast=True)
    return x


@triton.jit
def _put(values_ptr, at, bits, keep, ITEM: tl.constexpr):
    for i in tl.static_range(ITEM):
        tl.store(values_ptr + at * ITEM + i, (bits >> (8 * i)).to(tl.uint8), mask=keep)
