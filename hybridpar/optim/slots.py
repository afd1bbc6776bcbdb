"""Parameters as optimizers see them, before there are tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from torch import Tensor

from hybridpar.grid import APART, BATCH, Place
from hybridpar.nn.placement import Held, Placement, Range, Shard


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter as the rank at `place` holds it.

    Attributes:
        segments: Half-open ranges of the local tensor's split dimension, in order, each held by one
            set of ranks; a single one that covers the tensor if no rows are shared.
        counted: The segments that this rank counts in a sum over the tp axis: every element of the
            global parameter is counted by exactly one tp rank (a replicated parameter by rank 0, a
            shared row by its first holder, see Shard.owned).
        part: Range of the local tensor's elements that this rank updates, if replicas share the
            work; its tensors are then one-dimensional. Not for parameters with shared rows.
        shared: Whether replicas update the same.
        joint: Whether ranks that train apart have the same of it.
    """

    name: str
    placement: Placement
    place: Place = field(default_factory=dict)
    part: Range | None = None
    shared: bool = True
    joint: bool = False
    segments: tuple[Range, ...] = field(init=False)
    counted: tuple[Range, ...] = field(init=False)

    def __post_init__(self) -> None:
        shard = self.placement.shard
        if shard is None:
            rows = self.shape[0] if self.shape else 1
            segments = [((0, rows), self.place.get("tp", 0) == 0)]
        else:
            segments = _segments(shard, self.rank)
        if self.part is not None:
            assert len(segments) == 1, f"{self.name} has rows that several ranks hold"
            segments = [((0, self.part[1] - self.part[0]), segments[0][1])]
        object.__setattr__(self, "segments", tuple(s for s, _ in segments))
        object.__setattr__(self, "counted", tuple(s for s, owned in segments if owned))

    @property
    def rank(self) -> int:
        """Index of the local tensor among the parts of the global parameter."""
        return self.placement.rank_at(self.place)

    def is_copy_along(self, axis: str) -> bool:
        """Whether the ranks along an axis have the same of it, once its gradient is reduced.

        Ranks that hold different shards may share rows nevertheless.
        """
        if axis in APART:
            return self.joint
        shared_out = not self.shared and axis in ("pp", *BATCH)
        return not shared_out and self.placement.along(axis) is not Held.SHARDED

    @property
    def counts(self) -> bool:
        """Whether this rank counts `counted` in the global gradient norm: the first rank among equal
        ones does, and none counts a parameter with sign steps."""
        return not self.placement.sign_step and all(
            index == 0 or not self.is_copy_along(axis) for axis, index in self.place.items()
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, or of its `part`."""
        if self.part is not None:
            return (self.part[1] - self.part[0],)
        return self.placement.local_shape(self.rank)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def dim(self) -> int:
        return (
            0 if self.placement.shard is None or self.part is not None else self.placement.shard.dim
        )

    def counted_parts(self, x: Tensor) -> list[Tensor]:
        """Return views of the parts of a local tensor that this rank counts, or the tensor if it
        counts all."""
        if self.counted == self.segments:
            return [x]
        return [x.narrow(self.dim, start, stop - start) for start, stop in self.counted]

    def elementwise_parts(self, x: Tensor) -> list[Tensor]:
        """Return views to run an elementwise kernel over, so that shared rows stay equal bit for
        bit.

        Vector kernels may round the last few elements of a tensor differently from the others. A
        shared run of rows is therefore a part of its own: it then has the same extent on every
        holder, wherever it lies in the local tensor. Splits along other dimensions than 0 would not
        be contiguous and stay together: rows are only shared along 0.
        """
        if self.num_parts == 1:
            return [x]
        return list(x.split([stop - start for start, stop in self.segments]))

    @property
    def num_parts(self) -> int:
        """Number of `elementwise_parts`."""
        return len(self.segments) if self.dim == 0 else 1


def _segments(shard: Shard, rank: int) -> list[tuple[Range, bool]]:
    """Return local ranges and whether `rank` is the first holder; adjacent unshared ones are
    joined."""
    cuts = sorted({edge for ranges in shard.ranges for r in ranges for edge in r})
    segments: list[tuple[Range, bool]] = []
    shared = False
    position = 0
    for start, stop in shard.ranges[rank]:
        edges = [start, *(c for c in cuts if start < c < stop), stop]
        for a, b in pairwise(edges):
            holders = [
                r
                for r, ranges in enumerate(shard.ranges)
                if any(x <= a and b <= y for x, y in ranges)
            ]
            if a < b:
                segments.append(((position, position + b - a), holders[0] == rank))
                shared |= len(holders) > 1
            position += b - a
    return segments if shared else [((0, position), True)]
