"""The elements of a tensor with large magnitudes, as a message of values and places.

A message of `count` of n elements has their values in order, and their places in the form that
takes fewer bytes:

    count = n                                       nothing
    ceil(n / 8) <= ceil(n / 255) + count            a bit for each element, the first one lowest in
                                                    its byte
    else                                            a byte for each 255 elements: how many of them
                                                    are sent; then a byte for each value: its place
                                                    among these 255
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.ops.backends.libraries import Shapes, nothing
from hybridpar.ops.backends.registry import resolve

_BLOCK = 255


def sparse(x: Tensor, backend: str = "auto") -> Any:
    """Return the passes for tensors like `x`, float32 or float64, without gaps; outside of
    autograd.

        threshold(x, k) -> [1]: the k-th largest magnitude, never 0 unless k is the number of
            elements.
        count(x, threshold) -> how many elements are at least that large; NaN is larger than all
        numbers.
        pack_(x, threshold, values, places): takes the first of these off x, as many as `values`
            [count]
        is long, of x's type or bfloat16. places: uint8 [`place_bytes`].
        add_(x, values, places, overwrite): adds a message; overwrite: to zero.

    Raises: ConfigError if the backend cannot run; RuntimeError for a damaged message.
    """
    return resolve("sparse", backend, x)()


def place_bytes(numel: int, count: int) -> int:
    """Return the bytes of the places of `count` of `numel` elements."""
    if count == numel:
        return 0
    return min(-(-numel // 8), -(-numel // _BLOCK) + count)


def most_place_bytes(numel: int, most: int) -> int:
    """Return the largest `place_bytes` of up to `most` elements."""
    return place_bytes(numel, min(most, numel - 1))


class Passes:
    """The torch reference."""

    @staticmethod
    def threshold(x: Tensor, k: int) -> Tensor:
        sizes = _sizes(x)
        if k == sizes.numel():
            return x.new_zeros(1)
        return sizes.kthvalue(sizes.numel() - k + 1).values.clamp(min=1).view(1).view(x.dtype)

    @staticmethod
    def count(x: Tensor, threshold: Tensor) -> int:
        return int((_sizes(x) >= _sizes(threshold)).sum())

    @staticmethod
    def pack_(x: Tensor, threshold: Tensor, values: Tensor, places: Tensor) -> None:
        flat = x.view(-1)
        count = len(values)
        where = (_sizes(x) >= _sizes(threshold)).nonzero().view(-1)[:count]
        if len(where) < count:
            raise RuntimeError("there are fewer elements above the threshold than are to be packed")
        values.copy_(flat[where])
        flat[where] -= values
        if count == len(flat):
            return
        if _by_bits(len(flat), count):
            bits = F.pad(
                torch.zeros_like(flat, dtype=torch.uint8).index_fill_(0, where, 1),
                (0, -len(flat) % 8),
            )
            places.copy_((bits.view(-1, 8) << torch.arange(8, device=x.device)).sum(1))
        else:
            blocks = -(-len(flat) // _BLOCK)
            places[:blocks] = torch.bincount(where // _BLOCK, minlength=blocks)
            places[blocks:] = where % _BLOCK

    @staticmethod
    def add_(x: Tensor, values: Tensor, places: Tensor, overwrite: bool) -> None:
        flat = x.view(-1)
        count = len(values)
        if count == len(flat):
            flat.copy_(values) if overwrite else flat.add_(values)
            return
        if _by_bits(len(flat), count):
            bits = (places.unsqueeze(1) >> torch.arange(8, device=x.device)) & 1
            where = bits.view(-1)[: len(flat)].nonzero().view(-1)
        else:
            blocks = -(-len(flat) // _BLOCK)
            each = places[:blocks].long()
            if int(each.sum()) != count:
                raise RuntimeError(
                    f"the message is damaged: {int(each.sum())} places of {count} values"
                )
            where = (
                torch.arange(blocks, device=x.device).repeat_interleave(each) * _BLOCK
                + places[blocks:]
            )
        if len(where) != count:
            raise RuntimeError(f"the message is damaged: {len(where)} places of {count} values")
        if overwrite:
            flat.zero_()
        flat[where] += values.to(x.dtype)


class Compiled:
    """The passes of a library, such as torch.ops.hybridpar."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def threshold(self, x: Tensor, k: int) -> Tensor:
        return self._library.sparse_threshold(x, k)

    def count(self, x: Tensor, threshold: Tensor) -> int:
        return int(self._library.sparse_count(x, threshold))

    def pack_(self, x: Tensor, threshold: Tensor, values: Tensor, places: Tensor) -> None:
        self._library.sparse_pack_(x, threshold, values, places)

    def add_(self, x: Tensor, values: Tensor, places: Tensor, overwrite: bool) -> None:
        self._library.sparse_add_(x, values, places, overwrite)


def _sizes(x: Tensor) -> Tensor:
    """Return the bits of magnitudes, which have the order of magnitudes."""
    wide = x.dtype == torch.float64
    bits = x.view(-1).view(torch.int64 if wide else torch.int32)
    return bits & (2**63 - 1 if wide else 2**31 - 1)


def _by_bits(numel: int, count: int) -> bool:
    return -(-numel // 8) <= -(-numel // _BLOCK) + count


PASSES: Shapes = {
    "sparse_threshold": lambda x, k: x.new_empty(1),
    "sparse_count": lambda x, threshold: x.new_empty(1, dtype=torch.int64),
    "sparse_pack_": nothing,
    "sparse_add_": nothing,
}
