"""Choose the parameters to compress, and all-reduce their buckets while training continues.

    REDUCE(t)   G(t) + E(t) is encoded bucket by bucket, and messages start
    later       the next steps of the exchange, where the plans of all replicas have them: at the
                first backward of batch t+1
    NORM(t)     the sums of the decoded messages have replaced the gradients
    UPDATE(t)   the unsent rest becomes E(t+1); after a skipped step E(t+1) = E(t)

With ZeRO-2 and 3 the unsent rest stays in the memory of G(t), and a rank keeps only its own shard
of a decoded sum.

If gradients are factors, each block of micro-batches is exchanged after its last backward, and its
factors are freed (stream.py). The sums stay factors, too, and no buffer holds either
(`StatePolicy.keeps_factors`).

Every message goes to all ranks, which add them in rank order, so replicas stay equal to the bit.
Later messages of tied weights leave at NORM, as the plans of their two stages differ before that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.config import CompressionConfig
from hybridpar.cpu import zeros
from hybridpar.grid import Axis
from hybridpar.nn.placement import Held, Placement, has_shared_rows, split_ranges
from hybridpar.state.compression.feedback import NONE, Feedback, FeedbackShapes
from hybridpar.state.compression.method import Entry, Method, Sent
from hybridpar.state.compression.registry import gradient_method
from hybridpar.state.compression.stream import BlockStream, Exchange
from hybridpar.state.gradients import BlockParts
from hybridpar.state.layout import Bucket
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, Memory
from hybridpar.state.residency.shares import Shares


@dataclass(frozen=True)
class BatchGradients:
    """One rank's gradients of a batch, which are to be reduced.

    Attributes:
        batch: Number of the batch.
        parts: Factors of the gradients of the `factored` parameters; they are removed from the dict.
        scale: The loss scale, by which the gradients are multiplied.
        views: With `splits_gradients`, the gradients by parameter, without the `absent` ones.
        sums: With `splits_gradients`, receives this rank's shard of the reduced gradients.
    """

    batch: int
    parts: BlockParts
    scale: float = 1.0
    views: Mapping[str, Tensor] = field(default_factory=lambda: NONE)
    sums: Shares | None = None


class Compression:
    """Compressed all-reduce of the gradients of a partition.

    For each batch call `expect` before its first backward, `open` before its last one, and `close`
    at its update.

    A parameter is compressed if it has at least `gradients_smallest` elements and its gradient is
    reduced over several ranks. Gradients that are partial along tp are small or rare, so they are
    sent uncompressed. If no parameter is compressed, there are no buffers, and calls do nothing.

    Args:
        partition: Which rank updates which shard.
        placements: Placement of each parameter, by name.
        policy: The method, and which gradients a rank keeps. With `splits_gradients` its own
            gradients become the unsent rest, or exist only as factors.
        memory: Allocates buffers.

    Attributes:
        blocks: First and last + 1 micro-batch of each block of a batch, if gradients are factors.
    """

    def __init__(
        self,
        partition: Partition,
        placements: Mapping[str, Placement],
        policy: StatePolicy,
        memory: Memory,
    ):
        layout = partition.layout
        settings = policy.config.compression
        shared = policy.splits_gradients
        self.takes_factors = settings.takes_factors
        shapes = layout.shapes
        self.packed = frozenset(
            name
            for name in (layout.names if settings.gradients != "none" else ())
            if partition.axis_of(name).size > 1
            and _is_packed(shapes[name], placements[name], settings)
        )
        # the method's file is read only if it is used
        method = gradient_method(settings.gradients) if self.packed else Method
        kept = {name: shapes[name] for name in layout.names if name in self.packed}
        learned = {
            f"{name}.{what}": shape
            for name in kept
            for what, shape in method.learned(kept[name], settings).items()
        }
        scaled = [name for name in learned if name.rpartition(".")[2] in method.scaled]
        feedback = FeedbackShapes({} if self.takes_factors else kept, learned, scaled)
        self.feedback = Feedback(
            feedback, layout.dtype, memory, uses=partition.uses, in_place=shared
        )
        self._batch = 0
        self._is_open = False
        self._expected: BatchGradients | None = None
        self._start = settings.gradients_start
        self.blocks = split_ranges(
            policy.config.pipeline.num_microbatches, policy.num_blocks if self.takes_factors else 1
        )
        self._scratch: Tensor | None = None
        if shared and self.packed:
            largest = max(prod(shape) for shape in kept.values())
            self._scratch = zeros(largest, layout.dtype, memory.device)
        self._methods = {
            bucket: method(
                [
                    Entry(name, shapes[name], layout.ranges[name][0], name in self.packed)
                    for name in bucket.names
                ],
                axis,
                policy,
                self.feedback,
                self._scratch,
            )
            for bucket, axis in zip(partition.buckets, partition.axes, strict=True)
            if not self.packed.isdisjoint(bucket.names)
        }
        self._method_of = {
            name: each for bucket, each in self._methods.items() for name in bucket.names
        }
        self.keeps_factors = policy.keeps_factors
        self.stream = BlockStream(
            {
                bucket: (partition.use_of(bucket).parts[0], self.packed & set(bucket.names))
                for bucket, each in self._methods.items()
                if policy.streams and not _is_over_stages(each)
            },
            self._start_block,
        )

    @property
    def factored(self) -> frozenset[str]:
        """Parameters whose gradients are taken as factors."""
        return self.packed if self.takes_factors else frozenset()

    @property
    def absent(self) -> frozenset[str]:
        """Parameters in `factored` whose reduced gradients are not kept unsharded either: no
        gradient buffer holds them.
        """
        without = self._scratch is not None or self.keeps_factors
        return self.factored if without else frozenset()

    @property
    def kept_as_factors(self) -> frozenset[str]:
        """Parameters whose reduced gradients are kept as factors; see `total`."""
        return self.factored if self.keeps_factors else frozenset()

    def total(self, name: str) -> Tensor:
        """Return the reduced gradient of a parameter in `kept_as_factors`, of the batch that was
        reduced last. Shapes: -> the parameter's local shape.
        """
        return self._method_of[name].total(name)

    def block_of(self, microbatch: int) -> tuple[int, bool]:
        """Return the block of a micro-batch, and whether the micro-batch ends a block before the
        batch's last.

        Args:
            microbatch: Number within the batch.
        """
        number = bisect_right(self.blocks, microbatch, key=lambda block: block[0]) - 1
        return number, microbatch + 1 == self.blocks[number][1] < self.blocks[-1][1]

    def expect(self, gradients: BatchGradients) -> None:
        """Note which gradients come next. Blocks of them may be exchanged as soon as the update of
        the batch before is made.
        """
        if self.packed:
            self._expected = gradients
            self.stream.begin()

    def open(self) -> None:
        """Start to reduce the expected gradients."""
        gradients = self._expected
        if gradients is None:  # a block has been exchanged, or nothing is compressed
            return
        assert not self._is_open, "the update of the batch before is not made"
        self._expected = None
        self._is_open = True
        self._batch = gradients.batch
        if gradients.batch >= self._start:
            self.feedback.open(gradients.scale, gradients.views)
        for method in self._methods.values():
            method.begin(gradients.parts, gradients.sums)

    def close(self, *, made: bool) -> None:
        """End the batch that was opened, if any. made: its update was made, not skipped; then the
        unsent rest is kept.
        """
        self._is_open = False
        self.feedback.close(made=made)

    def proceed(self) -> None:
        """Take the next step of the blocks under way. Replicas must call it at the same places."""
        self.stream.proceed()

    def covers(self, bucket: Bucket) -> bool:
        """Return whether any parameter of a bucket is compressed."""
        return bucket in self._methods

    def start(self, bucket: Bucket, buffer: Tensor | Buffer) -> Exchange:
        """Start the all-reduce of a bucket for which `covers` is true: of its last block, and of
        earlier ones that have not been exchanged.
        """
        method = self._methods[bucket]
        self.stream.finish(bucket)
        # uncompressed buckets do not proceed before somebody waits for them
        rounds = method.rounds if self._batch >= self._start else 1
        steps = _without_grad(method.steps(buffer, bucket, self._batch))
        exchange = Exchange(steps, rounds, over_stages=_is_over_stages(method))
        self.stream.note(bucket, exchange)
        return exchange

    def _start_block(self, bucket: Bucket) -> Exchange | None:
        """Start to exchange a bucket's next block; None: the update of the batch before is not made,
        or the batch sends whole gradients.
        """
        batch = self._batch if self._expected is None else self._expected.batch
        if batch < self._start or (self._expected is not None and self._is_open):
            return None
        self.open()
        return Exchange(_without_grad(self._methods[bucket].block_steps()), rounds=2)

    def sent(self, axis: Axis | None = None) -> Sent:
        """Return how much this rank has sent since the start of the run, over an axis (None: over
        all).
        """
        total = Sent()
        for method in self._methods.values():
            if axis is None or method.axis.name == axis.name:
                total.add_all(method.sent)
        return total

    def uncoded_bytes_over(self, axis: Axis) -> int:
        """Return the bytes of `sent(axis)` from before `gradients_start`."""
        methods = self._methods.values()
        return sum(method.uncoded_bytes for method in methods if method.axis.name == axis.name)

    @property
    def rooms(self) -> list[Tensor]:
        """Message buffers."""
        scratch = [] if self._scratch is None else [self._scratch]
        return scratch + [
            wire.room for method in self._methods.values() for wire in (method.wire, method.other)
        ]


def _is_over_stages(method: Method) -> bool:
    """Return whether a method's messages go to ranks of several stages."""
    return method.axis.name == "embedding_group"


def _is_packed(shape: Sequence[int], placement: Placement, settings: CompressionConfig) -> bool:
    """Return whether a parameter of that local shape is compressed if it is reduced over several
    ranks.
    """
    return (
        gradient_method(settings.gradients).packs(shape, placement)
        and prod(shape) >= max(settings.gradients_smallest, 1)
        and placement.along("tp") is not Held.PARTIAL
        and not has_shared_rows(placement)
    )


def _without_grad(steps: Iterator[Works]) -> Iterator[Works]:
    """Yield the same works, with autograd disabled in each step."""
    while True:
        with torch.no_grad():
            work = next(steps, None)
        if work is None:
            return
        yield work
