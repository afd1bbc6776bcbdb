"""Reduces gradients, bucket by bucket, while the last backward of the batch still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from hybridpar.comm import Parts, Waitable, Works, all_reduce_async, reduce_scatter_async
from hybridpar.grid import Axis
from hybridpar.state.compression import Compression, Exchange
from hybridpar.state.layout import Bucket
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, BufferUsage


class GradientReducer:
    """Reduces a flat gradient in buckets, each as soon as all of its gradients are final.

    For each batch: `arm(flat)` before its last backward, `ready(name)` as gradients become final
    (see GradientAccumulator.arm), `flush()` after it for parameters without a gradient, and
    `wait()` before the reduced gradients are used. A batch may be armed while the reduction of an
    earlier one, flushed but not waited for, is still under way in another buffer.

    Afterwards the reduced gradients are on their owners: on all ranks, or in shards if the
    partition is sharded.

    Args:
        compression: Compresses the buckets that it covers.
        reduces: Selects the uses that this object reduces.

    Collectives: one all-reduce or reduce-scatter for each bucket over its axis, in the order of the
    buckets on every rank. A bucket that fills early is held back until the earlier buckets have
    started. On an axis of size 1 nothing is sent. For a compressed bucket, the collectives of its
    method.
    """

    def __init__(
        self,
        partition: Partition,
        compression: Compression,
        reduces: Callable[[BufferUsage], bool] = lambda use: True,
    ):
        self.partition = partition
        own = [
            entry
            for entry in zip(partition.buckets, partition.axes, partition.parts, strict=True)
            if reduces(partition.use_of(entry[0]))
        ]
        self.buckets = tuple(bucket for bucket, _, _ in own)
        self._ways = [(axis, parts) for _, axis, parts in own]
        self._bucket_of = {
            name: i for i, bucket in enumerate(self.buckets) for name in bucket.names
        }
        self._flat: Tensor | Buffer | None = None  # the buffer of the armed batch
        self._missing: list[set[str]] = []  # by bucket: parameters whose gradient is not final
        self._next = 0  # the bucket to start next
        self._compression = compression
        self._started: deque[list[Waitable]] = deque()  # by batch, oldest first

    @property
    def summed_beside(self) -> list[tuple[str, ...]]:
        """Parameters of each bucket that any stream may reduce, because the reduction needs no
        memory besides the gradients. Empty if gradients are compressed or nothing is reduced.
        """
        if self._compression.packed:
            return []
        return [
            bucket.names
            for bucket, (axis, _) in zip(self.buckets, self._ways, strict=True)
            if axis.size > 1
        ]

    def arm(self, flat: Tensor | Buffer) -> None:
        """Call before the last backward into `flat`."""
        assert self._flat is None, "the batch before was not flushed"
        self._flat = flat
        self._missing = [set(bucket.names) for bucket in self.buckets]
        self._next = 0
        self._started.append([])

    def ready(self, name: str) -> None:
        """Note that this gradient is final, and start the bucket that it completes."""
        missing = self._missing[self._bucket_of[name]]
        missing.remove(name)  # fails if the gradient was called final before
        if not missing:
            self._start_complete()

    def complete(self, names: Iterable[str]) -> None:
        """Note that these parameters get no more gradients; start the buckets that are complete."""
        if self._flat is not None:
            for name in names:
                self._missing[self._bucket_of[name]].discard(name)
            self._start_complete()

    def flush(self) -> None:
        """Start the remaining buckets: no more gradients will come."""
        if self._flat is None:
            return
        for missing in self._missing:
            missing.clear()
        self._start_complete()
        assert self._next == len(self.buckets)
        self._flat = None

    def wait(self) -> None:
        """Wait for the oldest reduction under way, if there is one."""
        if not self._started:
            return
        assert self._flat is None or len(self._started) > 1, (
            "flush before waiting: buckets are missing"
        )
        works = self._started.popleft()
        exchanges = [work for work in works if isinstance(work, Exchange)]
        for _ in range(1, max((exchange.rounds for exchange in exchanges), default=1)):
            _proceed(exchanges)
        for work in works:
            work.wait()

    def proceed(self) -> None:
        """Take the next step of compressed reductions under way within this stage. Replicas must
        call it at the same places.

        Reductions over several stages, whose plans are at different places, are left to `wait`.
        """
        self._compression.proceed()
        for works in self._started:
            _proceed(work for work in works if isinstance(work, Exchange) and not work.over_stages)

    @property
    def newest(self) -> Works:
        """The reduction that was flushed last."""
        return Works(self._started[-1] if self._started else ())

    def of(self, use: BufferUsage) -> Works:
        """Return the newest reduction's works for a use, whose buckets must all have started."""
        works = self._started[-1]
        numbers = [
            i for i, bucket in enumerate(self.buckets) if self.partition.use_of(bucket) == use
        ]
        assert all(i < len(works) for i in numbers), "a bucket of another use holds this one back"
        return Works(works[i] for i in numbers)

    def _start_complete(self) -> None:
        assert self._flat is not None, "ready() without arm()"
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._started[-1].append(
                self._start(self.buckets[self._next], self._flat, *self._ways[self._next])
            )
            self._next += 1

    def _start(self, bucket: Bucket, buffer: Tensor | Buffer, axis: Axis, parts: Parts) -> Waitable:
        if self._compression.covers(bucket):
            return self._compression.start(bucket, buffer)
        flat = buffer[bucket.start : bucket.stop]
        return reduce_scatter_async(flat, parts, axis) if parts else all_reduce_async(flat, axis)


def _proceed(exchanges: Iterable[Exchange]) -> None:
    """Take the next step of each exchange, so that their messages travel together."""
    for exchange in exchanges:
        exchange.proceed()
