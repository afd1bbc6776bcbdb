"""The base of all gradient compression methods: tensors that are sent uncompressed, and the order
of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from hybridpar.comm import Works, all_reduce_async
from hybridpar.config import CompressionConfig, Config
from hybridpar.grid import Axis
from hybridpar.nn.placement import Placement
from hybridpar.state.compression.feedback import Feedback
from hybridpar.state.compression.wire import Reader, Wire
from hybridpar.state.gradients import BlockParts
from hybridpar.state.layout import Bucket
from hybridpar.state.policy import StatePolicy
from hybridpar.state.residency.chunks import Buffer
from hybridpar.state.residency.shares import Shares

PIECE = 1 << 18
"""Elements that are converted at a time, so that no copy of all of them is made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter of a bucket.

    Attributes:
        name: Its name.
        shape: Its local shape.
        start: Its first element in the flat buffer.
        packed: It is compressed.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    packed: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, buffer: Tensor | Buffer) -> Tensor:
        """Return the parameter's view in a flat buffer."""
        return buffer[self.start : self.start + self.numel].view(self.shape)


@dataclass(slots=True)
class Sent:
    """Elements and bytes that this rank has sent, headers included, and how many it would have sent
    uncompressed.
    """

    elements: int = 0
    num_bytes: int = 0
    whole_elements: int = 0
    whole_bytes: int = 0

    def add(self, elements: int, num_bytes: int) -> None:
        """Count a message."""
        self.elements += elements
        self.num_bytes += num_bytes

    def add_whole(self, elements: int, num_bytes: int) -> None:
        """Count what a message would have been uncompressed."""
        self.whole_elements += elements
        self.whole_bytes += num_bytes

    def add_all(self, other: Sent) -> None:
        """Add the counts of `other`."""
        self.add(other.elements, other.num_bytes)
        self.add_whole(other.whole_elements, other.whole_bytes)


class Method(ABC):
    """Compression of the parameters of one bucket, between the ranks of an axis.

    A message has the uncompressed tensors first, then the bytes that `exchange` writes.
    config/compression_methods.py has one row for each method, with the rules that the configuration
    checks.

    Attributes:
        name: The value of compression.gradients.
        rounds: Upper bound of the number of messages that follow each other.
        scaled: Learned tensors that have the units of gradients.
        num_blocks: Blocks of micro-batches of a batch, if gradients are factors.
        kernels: Backends of the operators.
        scratch: Room for the sum of one parameter, if gradients become feedback, or are factors;
            None: sums replace them.
        keeps_factors: Sums stay factors; see `total`.
    """

    name: ClassVar[str]
    scaled: ClassVar[frozenset[str]] = frozenset()
    rounds: int

    def __init__(
        self,
        entries: Sequence[Entry],
        axis: Axis,
        policy: StatePolicy,
        feedback: Feedback,
        scratch: Tensor | None,
    ):
        self.axis = axis
        self.settings = policy.config.compression
        self.takes_factors = self.settings.takes_factors
        self.num_blocks = policy.num_blocks
        self.keeps_factors = policy.keeps_factors
        self.scratch = scratch
        self.feedback = feedback
        self.device = feedback.device
        self.dtype = feedback.dtype
        self.kernels = policy.config.kernels
        self.packed = [entry for entry in entries if entry.packed]
        self.dense = [entry for entry in entries if not entry.packed]
        main, other = self.most_bytes()
        self.wire = Wire(self._dense_numel * self.dtype.itemsize + main, axis, self.device)
        self.other = Wire(other, axis, self.device)
        self.sent = Sent()
        self.uncoded_bytes = 0
        """Bytes in `sent` that were sent before `gradients_start`."""
        self.parts: BlockParts = {}
        self.sums: Shares | None = None
        """Place of this rank's part of the sums (ZeRO-2 and 3); None: sums replace the
        gradients."""

    @staticmethod
    def packs(shape: Sequence[int], placement: Placement) -> bool:
        """Return whether the method can compress a parameter of this local shape."""
        return True

    @classmethod
    def learned(
        cls, shape: Sequence[int], settings: CompressionConfig
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the method learns for a parameter, by name."""
        return {}

    @classmethod
    @abstractmethod
    def element_bytes(cls, config: Config, item: int) -> float:
        """Return the bytes that a replica sends for each element of its large gradients.

        Methods that take factors count the transformer blocks only. `item`: bytes of an
        uncompressed element.
        """

    @abstractmethod
    def most_bytes(self) -> tuple[int, int]:
        """Return upper bounds of the bytes that `exchange` writes: into the message on `wire`,
        after the uncompressed tensors, and into the message on `other`.
        """

    @abstractmethod
    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """Encode the feedback's next_kept, leave the unsent rest in it, and write the sums over all
        ranks into the tensors that `totals` yields, one for each of `packed`.

        Yields the communication that it has started, and is resumed once that is complete. A method
        that takes factors encodes `parts` instead, and removes them.

        Args:
            gradients: Gradients of `packed`.
            batch: Number of the batch.
            message: This rank's message on `wire`, positioned after the uncompressed tensors.
        """

    def block_steps(self) -> Iterator[Works]:
        """Exchange the factors of the batch's next block, which is not the last.

        Yields the communication that it has started, and is resumed once that is complete.
        """
        raise NotImplementedError(f"{self.name} takes no factors")

    def total(self, name: str) -> Tensor:
        """Return a parameter's reduced gradient, if that is kept as factors."""
        raise NotImplementedError(f"{self.name} takes no factors")

    def begin(self, parts: BlockParts, sums: Shares | None) -> None:
        """Begin a batch: take factors from `parts`, and put reduced gradients into `sums`."""
        self.parts = parts
        self.sums = sums

    def steps(self, buffer: Tensor | Buffer, bucket: Bucket, batch: int) -> Iterator[Works]:
        """All-reduce a bucket of a flat buffer over the axis; yields works that must be
        waited for before it continues.

        Collectives: as `exchange`, in the same order on every rank; before `gradients_start` as
        `_whole`.
        """
        gradients = [] if self._is_absent else [entry.view(buffer) for entry in self.packed]
        num_bytes = self._numel * self.dtype.itemsize
        self.sent.add_whole(self._numel, num_bytes)
        if batch < self.settings.gradients_start:
            self.sent.add(self._numel, num_bytes)
            self.uncoded_bytes += num_bytes
            yield from self._whole(buffer, bucket, gradients)
            return
        for entry, gradient in zip(
            self.packed, () if self.takes_factors else gradients, strict=not self.takes_factors
        ):
            torch.add(
                gradient, self.feedback.kept[entry.name], out=self.feedback.next_kept[entry.name]
            )
        message = self.wire.own
        for entry in self.dense:
            message.take(entry.numel, self.dtype).copy_(entry.view(buffer).view(-1))
        self.sent.add(self._dense_numel, 0)
        yield from self.exchange(gradients, batch, message)
        for rank, reader in enumerate(self.wire.readers()):
            for entry in self.dense:
                add(
                    entry.view(buffer).view(-1),
                    reader.take(entry.numel, self.dtype),
                    overwrite=rank == 0,
                )

    def totals(self, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield a tensor for each compressed parameter; write its sum there before taking the
        next.
        """
        for i, entry in enumerate(self.packed):
            total = (
                gradients[i]
                if self.scratch is None
                else self.scratch[: entry.numel].view(entry.shape)
            )
            yield total
            self._put(entry, total)

    def _put(self, entry: Entry, total: Tensor) -> None:
        if self.sums is not None:
            self.sums.put(entry.name, total)

    def messages(self) -> Iterator[Reader]:
        """Yield the messages of all ranks, in rank order, positioned after the uncompressed
        tensors.
        """
        for reader in self.wire.readers():
            reader.take(self._dense_numel, self.dtype)
            yield reader

    @property
    def _dense_numel(self) -> int:
        return sum(entry.numel for entry in self.dense)

    @property
    def _numel(self) -> int:
        return self._dense_numel + sum(entry.numel for entry in self.packed)

    @property
    def _is_absent(self) -> bool:
        """Whether no buffer holds the gradients of `packed`."""
        return self.keeps_factors or (self.takes_factors and self.scratch is not None)

    def _whole(
        self, buffer: Tensor | Buffer, bucket: Bucket, gradients: list[Tensor]
    ) -> Iterator[Works]:
        """All-reduce the bucket uncompressed. Collectives: one all-reduce; one for each
        parameter if no buffer holds some of them.
        """
        if self._is_absent:
            yield Works(all_reduce_async(entry.view(buffer), self.axis) for entry in self.dense)
            for total, entry in zip(self.totals(gradients), self.packed, strict=True):
                self._multiply_out(entry, total.zero_())
                yield Works([all_reduce_async(total, self.axis)])
            return
        for entry, gradient in zip(self.packed, gradients, strict=True):
            self._multiply_out(entry, gradient)
        yield Works([all_reduce_async(buffer[bucket.start : bucket.stop], self.axis)])
        for entry, gradient in zip(self.packed, gradients, strict=True):
            self._put(entry, gradient)

    def _multiply_out(self, entry: Entry, gradient: Tensor) -> None:
        parts = [
            part for i in range(self.num_blocks) for part in self.parts.pop((entry.name, i), ())
        ]
        for i, part in enumerate(parts):
            part.add_to(gradient, i == 0)


def add(to: Tensor, x: Tensor, *, overwrite: bool) -> None:
    """Add x to `to`; with `overwrite`, copy x to it."""
    to.copy_(x) if overwrite else to.add_(x)
