"""Codecs of messages between stages: rows of numbers as fewer bytes, and back.

    stage r     x ---- encode ----> bytes ==== link ====> bytes ---- decode_ ----> C(x)     stage r + 1
                dC(x) <---- decode_ ---- bytes ==== link ==== bytes <---- encode ---- dx

A row is a token's features. Its bytes depend on it alone, so it travels as the same bytes on every
grid. The backward takes C for the identity (straight through), with two exceptions: a codec may send
only the gradients of the features that were sent (`Codec.follows`; both sides know which), or be
linear, and a part of the model (`Codec.is_in_model`). The codecs are in state/compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hybridpar.config import Config, message_shape
from hybridpar.errors import config_error
from hybridpar.models.build import DTYPES
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from hybridpar.pipeline.run.stage_split import stage_split
from hybridpar.state.compression.codec import Codec
from hybridpar.state.compression.registry import message_codec


@dataclass(frozen=True)
class Codecs:
    """The codecs of a pipeline's activations and their gradients. `exact`: first blocks of the
    stages whose messages stay exact: a head alone, and on a V those that a rank hands to itself."""

    forward: Codec | None = None
    backward: Codec | None = None
    exact: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: Config) -> Codecs:
        """The codecs of a configuration. Raises: ConfigError where one saves no bytes."""
        names = config.compression.both_ways
        forward, backward = (message_codec(name, config) for name in names)
        if backward is not None:
            backward = backward.for_gradients()
        for key, name, codec in zip(
            ("messages", "messages_backward"), names, (forward, backward), strict=True
        ):
            if codec is not None:
                _require_fewer(config, key, name, codec)
        exact = {config.model.num_blocks - 1}
        if config.pipeline.placement == "v" and names != ("none", "none"):
            pp = config.parallel.pp
            split = stage_split(config)
            exact |= {split[turn].start for turn in range(pp, len(split), pp)}
        return cls(forward, backward, frozenset(exact))

    def on(self, flow: int, first: int, *, training: bool = True) -> Codec | None:
        """The codec on the link into the stage that begins with block `first`; None: messages are
        exact.

        flow: 1 for activations, -1 for their gradients. training: if False, messages are exact,
        unless the codec is a part of the model, as stages behind the link never saw the rest.
        """
        codec = self.forward if flow > 0 else self.backward
        if codec is None or first in self.exact:
            return None
        return codec if training or codec.is_in_model else None


@dataclass(frozen=True)
class PartialSums:
    """The codec of the sums over tp (nn.coded.SumCodec): forward of a layer's output, backward of
    its input's gradient. Each part's gradient is that of the sum; if the codec sends some features
    only, of those."""

    codec: Codec

    @classmethod
    def of(cls, config: Config) -> PartialSums | None:
        """The codec of a configuration. Raises: ConfigError where it saves no bytes."""
        codec = message_codec(config.compression.tensor, config)
        if codec is not None:
            _require_fewer(config, "tensor", config.compression.tensor, codec)
        return None if codec is None else cls(codec)

    def encode(self, x: Tensor) -> Tensor:
        return self.codec.encode(x)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        self.codec.decode_(x, message)

    def marks(self, message: Tensor, cols: int) -> Tensor | None:
        return self.codec.places(message, cols)

    def gradient(self, dy: Tensor, marks: Tensor | None) -> Tensor:
        return through(None if marks is None else self.codec.for_gradients().at(marks), dy)


Blocks = TypeVar("Blocks", bound=Mapping[int, nn.Module])


def with_coded_sums(blocks: Blocks, config: Config) -> Blocks:
    """The blocks, whose linear layers sum over tp as compression.tensor says; embeddings and heads
    do not."""
    sums = PartialSums.of(config)
    for module in coded_layers(blocks) if sums is not None else ():
        module.codec = sums
    return blocks


def coded_layers(
    blocks: Mapping[int, nn.Module],
) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    """The modules whose sums have codecs."""
    for block in blocks.values():
        for module in block.modules():
            if (
                isinstance(module, ColumnParallelLinear | RowParallelLinear)
                and module.placements["weight"].matrices
            ):
                yield module


def _require_fewer(config: Config, key: str, name: str, codec: Codec) -> None:
    """Raises: ConfigError where a codec saves no bytes of a token."""
    hidden = message_shape(config.model, 0)[-1]
    dtype = config.train.dtype
    plain = hidden * DTYPES[dtype].itemsize
    coded = codec.row_bytes(hidden)
    if coded >= plain:
        raise config_error(
            f"compression.{key}",
            name,
            f"takes {coded} bytes for the {hidden} features of a token "
            f"(model.hidden_size), which are {plain} bytes in {dtype}",
            "none",
        )


def through(codec: Codec | None, x: Tensor) -> Tensor:
    """`x` [b, s, h] as it arrives behind a link."""
    if codec is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    arrived = torch.empty_like(rows)
    codec.decode_(arrived, codec.encode(rows))
    return arrived.view(x.shape)
