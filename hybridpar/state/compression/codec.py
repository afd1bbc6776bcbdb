"""The base of codecs of messages between stages, and the codecs that several methods share."""

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
        follows: It sends a gradient's numbers at the places of those that were sent of the
            activation, which both ends of the link know: see `at`.
    """

    follows: ClassVar[bool] = False

    @abstractmethod
    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` numbers."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """The bytes of `x`, which do not keep it alive. Shapes: [rows, cols] -> uint8 [rows,
        row_bytes(cols)]."""

    @abstractmethod
    def decode_(self, x: Tensor, message: Tensor) -> None:
        """Fills x [rows, cols] from `message` [rows, row_bytes(cols)]."""

    def for_gradients(self) -> Codec:
        """The codec of gradients where that of activations is this one."""
        return self

    def places(self, message: Tensor, cols: int) -> Tensor | None:
        """The places of a message's numbers, for a codec that `follows`: a copy."""
        return None

    def at(self, places: Tensor | None) -> Codec:
        """The codec of the gradient of an activation whose numbers were sent at `places`."""
        return self


@dataclass(frozen=True)
class Cast(Codec):
    """Numbers of a narrower type."""

    dtype: torch.dtype

    def row_bytes(self, cols: int) -> int:
        return cols * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        x.copy_(message.view(self.dtype))


@dataclass(frozen=True)
class BlockQuantized(Codec):
    """Blocks of integers with a scale each (ops.quantize)."""

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
    """Keeps a share of a row's numbers, of this dtype. rounded: they are sent as bfloat16."""

    share: float
    dtype: torch.dtype
    rounded: bool = False

    def kept(self, cols: int) -> int:
        """Numbers that are sent of a row of `cols`."""
        return max(1, round(self.share * cols))

    def values(self, cols: int) -> int:
        """Bytes of these numbers."""
        return self.kept(cols) * value_bytes(self.dtype, self.rounded)


def kept_share(config: Config) -> tuple[float, torch.dtype, bool]:
    """The arguments of a `KeptShare` that the settings say."""
    settings = config.compression
    return settings.messages_kept, DTYPES[config.train.dtype], settings.messages_values == "bf16"
