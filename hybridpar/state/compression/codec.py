"""The base class of codecs for activations and gradients between stages, and codecs that several
methods share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.models.build import DTYPES
from hybridpar.ops.largest import value_bytes
from hybridpar.ops.quantize import dequantize_, quantize, quantized_bytes


class Codec(ABC):
    """Turns rows of numbers into bytes, and back. Both ways depend only on their arguments.

    Attributes:
        follows: The codec sends a gradient's numbers at the indices that were sent of the
            activation. Both ends of the link know these indices: see `at`.
    """

    follows: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, cols: int) -> int:
        """Return the bytes of a row of `cols` numbers."""

    def row_elements(self, cols: int) -> int:
        """Return how many numbers of a row of `cols` are sent."""
        return cols

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Return the encoded bytes of `x`. They do not keep `x` alive. Shapes: [rows, cols] ->
        uint8 [rows, row_bytes(cols)].
        """

    @abstractmethod
    def decode_(self, x: Tensor, message: Tensor) -> None:
        """Fill x [rows, cols] from `message` [rows, row_bytes(cols)]."""

    def for_gradients(self) -> Codec:
        """Return the codec of gradients if activations use this codec."""
        return self

    def places(self, message: Tensor, cols: int) -> Tensor | None:
        """Return a copy of the indices of a message's numbers, for a codec that `follows`."""
        return None

    def at(self, places: Tensor | None) -> Codec:
        """Return the codec for the gradient of an activation whose numbers were sent at these
        indices.
        """
        return self


@dataclass(frozen=True)
class Cast(Codec):
    """Casts numbers to a narrower type."""

    dtype: torch.dtype

    def row_bytes(self, cols: int) -> int:
        return cols * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        x.copy_(message.view(self.dtype))


@dataclass(frozen=True)
class BlockQuantized(Codec):
    """Sends blocks of integers with one scale each (ops.quantize)."""

    bits: int
    rotate: bool = False
    backend: str = "auto"

    def row_bytes(self, cols: int) -> int:
        return quantized_bytes(cols, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        return quantize(x, self.bits, rotate=self.rotate, backend=self.backend)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        dequantize_(x, message, self.bits, rotate=self.rotate, backend=self.backend)


@dataclass(frozen=True)
class KeptShare(Codec):
    """Base of codecs that keep a share of each row's numbers.

    Attributes:
        share: The share of numbers that are kept.
        dtype: Type of the numbers.
        rounded: Numbers are sent as bfloat16.
    """

    share: float
    dtype: torch.dtype
    rounded: bool = False

    def kept(self, cols: int) -> int:
        """Return how many numbers of a row of `cols` are sent."""
        return max(1, round(self.share * cols))

    def row_elements(self, cols: int) -> int:
        return self.kept(cols)

    def values(self, cols: int) -> int:
        """Return the bytes of the numbers that are sent of a row of `cols`."""
        return self.kept(cols) * value_bytes(self.dtype, self.rounded)


def kept_share(config: Config) -> tuple[float, torch.dtype, bool]:
    """Return the arguments of `KeptShare` from the configuration."""
    settings = config.compression
    return settings.messages_kept, DTYPES[config.train.dtype], settings.messages_values == "bf16"
