"""Writes and reads messages between replicas or sites, in several precisions.

    full    as it is        bf16    rounded        int8, int4    tiles of integers (ops/quantize.py)

int4 rotates numbers before, so that large ones do not make the others zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.ops.quantize import TILE, dequantize_, quantize, quantized_bytes

_BITS = {"int8": 8, "int4": 4}


class Precision:
    """The form of messages of a precision. dtype: of the numbers. backend: of ops.quantize. `unit`:
    dtype of a message's elements."""

    def __init__(self, name: str, dtype: torch.dtype, backend: str = "auto"):
        self._bits = _BITS.get(name, 0)
        self._backend = backend
        self.unit = torch.uint8 if self._bits else torch.bfloat16 if name == "bf16" else dtype
        self.is_lossy = self._bits > 0

    @classmethod
    def bytes_per_number(cls, name: str, item: int) -> float:
        """Bytes of a number in a large message. item: of a number in full."""
        whole = torch.float64 if item == 8 else torch.float32
        return cls(name, whole).num_bytes(TILE) / TILE

    def size(self, numel: int) -> int:
        """Elements of a message for a piece of so many numbers."""
        return quantized_bytes(numel, self._bits) if self._bits else numel

    def num_bytes(self, numel: int) -> int:
        """Bytes of a message for a piece of so many numbers."""
        return self.size(numel) * self.unit.itemsize

    def write(self, message: Tensor, x: Tensor) -> None:
        """Makes the message of a piece. Shapes: x [n], message [size(n)]."""
        message.copy_(
            quantize(x.view(1, -1), self._bits, rotate=self._bits == 4, backend=self._backend).view(
                -1
            )
            if self._bits
            else x
        )

    def read(self, x: Tensor, message: Tensor) -> Tensor:
        """Fills a piece from its message, and returns it. Shapes: as `write`."""
        if self._bits:
            return dequantize_(
                x.view(1, -1), message, self._bits, rotate=self._bits == 4, backend=self._backend
            ).view(-1)
        return x.copy_(message)
