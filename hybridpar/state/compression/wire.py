"""Message buffers: the messages of all ranks of an axis, one after the other in one tensor of
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybridpar.comm import Works, all_gather_async
from hybridpar.cpu import zeros
from hybridpar.grid import Axis
from hybridpar.state.layout import ALIGN_BYTES


class Wire:
    """Buffer for a message of up to `most_bytes` from each rank of the axis, reused for every
    batch.
    """

    def __init__(self, most_bytes: int, axis: Axis, device: torch.device):
        self.axis = axis
        self._stride = -(-most_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.room = zeros(axis.size * self._stride, torch.uint8, device)

    def gather(self, num_bytes: Sequence[int]) -> Works:
        """Start to bring every rank's message to all ranks. `num_bytes`: length of each message.

        Collectives: each rank broadcasts its own message.
        """
        starts = [rank * self._stride for rank in range(self.axis.size)]
        return all_gather_async(
            self.room,
            [
                (rank, start, start + length)
                for rank, (start, length) in enumerate(zip(starts, num_bytes, strict=True))
            ],
            self.axis,
        )

    def reader(self, rank: int) -> Reader:
        """Return a reader of the message of an axis rank."""
        return Reader(self.room[rank * self._stride : (rank + 1) * self._stride])

    @property
    def own(self) -> Reader:
        """A reader of this rank's message, which may be written."""
        return self.reader(self.axis.rank)

    def readers(self) -> Iterator[Reader]:
        """Return readers of all messages, in rank order. Sums in that order have equal bits on all
        ranks.
        """
        return map(self.reader, range(self.axis.size))


class Reader:
    """Reads a message from its start; each type's elements must lie at a multiple of their size."""

    def __init__(self, message: Tensor):
        self._message = message
        self.num_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next elements, as a view."""
        start = self.num_bytes
        self.num_bytes = self.num_bytes + numel * dtype.itemsize
        return self._message[start : self.num_bytes].view(dtype)
