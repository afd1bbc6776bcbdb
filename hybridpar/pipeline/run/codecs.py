"""Codecs of messages between stages: rows of numbers as fewer bytes, and back.

    stage r     x ---- encode ----> bytes ==== link ====> bytes ---- decode_ ----> C(x)     stage r + 1
                dC(x) <---- decode_ ---- bytes ==== link ==== bytes <---- encode ---- dx

A row is a token's features. Its bytes depend on it alone, so slices of an activation over tp, parts of a sequence and
replicas' micro-batches all travel as the same bytes. The backward takes C for the identity (straight through), but for
two: with `Largest` the gradient of y = C(x) is that of the features that were sent (`Marked`), which both sides know,
and with `Subspace` C is linear.
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
from hybridpar.models.cost import stage_split
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from hybridpar.ops.largest import largest, places_bytes, value_bytes
from hybridpar.ops.quantize import dequantize_, quantize, quantized_bytes
from hybridpar.state.compression.streaming import basis


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


@dataclass(frozen=True)
class _Share:
    """Keeps a share of a row's numbers, of this dtype. rounded: they are sent as bfloat16."""

    share: float
    dtype: torch.dtype
    rounded: bool = False

    def kept(self, cols: int) -> int:
        """Numbers that are sent of rows of `cols`."""
        return max(1, round(self.share * cols))

    def values(self, cols: int) -> int:
        """Bytes of the numbers that are sent of rows of `cols`."""
        return self.kept(cols) * value_bytes(self.dtype, self.rounded)


@dataclass(frozen=True)
class Largest(_Share):
    """Of each row the k numbers farthest from zero, and where they are (ops.largest); zeros in place of the others.

    Bytes of a row: k values and ceil(cols / 8), k = share * cols to the nearest. This is DCT-MP (arXiv 2010.08899,
    algorithm 2) with a threshold for each token, its own k-th largest feature, in place of one for a tensor that is set
    anew every L iterations. So there is no state that could differ between the ends of a link, messages have one
    length, and which features pass depends neither on micro-batches nor on the grid. What is left out is not added
    later: it belongs to a sample that does not come again.
    """

    backend: str = "auto"

    def row_bytes(self, cols: int) -> int:
        return self.values(cols) + places_bytes(cols)

    def encode(self, x: Tensor) -> Tensor:
        message: Tensor = largest(x, self.backend).largest(x.contiguous(), self.kept(x.shape[1]), self.rounded)
        return message

    def decode_(self, x: Tensor, message: Tensor) -> None:
        values, places = message.split((self.values(x.shape[1]), places_bytes(x.shape[1])), 1)
        largest(x, self.backend).spread_(x, values, places, self.rounded)

    def places(self, message: Tensor, cols: int) -> Tensor:
        """Where the numbers of a message are: a copy. Shapes: uint8 [rows, `places_bytes`]."""
        return message[:, self.values(cols):].clone()


@dataclass(frozen=True, eq=False)
class Marked:
    """Of each row the numbers at `where`, which both ends of the link know; zeros in place of the others."""

    of: Largest
    where: Tensor | None = None

    def at(self, places: Tensor) -> Marked:
        """The codec of one message."""
        return replace(self, where=places)

    def row_bytes(self, cols: int) -> int:
        return self.of.values(cols)

    def encode(self, x: Tensor) -> Tensor:
        passes, k = largest(x, self.of.backend), self.of.kept(x.shape[1])
        message: Tensor = passes.pick(x.contiguous(), self.where, k, self.of.rounded)
        return message

    def decode_(self, x: Tensor, message: Tensor) -> None:
        largest(x, self.of.backend).spread_(x, message, self.where, self.of.rounded)


@dataclass(frozen=True)
class Subspace(_Share):
    """Of each row its r = share * cols coordinates along fixed directions: x U, and U^T of them behind the link.

    U [cols, r] is orthonormal, drawn once for all links of a run, and never sent. Both ways have it, so gradients are
    those of the layer y = x U U^T, and what trains before and behind a link meets in these r directions. (Subspace
    Networks, NeurIPS 2025, without their rule that weights stay in the subspace.)
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
            cols, rank = x.shape[1], self.kept(x.shape[1])
            drawn = random.normal(0, random.site(f"subspace {cols} {rank}"), rows=cols, cols=rank, stride=rank, start=0,
                                  dtype=torch.float64)
            self._bases[x.device] = basis(drawn).to(x.device, self.dtype)
        return self._bases[x.device]


def _keeping(kind: type[Largest] | type[Subspace], config: Config, **others: Any) -> Any:
    """A codec that keeps a share of the numbers."""
    compression = config.compression
    return kind(compression.messages_kept, DTYPES[config.train.dtype], compression.messages_values == "bf16", **others)


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
    """The codecs of a pipeline's messages: of activations and of their gradients. `exact`: first blocks of stages that
    get exact ones: a head alone, and on a V those that a rank hands over to itself."""

    forward: Codec | None = None
    backward: Codec | None = None
    exact: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: Config) -> Codecs:
        """Those that a configuration names. Raises: ConfigError where one takes as many bytes as the numbers do."""
        names = config.compression.both_ways
        forward, backward = (CODECS[name](config) for name in names)
        if isinstance(backward, Largest):
            backward = Marked(backward)
        for key, name, codec in zip(("messages", "messages_backward"), names, (forward, backward), strict=True):
            if codec is not None:
                _require_fewer(config, key, name, codec)
        exact = {config.model.num_blocks - 1}
        if config.pipeline.placement == "v" and names != ("none", "none"):
            pp, pipeline = config.parallel.pp, config.pipeline
            split = stage_split(config.model, pp, pipeline.split, pipeline.num_chunks, "v")
            exact |= {split[turn].start for turn in range(pp, len(split), pp)}
        return cls(forward, backward, frozenset(exact))

    def on(self, flow: int, first: int, *, training: bool = True) -> Codec | None:
        """The codec on the link into the stage that begins with block `first`; None: messages are exact.

        flow: 1 for activations, -1 for their gradients. training: else messages are exact, but for those of a subspace:
        what lies outside of it was never seen behind the link, so the projection is a part of the model.
        """
        codec = self.forward if flow > 0 else self.backward
        return None if first in self.exact or not (training or isinstance(codec, Subspace)) else codec


@dataclass(frozen=True)
class PartialSums:
    """What tp ranks send of their parts of a layer's sums (nn.coded.SumCodec): forward the output's, backward the
    input's gradient. A part's gradient is that of the sum, with `Largest` of the features that were sent."""

    codec: Codec

    @classmethod
    def of(cls, config: Config) -> PartialSums | None:
        """That of a configuration. Raises: ConfigError where it takes as many bytes as the numbers do."""
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
    """The blocks, of which linear layers sum over tp as compression.tensor says; not those of embeddings and heads."""
    sums = PartialSums.of(config)
    for module in coded_layers(blocks) if sums is not None else ():
        module.codec = sums
    return blocks


def coded_layers(blocks: Mapping[int, nn.Module]) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    """The modules whose sums have codecs."""
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.placements["weight"].matrices:
                yield module


def _require_fewer(config: Config, key: str, name: str, codec: Codec) -> None:
    """Raises: ConfigError where a codec takes as many bytes of a token as its numbers do."""
    hidden, dtype = message_shape(config.model, 0)[-1], config.train.dtype
    plain, coded = hidden * DTYPES[dtype].itemsize, codec.row_bytes(hidden)
    if coded >= plain:
        raise config_error(f"compression.{key}", name, f"takes {coded} bytes for the {hidden} features of a token "
                           f"(model.hidden_size), which are {plain} bytes in {dtype}", "none")


def through(codec: Codec | None, x: Tensor) -> Tensor:
    """What arrives of `x` [b, s, h] on the other side of a link."""
    if codec is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    arrived = torch.empty_like(rows)
    codec.decode_(arrived, codec.encode(rows))
    return arrived.view(x.shape)
