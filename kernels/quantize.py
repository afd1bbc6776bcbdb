"""Tiles of 64 numbers as a bfloat16 scale and codes of 8 or 4 bits, and back.

hybridpar/ops/quantize.py describes the form. A program takes _TILES tiles. Every operation is
rounded by itself, quotients to the nearest, so bytes and numbers equal the reference's. The
Hadamard matrix is six steps between numbers of a tile, in registers.

Traffic an element: encoding reads it and writes 1 or 1/2 byte, decoding the other way; 2 bytes a
tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import check, launch

OPERATORS = {"quantize": (), "dequantize_": ("x",)}

_TILES = 16  # of a program: 8 numbers a thread
_TILE = tl.constexpr(64)
_LEAST = tl.constexpr(2.0**-100)
_LARGEST_BITS = tl.constexpr(0x7F7F0000)  # of a finite bfloat16, as float32
_NAN_BITS = tl.constexpr(0x7FC00000)
_ROUNDING = tl.constexpr(
    12582912.0
)  # added and taken away: to the nearest integer, to even where two are


def quantize(x: Tensor, bits: int, rotate: bool) -> Tensor:
    """The bytes of the rows of x. Shapes: x [rows, cols], without gaps -> uint8 [rows, bytes of a
    row]."""
    check(x=x)
    tiles, row_bytes = _sizes(x, bits)
    message = x.new_empty((len(x), row_bytes), dtype=torch.uint8)
    _launch(encode_kernel, x, message, tiles, row_bytes, bits, rotate)
    return message


def dequantize_(x: Tensor, message: Tensor, bits: int, rotate: bool) -> None:
    """Fills x with what `message` says of it. Shapes: as `quantize`; message of as many bytes in
    any shape."""
    check(x=x)
    check(message=message)
    tiles, row_bytes = _sizes(x, bits)
    assert message.numel() == len(x) * row_bytes, f"message must be {len(x)} * {row_bytes} bytes"
    _launch(decode_kernel, x, message, tiles, row_bytes, bits, rotate)


def _sizes(x: Tensor, bits: int) -> tuple[int, int]:
    tiles = triton.cdiv(x.shape[1], _TILE.value)
    return tiles, tiles * (_TILE.value * bits // 8 + 2)


def _launch(
    kernel: object, x: Tensor, message: Tensor, tiles: int, row_bytes: int, bits: int, rotate: bool
) -> None:
    count = len(x) * tiles
    launch(
        kernel,
        triton.cdiv(count, _TILES),
        x,
        message,
        count,
        tiles,
        x.shape[1],
        row_bytes,
        BITS=bits,
        ROTATE=rotate,
        TILES=_TILES,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["count"])
def encode_kernel(
    x_ptr,
    message_ptr,
    count,
    tiles,
    cols,
    row_bytes,
    BITS: tl.constexpr,
    ROTATE: tl.constexpr,
    TILES: tl.constexpr,
):
    at = tl.program_id(0) * TILES + tl.arange(0, TILES)[:, None]
    row, tile = (at // tiles).to(tl.int64), at % tiles
    col = tile * _TILE + tl.arange(0, _TILE)[None, :]
    x = tl.load(x_ptr + row * cols + col, mask=(at < count) & (col < cols), other=0.0).to(
        tl.float32
    )
    if ROTATE:
        x = _rotated(x, TILES)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True).to(
        tl.float32, bitcast=True
    )
    limit = tl.full([TILES, 1], 2 ** (BITS - 1) - 1, tl.float32)
    exact = tl.div_rn(largest, limit).to(tl.int32, bitcast=True)
    scale = tl.where(exact > _LARGEST_BITS, _NAN_BITS, (exact + 0xFFFF) & -0x10000)
    scale = tl.where(largest < _LEAST, 0, scale)
    usable = (scale > 0) & (scale < _NAN_BITS)
    inverse = tl.div_rn(
        tl.full([TILES, 1], 1.0, tl.float32),
        tl.where(usable, scale, 0x3F800000).to(tl.float32, bitcast=True),
    )
    codes = ((tl.where(usable, x, 0.0) * inverse + _ROUNDING) - _ROUNDING).to(tl.int32)
    message_ptr += row * row_bytes
    if BITS == 8:
        tl.store(message_ptr + col, codes.to(tl.uint8), mask=at < count)
    else:
        low, high = _halves(codes, TILES)
        tl.store(
            message_ptr + tile * (_TILE // 2) + tl.arange(0, _TILE // 2)[None, :],
            ((low & 15) | ((high & 15) << 4)).to(tl.uint8),
            mask=at < count,
        )
    message_ptr += tiles * (_TILE * BITS // 8) + 2 * tile
    tl.store(
        message_ptr, (scale >> 16).to(tl.uint8), mask=at < count
    )  # rows may begin at odd addresses
    tl.store(message_ptr + 1, (scale >> 24).to(tl.uint8), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def decode_kernel(
    x_ptr,
    message_ptr,
    count,
    tiles,
    cols,
    row_bytes,
    BITS: tl.constexpr,
    ROTATE: tl.constexpr,
    TILES: tl.constexpr,
):
    at = tl.program_id(0) * TILES + tl.arange(0, TILES)[:, None]
    row, tile = (at // tiles).to(tl.int64), at % tiles
    col = tile * _TILE + tl.arange(0, _TILE)[None, :]
    message_ptr += row * row_bytes
    if BITS == 8:
        codes = (
            tl.load(message_ptr + col, mask=at < count, other=0)
            .to(tl.int8, bitcast=True)
            .to(tl.float32)
        )
    else:
        byte = tl.load(
            message_ptr + tile * (_TILE // 2) + tl.arange(0, _TILE // 2)[None, :],
            mask=at < count,
            other=0,
        ).to(tl.int32)
        low, high = ((byte & 15) ^ 8) - 8, ((byte >> 4) ^ 8) - 8
        codes = tl.join(low, high).permute(0, 2, 1).reshape(TILES, _TILE).to(tl.float32)
    if ROTATE:
        codes = _rotated(codes, TILES)  # sums of 64 integers: exact
    message_ptr += tiles * (_TILE * BITS // 8) + 2 * tile
    first = tl.load(message_ptr, mask=at < count, other=0).to(tl.int32)
    second = tl.load(message_ptr + 1, mask=at < count, other=0).to(tl.int32)
    scale = (first << 16 | second << 24).to(tl.float32, bitcast=True)
    if ROTATE:
        scale *= 1 / _TILE
    tl.store(
        x_ptr + row * cols + col,
        (codes * scale).to(x_ptr.dtype.element_ty),
        mask=(at < count) & (col < cols),
    )


@triton.jit
def _rotated(x, TILES: tl.constexpr):
    """Multiply rows by the Hadamard matrix: six equal steps, whose sums have the reference's
    order."""
    for _ in tl.static_range(6):
        first, second = _halves(x, TILES)
        x = tl.join(first + second, first - second).reshape(TILES, _TILE)
    return x


@triton.jit
def _halves(x, TILES: tl.constexpr):
    """The first and the second half of each row."""
    return tl.split(x.reshape(TILES, 2, _TILE // 2).permute(0, 2, 1))
