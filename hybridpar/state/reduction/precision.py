"""Encode and decode messages between replicas or sites, in several precisions.

    full    unchanged       bf16    rounded        int8, int4    blocks of integers (ops/quantize.py)

int4 rotates numbers first, so that large ones do not round the others to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.ops.quantize import TILE, dequantize_, quantize, quantized_bytes

_BITS = {"int8": 8, "int4": 4}


class Precision:
    """The encoding of messages.

    Args:
        name: "full", "bf16", "int8" or "int4".

    Attributes:
        unit: dtype of a message's elements.
        is_lossy: Numbers are quantized.
    """

    def __init__(self, name: str, dtype: torch.dtype, backend: str = "auto"):
        self._bits = _BITS.get(name, 0)
        self._backend = backend
        if self._bits:
            self.unit = torch.uint8
        elif name == "bf16":
            self.unit = torch.bfloat16
        else:
            self.unit = dtype
        self.is_lossy = self._bits > 0

    @classmethod
    def bytes_per_number(cls, name: str, item: int) -> float:
        """Return the bytes of a number in a large message; `item` in full precision."""
        whole = torch.float64 if item == 8 else torch.float32
        return cls(name, whole).num_bytes(TILE) / TILE

    def size(self, numel: int) -> int:
        """Return the number of elements of a message for `numel` numbers."""
        return quantized_bytes(numel, self._bits) if self._bits else numel

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a message for `numel` numbers."""
        return self.size(numel) * self.unit.itemsize

    def write(self, message: Tensor, x: Tensor) -> None:
        """Write the message of a piece. Shapes: x [n], message [size(n)]."""
        if self._bits:
            x = quantize(
                x.view(1, -1), self._bits, rotate=self._bits == 4, backend=self._backend
            ).view(-1)
        message.copy_(x)

    def read(self, x: Tensor, message: Tensor) -> Tensor:
        """Fill a piece from its message, and return it. Shapes: as `write`."""
        if self._bits:
            return dequantize_(
                x.view(1, -1), message, self._bits, rotate=self._bits == 4, backend=self._backend
            ).view(-1)
        return x.copy_(message)
