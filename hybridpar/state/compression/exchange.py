"""Choose the parameters to compress, and all-reduce their buckets while training continues.

    REDUCE(t)   G(t) + E(t) is encoded bucket by bucket, and messages start
    later       the next steps of the exchange, where the plans of all replicas have them: at the
                first backward of batch t+1
    NORM(t)     the sums of the decoded messages have replaced the gradients
    UPDATE(t)   the unsent rest becomes E(t+1); after a skipped step E(t+1) = E(t)

With ZeRO-2 and 3 the unsent rest stays in the memory of G(t), and a rank keeps only its own shard
of a decoded sum. If gradients are factors, no other memory holds them.

Every message goes to all ranks, which add them in rank order, so replicas stay equal to the bit.
Later messages of tied weights leave at NORM, as the plans of their two stages differ before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from hybridpar.comm import Work, Works
from hybridpar.config import AUTO, CompressionConfig, KernelsConfig
from hybridpar.cpu import zeros
from hybridpar.grid import Axis
from hybridpar.nn.binding import GradientPart
from hybridpar.nn.placement import Held, Placement, has_shared_rows
from hybridpar.state.compression.feedback import NONE, Feedback, FeedbackShapes
from hybridpar.state.compression.method import Entry, Sent
from hybridpar.state.compression.registry import gradient_method
from hybridpar.state.layout import Bucket
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, Memory
from hybridpar.state.residency.shares import Shares


class Exchange:
    """The steps of one bucket's all-reduce, taken one at a time; wait for it as for a Work.

    Args:
        steps: Yields the communication of each step.
        rounds: Upper bound of the number of messages that follow each other.
        over_stages: Ranks of several stages take part.
    """

    def __init__(self, steps: Iterator[Works], rounds: int, *, over_stages: bool = False):
        self._steps = steps
        self.rounds = rounds
        self.over_stages = over_stages
        self._work: Work | Works | None = next(steps)

    def proceed(self) -> None:
        """Wait for the message under way and send the next one, if there is another."""
        if self.rounds > 1 and self._work is not None:
            self._advance()

    def wait(self) -> None:
        """Return once the bucket has been all-reduced."""
        while self._work is not None:
            self._advance()

    def _advance(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = next(self._steps, None)
        self.rounds = self.rounds - 1

    def is_done(self) -> bool:
        """Return whether the communication started so far is complete."""
        return self._work is None or self._work.is_done()


class Compression:
    """Compressed all-reduce of the gradients of a partition.

    A parameter is compressed if it has at least `gradients_smallest` elements and its gradient is
    reduced over several ranks. Gradients that are partial along tp are small or rare, so they are
    sent uncompressed.

    Args:
        partition: Which rank updates which shard.
        placements: Placement of each parameter, by name.
        settings: The configuration's `compression` table.
        memory: Allocates buffers.
        kernels: Backends of the operators.
        shared: A rank keeps only its own shard of the all-reduced gradients (ZeRO-2 and 3). Its own
            gradients become the unsent rest, or exist only as factors.
    """

    def __init__(
        self,
        partition: Partition,
        placements: Mapping[str, Placement],
        settings: CompressionConfig,
        memory: Memory,
        kernels: KernelsConfig = AUTO,
        *,
        shared: bool = False,
    ):
        layout = partition.layout
        self.takes_factors = settings.takes_factors
        method = gradient_method(settings.gradients)
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        starts = dict(zip(layout.names, layout.offsets, strict=True))
        self.packed = frozenset(
            name
            for name in layout.names
            if partition.axis_of(name).size > 1
            and _is_packed(shapes[name], placements[name], settings)
        )
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
        self._start = settings.gradients_start
        self._methods = {
            bucket: method(
                [
                    Entry(name, shapes[name], starts[name], name in self.packed)
                    for name in bucket.names
                ],
                axis,
                settings,
                self.feedback,
                kernels,
            )
            for bucket, axis in zip(partition.buckets, partition.axes, strict=True)
            if not self.packed.isdisjoint(bucket.names)
        }
        self._scratch: Tensor | None = None
        if shared:
            largest = max((prod(shape) for shape in kept.values()), default=0)
            self._scratch = zeros(largest, layout.dtype, memory.device)
        for each in self._methods.values():
            each.decode_into(self._scratch)

    @staticmethod
    def of(
        partition: Partition,
        placements: Mapping[str, Placement],
        policy: StatePolicy,
        memory: Memory,
    ) -> Compression | None:
        """Create the compression of a policy; None if nothing is compressed."""
        if policy.compression.gradients == "none":
            return None
        made = Compression(
            partition,
            placements,
            policy.compression,
            memory,
            policy.kernels,
            shared=policy.splits_gradients,
        )
        return made if made.packed else None

    @property
    def factored(self) -> frozenset[str]:
        """Parameters whose gradients are taken as factors."""
        return self.packed if self.takes_factors else frozenset()

    @property
    def absent(self) -> frozenset[str]:
        """Parameters in `factored` whose reduced gradients are not kept unsharded either: no
        gradient buffer holds them.
        """
        return self.factored if self._scratch is not None else frozenset()

    def begin(
        self,
        batch: int,
        parts: dict[str, list[GradientPart]],
        scale: float = 1.0,
        gradients: Mapping[str, Tensor] = NONE,
        sums: Shares | None = None,
    ) -> None:
        """Start to reduce a batch's gradients, which are multiplied by `scale`.

        Args:
            batch: Number of the batch.
            parts: Factors of the gradients of the `factored` parameters; they are removed from the
                dict.
            scale: The loss scale.
            gradients: With `shared`, the gradients by parameter, without the `absent` ones.
            sums: With `shared`, receives this rank's shard of the reduced gradients.
        """
        if batch >= self._start:
            self.feedback.open(scale, gradients)
        self._batch = batch
        for method in self._methods.values():
            method.begin(parts, sums)

    def covers(self, bucket: Bucket) -> bool:
        """Return whether any parameter of a bucket is compressed."""
        return bucket in self._methods

    def start(self, bucket: Bucket, buffer: Tensor | Buffer) -> Exchange:
        """Start the all-reduce of a bucket for which `covers` is true."""
        method = self._methods[bucket]
        steps = _without_grad(method.steps(buffer, bucket, self._batch))
        # uncompressed buckets do not proceed before somebody waits for them
        rounds = method.rounds if self._batch >= self._start else 1
        return Exchange(steps, rounds, over_stages=method.axis.name == "embedding_group")

    @property
    def sent(self) -> Sent:
        """How much this rank has sent since the start of the run."""
        total = Sent()
        for method in self._methods.values():
            total.add_all(method.sent)
        return total

    def sent_over(self, axis: Axis) -> Sent:
        """Return the share of `sent` over one axis."""
        total = Sent()
        for method in self._methods.values():
            if method.axis.name == axis.name:
                total.add_all(method.sent)
        return total

    def uncoded_bytes_over(self, axis: Axis) -> int:
        """Return the bytes of `sent_over` from before `gradients_start`."""
        methods = self._methods.values()
        return sum(method.uncoded_bytes for method in methods if method.axis.name == axis.name)

    @property
    def rooms(self) -> list[Tensor]:
        """Message buffers."""
        scratch = [] if self._scratch is None else [self._scratch]
        return scratch + [
            wire.room for method in self._methods.values() for wire in (method.wire, method.other)
        ]


def _is_packed(shape: Sequence[int], placement: Placement, settings: CompressionConfig) -> bool:
    """Return whether a parameter of that local shape is compressed if it is reduced over several
    ranks.
    """
    packs = gradient_method(settings.gradients).packs(shape, placement)
    return (
        packs
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
