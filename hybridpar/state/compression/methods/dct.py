"""DCT-DP: elements above a threshold of the tensor are sent, with their places; the others wait in
the feedback.

    threshold   set every `gradients_period` batches to the k-th largest size, k = gradients_kept of
                the elements
    warm-up     for `gradients_warmup` batches k falls from WARMUP_SHARE of the elements, and every
                batch sets the threshold
    wire        header: int32, elements of each compressed tensor; then tensors that are sent whole,
                values, places (ops/sparse.py has the form of places)
    limit       if an old threshold lets more than LIMIT k through, this batch takes a higher one

Settings: gradients_kept, gradients_period, gradients_values, gradients_warmup; messages_kept,
messages_values.

Messages between stages (`TopK`, `FixedIndices`) have the largest features of each token.

Source: arXiv 2010.08899, algorithm 1, with a limit: without it kept elements pile up, and 10 times
as many as intended pass a new threshold. The warm-up is from Deep Gradient Compression (arXiv
1712.01887, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.config import CompressionConfig, Config
from hybridpar.ops import sparse
from hybridpar.ops.largest import largest, places_bytes
from hybridpar.ops.sparse import most_place_bytes, place_bytes
from hybridpar.state.compression.codec import Codec, KeptShare, kept_share
from hybridpar.state.compression.method import Entry, Method
from hybridpar.state.compression.wire import Reader

LIMIT = 2.0
"""Most elements that a batch sends of a tensor, in multiples of gradients_kept."""
WARMUP_SHARE = 1 / 8
"""Share of the elements that the first batch of a warm-up sends."""
_THRESHOLD = "threshold"
_COUNT = torch.int32


class Thresholds(Method):
    """Sends the elements above a threshold. Each replica has its own thresholds."""

    name = "dct"
    rounds = 2
    scaled = frozenset({_THRESHOLD})

    @classmethod
    def learned(
        cls, shape: Sequence[int], settings: CompressionConfig
    ) -> dict[str, tuple[int, ...]]:
        return {_THRESHOLD: (1,)}

    def most_bytes(self) -> tuple[int, int]:
        return sum(
            self._room(entry) * self._values.itemsize
            + most_place_bytes(entry.numel, self._room(entry))
            for entry in self.packed
        ), _COUNT.itemsize * len(self.packed)

    @classmethod
    def element_bytes(cls, config: Config, item: int) -> float:
        """Return the mean bytes over a period after the warm-up, in which a batch sends up to LIMIT
        times the configured share. See Method.
        """
        settings = config.compression
        kept = min(1.0, settings.gradients_kept * (1 + LIMIT) / 2)
        size = 2 if settings.gradients_values == "bf16" else item
        return kept * size + min(1 / 8, 1 / 255 + kept)

    @property
    def _values(self) -> torch.dtype:
        return torch.bfloat16 if self.settings.gradients_values == "bf16" else self.dtype

    def _share(self, batch: int) -> float:
        """Return the share of a tensor's elements that a threshold set in this batch lets pass."""
        kept = self.settings.gradients_kept
        warmup = self.settings.gradients_warmup
        done = batch - self.settings.gradients_start
        if done >= warmup or kept >= WARMUP_SHARE:
            return kept
        return WARMUP_SHARE * float((kept / WARMUP_SHARE) ** (done / warmup))

    def _most(self, entry: Entry) -> int:
        """Return the most elements that a batch after the warm-up sends."""
        return min(entry.numel, ceil(LIMIT * ceil(self.settings.gradients_kept * entry.numel)))

    def _room(self, entry: Entry) -> int:
        """Return the most elements that any batch sends."""
        if not self.settings.gradients_warmup:
            return self._most(entry)
        return max(self._most(entry), ceil(WARMUP_SHARE * entry.numel))

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: one broadcast of its header for each rank, then one of its
        message.
        """
        thresholds = [self._threshold(entry, batch) for entry in self.packed]
        counts = self.other.own.take(len(self.packed), _COUNT)
        counts.copy_(torch.tensor([count for _, count in thresholds], dtype=_COUNT))
        self._pack(thresholds, message)
        num_bytes = counts.nbytes + message.num_bytes
        self.sent.add(sum(count for _, count in thresholds), num_bytes)
        yield self.other.gather([counts.nbytes] * self.axis.size)
        of_all = [reader.take(len(self.packed), _COUNT).tolist() for reader in self.other.readers()]
        yield self.wire.gather([self._num_bytes(own) for own in of_all])
        messages = [
            (reader, iter([reader.take(count, self._values) for count in own]))
            for reader, own in zip(self.messages(), of_all, strict=True)
        ]
        for total in self.totals(gradients):
            for rank, (reader, values) in enumerate(messages):
                value = next(values)
                places = reader.take(place_bytes(total.numel(), len(value)), torch.uint8)
                sparse(total, self.kernels.sparse).add_(total, value, places, rank == 0)

    def _threshold(self, entry: Entry, batch: int) -> tuple[Tensor, int]:
        """Return the threshold of this batch, and how many elements it sends."""
        key = f"{entry.name}.{_THRESHOLD}"
        x = self.feedback.next_kept[entry.name]
        passes = sparse(x, self.kernels.sparse)
        threshold = self.feedback.next_learned[key]
        threshold.copy_(self.feedback.learned[key])
        wanted = ceil(self._share(batch) * entry.numel)
        most = max(wanted, self._most(entry))
        done = batch - self.settings.gradients_start
        if (
            batch % self.settings.gradients_period == 0
            or done <= self.settings.gradients_warmup
            or not threshold > 0  # it was never set
        ):
            threshold.copy_(passes.threshold(x, wanted))
        count = passes.count(x, threshold)
        if count <= most:
            return threshold, count
        higher = passes.threshold(x, most)
        return higher, min(passes.count(x, higher), most)

    def _pack(self, thresholds: Sequence[tuple[Tensor, int]], message: Reader) -> None:
        """Write the values and the indices of this rank's message."""
        values = [message.take(count, self._values) for _, count in thresholds]
        for entry, value, (threshold, _) in zip(self.packed, values, thresholds, strict=True):
            x = self.feedback.next_kept[entry.name]
            places = message.take(place_bytes(entry.numel, len(value)), torch.uint8)
            sparse(x, self.kernels.sparse).pack_(x, threshold, value, places)

    def _num_bytes(self, counts: Sequence[int]) -> int:
        """Return the bytes of a message with these counts of elements, one for each tensor."""
        of_each = (
            count * self._values.itemsize + place_bytes(entry.numel, count)
            for entry, count in zip(self.packed, counts, strict=True)
        )
        return self._dense_numel * self.dtype.itemsize + sum(of_each)


@dataclass(frozen=True)
class TopK(KeptShare):
    """Sends the k numbers of each row that are farthest from zero, and their indices (ops.largest);
    the others become 0.

    Bytes of a row: k values, and ceil(cols / 8) bytes for the indices; k is share * cols, rounded.
    This is DCT-MP (arXiv 2010.08899, algorithm 2), with one difference: in the paper a tensor has
    one threshold, recomputed every L iterations; here each token has its own, its k-th largest
    feature. So the ends of a link share no state that could differ, messages have a fixed length,
    and which features pass depends neither on micro-batches nor on the grid. There is no error
    feedback, because a sample does not come again.
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

    def for_gradients(self) -> FixedIndices:
        return FixedIndices(self)

    def places(self, message: Tensor, cols: int) -> Tensor:
        """Return a copy of the indices of a message's numbers. Shapes: uint8 [rows,
        `places_bytes`].
        """
        return message[:, self.values(cols) :].clone()


@dataclass(frozen=True, eq=False)
class FixedIndices(Codec):
    """Sends the numbers of each row at the indices `where`, which both ends of the link know; the
    others become 0.
    """

    follows = True

    of: TopK
    where: Tensor | None = None

    def at(self, places: Tensor | None) -> FixedIndices:
        """Return the codec of one message."""
        return replace(self, where=places)

    def row_bytes(self, cols: int) -> int:
        return self.of.values(cols)

    def row_elements(self, cols: int) -> int:
        return self.of.kept(cols)

    def encode(self, x: Tensor) -> Tensor:
        passes = largest(x, self.of.backend)
        k = self.of.kept(x.shape[1])
        message: Tensor = passes.pick(x.contiguous(), self.where, k, self.of.rounded)
        return message

    def decode_(self, x: Tensor, message: Tensor) -> None:
        largest(x, self.of.backend).spread_(x, message, self.where, self.of.rounded)


def make_codec(config: Config) -> TopK:
    """Create the codec of messages."""
    return TopK(*kept_share(config), backend=config.kernels.largest)


GRADIENTS = Thresholds
MESSAGES = make_codec
