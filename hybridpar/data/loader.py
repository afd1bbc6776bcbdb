"""Micro-batches of a grid from a stream of samples.

    batch t has B = mbs * m * dp samples;  micro-batch j of replica d holds  t * B + (j * dp + d) *
    mbs + (0 .. mbs - 1)

Replicas of all sites are counted together. So a batch has the same B samples in the same places
however they are dealt to micro-batches and replicas, and a run resumes by its number of batches
alone; if B or the data changed on the way, DataStart says when. Every pipeline stage asks for the
micro-batches that it needs, in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridpar.config import Whole

_KEPT_COUNTS = 1 << 12
"""Number of batches whose label counts are cached: evaluations repeat batches, and results of
training arrive some batches later."""


class Loader(Protocol):
    """Micro-batches as a pure function of (batch, index): any rank may ask for any of them, in
    any order."""

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]: ...
    def first_sample(self, index: int) -> int: ...
    def num_targets(self, batch: int) -> int: ...


@dataclass(frozen=True)
class DataStart:
    """Batch `batch` begins at position `sample` of the stream, after `num_consumed` samples of this
    or other data.

    All 0 unless a run has continued with other data, or with batches of another size.
    """

    batch: Whole = 0
    sample: Whole = 0
    num_consumed: Whole = 0

    def position(self, batch: int, batch_size: int) -> int:
        """Return the position in the stream at which batch `batch` begins."""
        assert batch >= self.batch, (batch, self)
        return self.sample + (batch - self.batch) * batch_size

    def consumed(self, num_batches: int, batch_size: int) -> int:
        """Return how many samples the first `num_batches` batches had."""
        return self.num_consumed + (num_batches - self.batch) * batch_size


FROM_THE_START = DataStart()


class Samples(Protocol):
    """An endless stream of samples, such as a Blend. Shapes: `counter` [b], positions in the
    stream."""

    fingerprint: str

    def batch(self, counter: NDArray[np.int64]) -> dict[str, NDArray[Any]]: ...

    def num_targets(self, counter: NDArray[np.int64]) -> int: ...

    def num_repeats(self, count: int) -> int:
        """Return how many of the first `count` samples repeat an earlier one, as far as known."""


class BatchLoader:
    """Micro-batches of one replica of a data-parallel run; a pure function of its arguments and
    of `start`."""

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start: DataStart = FROM_THE_START,
    ):
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert micro_batch_size > 0, micro_batch_size
        assert num_microbatches > 0, num_microbatches
        self.samples = samples
        self.micro_batch_size = micro_batch_size
        self.num_microbatches = num_microbatches
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.start = start
        self._counts: OrderedDict[int, int] = OrderedDict()

    def start_at(self, start: DataStart) -> None:
        """Place batches in the stream of data from now on."""
        self.start = start

    @property
    def batch_size(self) -> int:
        """Samples in a batch, over all replicas."""
        return self.micro_batch_size * self.num_microbatches * self._dp_size

    @property
    def fingerprint(self) -> str:
        """Return a hash of the data, their order and the seed; equal on every grid and for every
        batch size."""
        return self.samples.fingerprint

    def first_sample(self, index: int) -> int:
        """Return the position in the batch of the first sample of this replica's micro-batch
        `index`."""
        assert 0 <= index < self.num_microbatches, (index, self.num_microbatches)
        return (index * self._dp_size + self._dp_rank) * self.micro_batch_size

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        """Return micro-batch `index` of batch `batch`, both counted from 0.

        Shapes: GPT: `tokens`, `labels` [b, s] int64. BERT also: `token_types` [b, s] int64,
        `padding_mask` [b, s] bool (True = real token), `sentence_labels` [b] int64. On the CPU.
        """
        start = self.start.position(batch, self.batch_size) + self.first_sample(index)
        arrays = self.samples.batch(np.arange(start, start + self.micro_batch_size))
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def num_batches_without_repeats(self, most: int) -> int:
        """Return how many of the first `most` batches come before the first batch that repeats a
        sample."""
        return bisect_right(
            range(1, most + 1), 0, key=lambda n: self.samples.num_repeats(n * self.batch_size)
        )

    def num_targets(self, batch: int) -> int:
        """Return how many labels count (are not -100) in the whole batch, over all micro-batches
        and replicas."""
        start = self.start.position(batch, self.batch_size)
        if start not in self._counts:
            self._counts[start] = self.samples.num_targets(
                np.arange(start, start + self.batch_size)
            )
            while len(self._counts) > _KEPT_COUNTS:
                self._counts.popitem(last=False)
        return self._counts[start]
