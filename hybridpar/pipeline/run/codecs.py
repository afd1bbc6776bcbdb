"""Codecs of messages between stages: rows of numbers as fewer bytes, and back.

    stage r     x ---- encode ----> bytes ==== link ====> bytes ---- decode_ ----> C(x)     stage r + 1
                dC(x) <---- decode_ ---- bytes ==== link ==== bytes <---- encode ---- dx

A row is a token's features. Its bytes depend on it alone, so slices of an activation over tp, parts of a sequence and
replicas' micro-batches all travel as the same bytes. The backward takes C for the identity (straight through).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridpar.config import Config, KernelsConfig, message_shape
from hybridpar.errors import config_error
from hybridpar.models.build import DTYPES
from hybridpar.ops.quantize import dequantize_, quantize, quantized_bytes


class Codec(Protocol):
    """Rows of numbers as bytes. Both ways depend on nothing but their arguments."""

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` numbers."""

    def encode(self, x: Tensor) -> Tensor:
        """Shapes: [rows, cols] -> uint8 [rows, row_bytes(cols)], which does not keep `x` alive."""

    def decode_(self, x: Tensor, message: Tensor) -> None:
        """Fills x [rows, cols] with what `message` [rows, row_bytes(cols)] says."""


@dataclass(frozen=True)
class Rounded:
    """Numbers of a narrower type."""

    dtype: torch.dtype

    def row_bytes(self, cols: int) -> int:
        return cols * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        x.copy_(message.view(self.dtype))


@dataclass(frozen=True)
class Tiles:
    """Tiles of integers with a scale each (ops.quantize)."""

    bits: int
    rotate: bool = False
    backend: str = "auto"

    def row_bytes(self, cols: int) -> int:
        return quantized_bytes(cols, self.bits)

    def encode(self, x: Tensor) -> Tensor:
        return quantize(x, self.bits, rotate=self.rotate, backend=self.backend)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        dequantize_(x, message, self.bits, rotate=self.rotate, backend=self.backend)


CODECS: dict[str, Callable[[KernelsConfig], Codec | None]] = {
    "none": lambda kernels: None,
    "bf16": lambda kernels: Rounded(torch.bfloat16),
    "int8": lambda kernels: Tiles(8, backend=kernels.quantize),
    "int4": lambda kernels: Tiles(4, rotate=True, backend=kernels.quantize),
}
"""By their names in [compression]; None: numbers travel as they are."""


@dataclass(frozen=True)
class Codecs:
    """The codecs of a pipeline's messages: of activations and of their gradients. `head`: the number of that block."""

    forward: Codec | None = None
    backward: Codec | None = None
    head: int = -1

    @classmethod
    def of(cls, config: Config) -> Codecs:
        """Those that a configuration names. Raises: ConfigError where one takes as many bytes as the numbers do."""
        names, hidden = config.compression.both_ways, message_shape(config.model, 0)[-1]
        forward, backward = (CODECS[name](config.kernels) for name in names)
        plain = hidden * DTYPES[config.train.dtype].itemsize
        for key, name, codec in zip(("messages", "messages_backward"), names, (forward, backward), strict=True):
            if codec is not None and codec.row_bytes(hidden) >= plain:
                raise config_error(
                    f"compression.{key}", name, f"takes {codec.row_bytes(hidden)} bytes for the {hidden} features of a "
                    f"row (model.hidden_size), which are {plain} bytes in {config.train.dtype}", "none")
        return cls(forward, backward, config.model.num_blocks - 1)

    def on(self, flow: int, first: int) -> Codec | None:
        """The codec on the link into the stage that begins with block `first`; a head alone gets exact activations.

        flow: 1 for activations, -1 for their gradients.
        """
        if first == self.head:
            return None
        return self.forward if flow > 0 else self.backward


def through(codec: Codec | None, x: Tensor) -> Tensor:
    """What arrives of `x` [b, s, h] on the other side of a link."""
    if codec is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    arrived = torch.empty_like(rows)
    codec.decode_(arrived, codec.encode(rows))
    return arrived.view(x.shape)
