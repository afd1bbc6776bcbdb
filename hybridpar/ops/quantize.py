"""Tiles of integers: each 64 numbers of a row as one bfloat16 scale and 64 codes of 8 or 4 bits.

    row    [ codes of tile 0 | codes of tile 1 | .. | scale 0 | scale 1 | .. ]    64 or 32 bytes a
        tile, and 2

A row's last tile is padded with zeros. Its bytes depend on the row alone, so rows may be cut and
joined anywhere. Codes are rounded to the nearest, ties to even; a scale is the tile's largest
magnitude / 127 or / 7, rounded up. With 4 bits, code i is in the low half of byte i, code i + 32 in
the high half. A tile of magnitudes below 2^-100 counts as zeros; one with a number that is not
finite, or above bfloat16's range, comes back as NaN.

With `rotate` a tile is multiplied by the Hadamard matrix of order 64 before, and back behind. That
spreads an outlier over the tile, whose other numbers would have coarser steps otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.errors import config_error
from hybridpar.ops.backends.libraries import Shapes, nothing, wide_type
from hybridpar.ops.backends.registry import resolve

TILE = 64
"""Numbers that share a scale."""
_SCALE_BYTES = 2
_LEAST = 2.0**-100
_LARGEST_BITS = 0x7F7F0000  # of a finite bfloat16, as float32
_NAN_BITS = 0x7FC00000


def quantized_bytes(cols: int, bits: int) -> int:
    """Return the bytes of a row of `cols` numbers."""
    return -(-cols // TILE) * (TILE * bits // 8 + _SCALE_BYTES)


def quantize(x: Tensor, bits: int, *, rotate: bool = False, backend: str = "auto") -> Tensor:
    """Return the bytes of the rows of x. Every backend makes the same ones.

    Shapes: x [rows, cols] -> uint8 [rows, quantized_bytes(cols, bits)].
    Raises: ConfigError if bits is neither 4 nor 8, or the backend cannot run; ValueError for
    another shape.
    Source of the rotation: arXiv 2506.01352 (TAH-Quant).
    """
    _check(x, bits)
    return resolve("quantize", backend, x).quantize(x.contiguous(), bits, rotate)


def dequantize_(
    x: Tensor, message: Tensor, bits: int, *, rotate: bool = False, backend: str = "auto"
) -> Tensor:
    """Fill x with the numbers of `message`, rounded to its type, and return it.

    Shapes: x [rows, cols], without gaps; message uint8 of rows * quantized_bytes(cols, bits).
    Raises: See `quantize`; ValueError if the message has another size.
    """
    _check(x, bits)
    expected = x.shape[0] * quantized_bytes(x.shape[1], bits)
    if message.dtype != torch.uint8 or message.numel() != expected:
        raise ValueError(
            f"message must be {expected} bytes for {tuple(x.shape)}, got {message.numel()} of "
            f"{message.dtype}"
        )
    resolve("quantize", backend, x).dequantize_(x, message.contiguous(), bits, rotate)
    return x


def _check(x: Tensor, bits: int) -> None:
    if bits not in (4, 8):
        raise config_error("bits", bits, "must be 4 or 8", "8")
    if x.dim() != 2:
        raise ValueError(f"x must be [rows, cols], got {tuple(x.shape)}")


class Passes:
    """The torch reference."""

    @staticmethod
    def quantize(x: Tensor, bits: int, rotate: bool) -> Tensor:
        padded = F.pad(x.to(wide_type(x)), (0, -x.shape[1] % TILE))
        tiles = padded.view(len(x), padded.shape[1] // TILE, TILE)
        if rotate:
            tiles = _rotated(tiles)
        scale = _scale(tiles.abs().amax(-1), 2 ** (bits - 1) - 1)
        usable = scale.isfinite() & (scale > 0)
        inverse = torch.where(usable, scale.to(tiles.dtype).reciprocal(), 0)
        scaled = torch.where(usable.unsqueeze(-1), tiles, 0) * inverse.unsqueeze(-1)
        codes = scaled.round().to(torch.int8).view(torch.uint8)
        if bits == 4:
            low, high = codes.chunk(2, -1)
            codes = (low & 15) | (high << 4)
        return torch.cat((codes.flatten(1), scale.view(torch.uint8)), 1)

    @staticmethod
    def dequantize_(x: Tensor, message: Tensor, bits: int, rotate: bool) -> None:
        num_tiles = -(-x.shape[1] // TILE)
        sizes = num_tiles * TILE * bits // 8, num_tiles * _SCALE_BYTES
        codes, scales = message.view(len(x), sum(sizes)).split(sizes, 1)
        codes = codes.reshape(len(x), num_tiles, TILE * bits // 8)
        if bits == 4:
            codes = (
                (torch.cat((codes & 15, codes >> 4), -1)) ^ 8
            ) - 8  # wraps: two's complement in 8 bits
        numbers = codes.view(torch.int8).to(torch.int16)
        if rotate:
            numbers = _rotated(numbers)
        wide = wide_type(x)
        scale = scales.contiguous().view(torch.bfloat16).to(wide) * (1 / TILE if rotate else 1.0)
        x.copy_((numbers.to(wide) * scale.unsqueeze(-1)).flatten(1)[:, : x.shape[1]])


def _rotated(tiles: Tensor) -> Tensor:
    """Return the tiles times the Hadamard matrix, by six equal steps. Shapes: [.., TILE] -> the
    same."""
    for _ in range(TILE.bit_length() - 1):
        first, second = tiles.chunk(2, -1)
        tiles = torch.stack((first + second, first - second), -1).flatten(-2)
    return tiles


def _scale(largest: Tensor, limit: int) -> Tensor:
    """Return largest / limit, rounded up to bfloat16."""
    bits = (largest / limit).float().view(torch.int32)
    rounded = (bits + 0xFFFF).bitwise_and(-0x10000)
    rounded = torch.where(
        bits > _LARGEST_BITS, _NAN_BITS, rounded
    )  # what is not finite is above, too
    rounded = torch.where(largest < _LEAST, 0, rounded)
    return rounded.view(torch.float32).to(torch.bfloat16)


PASSES: Shapes = {
    "quantize": lambda x, bits, rotate: x.new_empty(
        (len(x), quantized_bytes(x.shape[1], bits)), dtype=torch.uint8
    ),
    "dequantize_": nothing,
}
