"""The numbers of each row with the largest magnitudes, as values and a bit for each number of
the row.

    row    [ k values, in order | ceil(cols / 8) bytes: a bit for each number, the first one lowest
        in its byte ]

The choice depends on the row alone: the k largest magnitudes; of equal ones the first; NaN is
larger than all numbers. Values have the row's type, or are rounded to bfloat16 (`rounded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.ops.backends.libraries import Shapes, nothing
from hybridpar.ops.backends.registry import resolve


def largest(x: Tensor, backend: str = "auto") -> Any:
    """Return the passes for rows like `x` [rows, cols], without gaps; outside of autograd.

    Every backend makes the same bytes.

        largest(x, k, rounded) -> uint8 [rows, k values and `places_bytes`]: the k largest numbers
            of
        each row.
        pick(x, places, k, rounded) -> uint8 [rows, k values]: the numbers of x at `places`, the
            first k
        of a row; zeros if fewer are marked.
        spread_(x, values, places, rounded): fills x with the values at `places`, and zeros.

    Raises: ConfigError if the backend cannot run; ValueError if x is no matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"x must be [rows, cols], got {tuple(x.shape)}")
    return resolve("largest", backend, x)


def value_bytes(dtype: torch.dtype, rounded: bool) -> int:
    """Return the bytes of a value."""
    return 2 if rounded else dtype.itemsize


def places_bytes(cols: int) -> int:
    """Return the bytes of a row's bits."""
    return -(-cols // 8)


class Passes:
    """The torch reference."""

    @staticmethod
    def largest(x: Tensor, k: int, rounded: bool) -> Tensor:
        order = _sizes(x).sort(stable=True, dim=1, descending=True).indices[:, :k]
        bits = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).scatter_(1, order, 1)
        places = F.pad(bits, (0, -x.shape[1] % 8)).view(len(x), places_bytes(x.shape[1]), 8)
        places = (places << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(
            2, dtype=torch.uint8
        )
        return torch.cat((Passes.pick(x, places, k, rounded), places), 1)

    @staticmethod
    def pick(x: Tensor, places: Tensor, k: int, rounded: bool) -> Tensor:
        row, column, at = _marked(places, x.shape[1], k)
        values = x.new_zeros((len(x), k))
        values[row, at] = x[row, column]
        return (values.to(torch.bfloat16) if rounded else values).view(torch.uint8)

    @staticmethod
    def spread_(x: Tensor, values: Tensor, places: Tensor, rounded: bool) -> None:
        numbers = values.clone(memory_format=torch.contiguous_format).view(
            torch.bfloat16 if rounded else x.dtype
        )
        row, column, at = _marked(places, x.shape[1], numbers.shape[1])
        x.zero_()[row, column] = numbers[row, at].to(x.dtype)


def _sizes(x: Tensor) -> Tensor:
    """Return the bits of magnitudes, which have the order of magnitudes."""
    bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.dtype.itemsize])
    return bits & (2 ** (8 * x.dtype.itemsize - 1) - 1)


def _marked(places: Tensor, cols: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and column of each marked number (the first k of a row), and its index in the
    row."""
    bits = (
        (places.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=places.device)) & 1
    ).flatten(1)[:, :cols]
    at = bits.long().cumsum(1) - 1
    row, column = ((bits == 1) & (at < k)).nonzero().unbind(1)
    return row, column, at[row, column]


PASSES: Shapes = {
    "largest": lambda x, k, rounded: x.new_empty(
        (len(x), k * value_bytes(x.dtype, rounded) + places_bytes(x.shape[1])), dtype=torch.uint8
    ),
    "pick": lambda x, places, k, rounded: x.new_empty(
        (len(x), k * value_bytes(x.dtype, rounded)), dtype=torch.uint8
    ),
    "spread_": nothing,
}
