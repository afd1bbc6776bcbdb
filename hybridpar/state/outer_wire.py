"""The numbers of a message between sites: how a piece of a tensor is written and read.

    full    as it is        bf16    rounded        int8, int4    tiles of integers (ops/quantize.py)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.ops.quantize import dequantize_, quantize, quantized_bytes

_BITS = {"int8": 8, "int4": 4}


class Wire:
    """The form of messages of a precision. dtype: of what they are made of. `unit`: that of a message's elements."""

    def __init__(self, precision: str, dtype: torch.dtype):
        self._bits = _BITS.get(precision, 0)
        self.unit = torch.uint8 if self._bits else torch.bfloat16 if precision == "bf16" else dtype
        self.is_lossy = self._bits > 0

    def size(self, numel: int) -> int:
        """Elements of a message for a piece of so many numbers."""
        return quantized_bytes(numel, self._bits) if self._bits else numel

    def write(self, message: Tensor, x: Tensor) -> None:
        """Makes the message of a piece. Shapes: x [n], message [size(n)]."""
        message.copy_(quantize(x.view(1, -1), self._bits, rotate=self._bits == 4).view(-1) if self._bits else x)

    def read(self, x: Tensor, message: Tensor) -> Tensor:
        """Fills a piece with what its message says, and returns it. Shapes: as `write`."""
        if self._bits:
            return dequantize_(x.view(1, -1), message, self._bits, rotate=self._bits == 4).view(-1)
        return x.copy_(message)
