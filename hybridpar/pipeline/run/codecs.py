"""Codecs of messages between stages: rows of numbers as fewer bytes, and back.

    stage r     x ---- encode ----> bytes ==== link ====> bytes ---- decode_ ----> C(x)     stage r + 1
                dC(x) <---- decode_ ---- bytes ==== link ==== bytes <---- encode ---- dx

A row is a token's features. Its bytes depend on it alone, so it travels as the same bytes on every
grid. The backward takes C for the identity (straight through), with two exceptions: with `Largest`
only the gradients of the features that were sent go back (`Marked`; both sides know which), and
with `Subspace` C is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hybridpar import random
from hybridpar.config import Config, message_shape
from hybridpar.errors import config_error
from hybridpar.models.build import DTYPES
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from hybridpar.ops.largest import largest, places_bytes, value_bytes
from hybridpar.ops.quantize import dequantize_, quantize, quantized_bytes
from hybridpar.pipeline.run.stage_split import stage_split
from hybridpar.state.compression.streaming import basis


class Codec(Protocol):
    """Turns rows of numbers into bytes, and back. Both ways depend only on their arguments."""

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` numbers."""

    def encode(self, x: Tensor) -> Tensor:
        """The bytes of `x`, which do not keep it alive. Shapes: [rows, cols] -> uint8 [rows,
        row_bytes(cols)]."""

    def decode_(self, x: Tensor, message: Tensor) -> None:
        """Fills x [rows, cols] from `message` [rows, row_bytes(cols)]."""


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


@dataclass(frozen=True)
class _Share:
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


@dataclass(frozen=True)
class Largest(_Share):
    """Sends the k numbers of each row that are farthest from zero, and their places (ops.largest);
    the others become 0.

    Bytes of a row: those of k values, and ceil(cols / 8); k is share * cols, rounded. This is
    DCT-MP (arXiv 2010.08899, algorithm 2), but each token has its own threshold, its k-th largest
    feature; there a tensor has one, which is set anew every L iterations. So the ends of a link
    share no state that could differ, messages have one length, and which features pass depends
    neither on micro-batches nor on the grid. What is left out is not added later: its sample does
    not come again.
    """

    backend: str = "auto"

    def row_bytes(self, cols: int) -> int:
        return self.values(cols) + places_bytes(cols)

    def encode(self, x: Tensor) -> Tensor:
        message: Tensor = largest(x, self.backend).largest(
            x.contiguous(), self.kept(x.shape[1]), self.rounded
        )
        return message

    def decode_(self, x: Tensor, message: Tensor) -> None:
        values, places = message.split((self.values(x.shape[1]), places_bytes(x.shape[1])), 1)
        largest(x, self.backend).spread_(x, values, places, self.rounded)

    def places(self, message: Tensor, cols: int) -> Tensor:
        """The places of a message's numbers: a copy. Shapes: uint8 [rows, `places_bytes`]."""
        return message[:, self.values(cols) :].clone()


@dataclass(frozen=True, eq=False)
class Marked:
    """Sends the numbers of each row at `where`, which both ends of the link know; the others become
    0."""

    of: Largest
    where: Tensor | None = None

    def at(self, places: Tensor) -> Marked:
        """The codec of one message."""
        return replace(self, where=places)

    def row_bytes(self, cols: int) -> int:
        return self.of.values(cols)

    def encode(self, x: Tensor) -> Tensor:
        passes = largest(x, self.of.backend)
        k = self.of.kept(x.shape[1])
        message: Tensor = passes.pick(x.contiguous(), self.where, k, self.of.rounded)
        return message

    def decode_(self, x: Tensor, message: Tensor) -> None:
        largest(x, self.of.backend).spread_(x, message, self.where, self.of.rounded)


@dataclass(frozen=True)
class Subspace(_Share):
    """Sends the r = share * cols coordinates of each row along fixed directions, x U; U^T maps them
    back.

    U [cols, r] is orthonormal, drawn once for all links of a run, and never sent. Both ways use it,
    so gradients are those of a layer y = x U U^T, and both sides of a link train to work in these r
    directions. (Subspace Networks, NeurIPS 2025, without their rule that weights stay in the
    subspace.)
    """

    _bases: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def row_bytes(self, cols: int) -> int:
        return self.values(cols)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self._basis(x)).to(self._type).view(torch.uint8)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        torch.mm(message.view(self._type).to(x.dtype), self._basis(x).t(), out=x)

    @property
    def _type(self) -> torch.dtype:
        return torch.bfloat16 if self.rounded else self.dtype

    def _basis(self, x: Tensor) -> Tensor:
        if x.device not in self._bases:
            cols = x.shape[1]
            rank = self.kept(x.shape[1])
            drawn = random.normal(
                0,
                random.site(f"subspace {cols} {rank}"),
                rows=cols,
                cols=rank,
                stride=rank,
                start=0,
                dtype=torch.float64,
            )
            self._bases[x.device] = basis(drawn).to(x.device, self.dtype)
        return self._bases[x.device]


def _keeping(kind: type[Largest] | type[Subspace], config: Config, **others: Any) -> Any:
    """A codec that keeps a share of the numbers."""
    compression = config.compression
    return kind(
        compression.messages_kept,
        DTYPES[config.train.dtype],
        compression.messages_values == "bf16",
        **others,
    )


CODECS: dict[str, Callable[[Config], Codec | None]] = {
    "none": lambda config: None,
    "bf16": lambda config: Rounded(torch.bfloat16),
    "int8": lambda config: Tiles(8, backend=config.kernels.quantize),
    "int4": lambda config: Tiles(4, rotate=True, backend=config.kernels.quantize),
    "dct": lambda config: _keeping(Largest, config, backend=config.kernels.largest),
    "subspace": lambda config: _keeping(Subspace, config),
}
"""By their names in [compression]; None: numbers travel as they are."""


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
        forward, backward = (CODECS[name](config) for name in names)
        if isinstance(backward, Largest):
            backward = Marked(backward)
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
        except with `Subspace`: its projection is a part of the model, as stages behind the link
        never saw the rest.
        """
        codec = self.forward if flow > 0 else self.backward
        return (
            None if first in self.exact or not (training or isinstance(codec, Subspace)) else codec
        )


@dataclass(frozen=True)
class PartialSums:
    """The codec of the sums over tp (nn.coded.SumCodec): forward of a layer's output, backward of
    its input's gradient. Each part's gradient is that of the sum; with `Largest`, only of the
    features that were sent."""

    codec: Codec

    @classmethod
    def of(cls, config: Config) -> PartialSums | None:
        """The codec of a configuration. Raises: ConfigError where it saves no bytes."""
        codec = CODECS[config.compression.tensor](config)
        if codec is not None:
            _require_fewer(config, "tensor", config.compression.tensor, codec)
        return None if codec is None else cls(codec)

    def encode(self, x: Tensor) -> Tensor:
        return self.codec.encode(x)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        self.codec.decode_(x, message)

    def marks(self, message: Tensor, cols: int) -> Tensor | None:
        return self.codec.places(message, cols) if isinstance(self.codec, Largest) else None

    def gradient(self, dy: Tensor, marks: Tensor | None) -> Tensor:
        return through(Marked(self.codec, marks) if isinstance(self.codec, Largest) else None, dy)


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
