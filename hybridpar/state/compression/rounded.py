"""Gradients in a type of fewer bytes; what rounding takes off is added to the next batch's.

    bf16    2 bytes an element
    int8    66 bytes for 64 elements: a scale and as many integers (ops/quantize.py)
    int4    34 bytes for 64 elements; these are rotated before, so that large ones do not make the others zero
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.ops import quantize
from hybridpar.ops.quantize import dequantize_, quantized_bytes
from hybridpar.state.compression.method import PIECE, Method, add
from hybridpar.state.compression.wire import Reader


class _Narrow(Method):
    """A message has all elements, piece by piece; messages of all ranks are added up in the gradients' type."""

    rounds = 1

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Bytes of a piece."""

    @abstractmethod
    def encode(self, x: Tensor, message: Tensor) -> None:
        """Writes a piece. Shapes: x [n], message uint8 [num_bytes(n)]."""

    @abstractmethod
    def decode(self, message: Tensor, numel: int) -> Tensor:
        """The numbers of a piece. Shapes: message uint8 [num_bytes(numel)] -> [numel], of the gradients' type."""

    def most_bytes(self) -> tuple[int, int]:
        return sum(self.num_bytes(min(PIECE, entry.numel - start))
                   for entry in self.packed for start in range(0, entry.numel, PIECE)), 0

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: a broadcast for each rank."""
        for entry in self.packed:
            for piece in self.feedback.next_kept[entry.name].view(-1).split(PIECE):
                part = message.take(self.num_bytes(len(piece)), torch.uint8)
                self.encode(piece, part)
                piece.sub_(self.decode(part, len(piece)))
            self.sent.elements += entry.numel
        self.sent.num_bytes += message.num_bytes
        yield self.wire.gather([message.num_bytes] * self.axis.size)
        for rank, reader in enumerate(self.messages()):
            for gradient in gradients:
                for piece in gradient.view(-1).split(PIECE):
                    part = reader.take(self.num_bytes(len(piece)), torch.uint8)
                    add(piece, self.decode(part, len(piece)), overwrite=rank == 0)


class BFloat16(_Narrow):
    """Elements rounded to bfloat16."""

    name = "bf16"

    def num_bytes(self, numel: int) -> int:
        return torch.bfloat16.itemsize * numel

    def encode(self, x: Tensor, message: Tensor) -> None:
        message.view(torch.bfloat16).copy_(x)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        return message.view(torch.bfloat16).to(self.dtype)


class Int8(_Narrow):
    """Tiles of 64 integers of 8 bits with a scale."""

    name, bits = "int8", 8

    def num_bytes(self, numel: int) -> int:
        return quantized_bytes(numel, self.bits)

    def encode(self, x: Tensor, message: Tensor) -> None:
        message.copy_(quantize(x.view(1, -1), self.bits, rotate=self._rotates, backend=self.kernels.quantize).view(-1))

    def decode(self, message: Tensor, numel: int) -> Tensor:
        x = torch.empty(1, numel, dtype=self.dtype, device=self.device)
        dequantize_(x, message, self.bits, rotate=self._rotates, backend=self.kernels.quantize)
        return x.view(-1)

    @property
    def _rotates(self) -> bool:
        return self.bits < 8


class Int4(Int8):
    """The same of 4 bits."""

    name, bits = "int4", 4
