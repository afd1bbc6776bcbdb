"""ZeRO: decide which replica updates which shard of the parameters and keeps their optimizer state.

    flat buffer   [ a a a a a a b b | c c c c c c c | d ... ]     buckets, in the order of the layout
    owner           0 0 0 0 1 1 1 1   1 1 1 1 1 1 1   ...         c must not be cut (LAMB, Muon's matrices)

Each bucket's gradient is reduce-scattered over its axis, owners update their shards, and an
all-gather brings the updated weights to the others. Source: Rajbhandari et al., arXiv 1910.02054,
section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod

import torch
from torch import Tensor

from hybridpar.comm import Parts, Works, all_gather_async, reduce_scatter_async
from hybridpar.cpu import zeros
from hybridpar.grid import EXPERTS, Axis, ProcessGrid
from hybridpar.nn.placement import Held, Placement, has_shared_rows
from hybridpar.optim import ParameterSlot, divisible
from hybridpar.state.layout import ALIGN_BYTES, Bucket, FlatLayout, Owned
from hybridpar.state.policy import StatePolicy
from hybridpar.state.residency.chunks import WHOLE, Buffer, BufferUsage, block_of

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Route:
    """How one parameter's gradient is reduced.

    Attributes:
        axis: The ranks it is reduced over.
        group: Parameters of different groups are never in one bucket.
        sharded: These ranks shard the update.
        whole: 0 if the update may be cut anywhere. Otherwise it may not be cut, and this is its
            size for load balancing, equal on all tp ranks.
    """

    axis: Axis
    group: object = None
    sharded: bool = False
    whole: int = 0


def make_routes(
    policy: StatePolicy, placements: Mapping[str, Placement], grid: ProcessGrid
) -> dict[str, Route]:
    """Return the routes of the gradients of a stage's parameters.

    A weight tied across stages is reduced over both of its holders and all their replicas at once
    (the embedding group); a rank that has both ends has added them already. Replicated parameters are in other
    buckets than sharded ones: Gloo adds in an order that depends on the place in the message, and
    replicated parameters must come out equal on all tp ranks, whose sharded parameters differ in
    size. Rows that several tp ranks hold lie at different places there, so all ranks update them.
    Gradients that are still partial along a layer's axis are completed later, by
    `reduce_shared_gradients`. Factors that are exchanged while they come have a bucket for each
    transformer block, because they are freed bucket by bucket.
    """

    def route(name: str, placement: Placement) -> Route:
        tied = placement.along("pp") is Held.PARTIAL and policy.ends_apart
        common_rows = has_shared_rows(placement)
        cuttable = divisible(policy.config.optim, ParameterSlot(name, placement, grid.place))
        return Route(
            grid.embedding_group if tied and grid.pp.size > 1 else _replicas_of(placement, grid),
            (placement.shard is None, common_rows, block_of(name) if policy.streams else None),
            sharded=policy.config.parallel.zero > 0 and not common_rows,
            whole=0 if cuttable else prod(placement.shape),
        )

    return {name: route(name, placement) for name, placement in placements.items()}


def _replicas_of(placement: Placement, grid: ProcessGrid) -> Axis:
    """Return the ranks of a site that hold the same part of a parameter."""
    return grid.expert_dp if placement.along(EXPERTS) is Held.SHARDED else grid.dp_cp


def frozen_routes(
    policy: StatePolicy, placements: Mapping[str, Placement], grid: ProcessGrid
) -> dict[str, Route]:
    """Return the routes of frozen parameters. They have no gradient; the route says which replicas
    shard the weights. As with trained parameters, rows that several tp ranks hold are not sharded.
    """
    return {
        name: Route(
            _replicas_of(placement, grid),
            (False, common_rows),
            sharded=policy.splits_weights and not common_rows,
        )
        for name, placement in placements.items()
        for common_rows in [has_shared_rows(placement)]
    }


class Partition:
    """A flat buffer in buckets, and the rank that updates each shard of them.

    Parameters that may not be cut go to the rank with the smallest load so far; the rest is cut
    evenly. Both depend only on the order of the parameters and on global sizes, so the tp ranks of
    one replica own the same uncut parameters.

    Args:
        bucket_bytes: Size at which a bucket is closed.
        uses: Returns how a parameter is used; the parameters of a bucket have one use and one
            route.
    """

    def __init__(
        self,
        layout: FlatLayout,
        routes: Mapping[str, Route],
        bucket_bytes: int = BUCKET_BYTES,
        uses: Callable[[str], BufferUsage] = lambda name: WHOLE,
    ):
        self.layout = layout
        self.uses = uses
        self._routes = routes
        keys = {
            name: (route.axis.name, route.sharded, route.group, uses(name))
            for name, route in routes.items()
        }
        # Buckets that become final last and are never released go last, so that they hold back no
        # other bucket.
        self.buckets = tuple(
            sorted(
                layout.buckets(bucket_bytes, keys.__getitem__), key=lambda b: self.use_of(b).stays
            )
        )
        self.axes = [routes[bucket.names[0]].axis for bucket in self.buckets]
        self._owner_of_whole: dict[str, int] = {}
        self._load = {axis.name: [0] * axis.size for axis in self.axes}
        self.parts: list[Parts] = []
        for bucket, axis in zip(self.buckets, self.axes, strict=True):
            is_cut = routes[bucket.names[0]].sharded and axis.size > 1
            self.parts.append(tuple(self._cut(bucket, axis)) if is_cut else ())
        """Shards of each bucket: (owner, start, stop), counted from its start; () if every rank
        updates all of it."""
        self.owned = sorted(self._owned(), key=lambda owned: owned.start)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks update some shard."""
        return any(self.parts)

    def is_alone(self, part: int) -> bool:
        """Return whether gradients that a segment's backward makes final are this rank's alone."""
        return part not in self._shared_parts

    @cached_property
    def _shared_parts(self) -> frozenset[int]:
        """Segments whose backward makes sharded gradients final."""
        return frozenset(
            self.use_of(bucket).parts[0]
            for bucket, axis in zip(self.buckets, self.axes, strict=True)
            if axis.size > 1
        )

    def most_whole(self, ranks: Sequence[int]) -> int:
        """Return the first of these ranks that updates most elements of uncut parameters."""
        load = Counter[int]()
        for name, owner in self._owner_of_whole.items():
            load[self.axis_of(name).ranks[owner]] += self._routes[name].whole
        return max(ranks, key=load.__getitem__)

    def axis_of(self, name: str) -> Axis:
        """Return the ranks that a parameter's gradient is reduced over."""
        return self._routes[name].axis

    def use_of(self, bucket: Bucket) -> BufferUsage:
        """Return the use of all parameters of a bucket."""
        return self.uses(bucket.names[0])

    def gather(
        self, flat: Tensor | Buffer, wanted: Callable[[BufferUsage], bool] = lambda use: True
    ) -> Works:
        """Start to all-gather `flat`, or its buckets of some uses, from the ranks that own its
        shards.

        Collectives: an all-gather for each bucket over its axis.
        """
        return Works(
            all_gather_async(flat[bucket.start : bucket.stop], parts, axis)
            for bucket, parts, axis in self._shared(wanted)
        )

    def reduce_scatter(self, flat: Tensor | Buffer, wanted: Callable[[BufferUsage], bool]) -> Works:
        """Start to reduce-scatter the buckets of some uses. Each shard is complete on its owner;
        elsewhere its content is undefined.

        Collectives: a reduce-scatter for each bucket over its axis.
        """
        return Works(
            reduce_scatter_async(flat[bucket.start : bucket.stop], parts, axis)
            for bucket, parts, axis in self._shared(wanted)
        )

    def _shared(
        self, wanted: Callable[[BufferUsage], bool]
    ) -> Iterator[tuple[Bucket, Parts, Axis]]:
        return (
            (bucket, parts, axis)
            for bucket, parts, axis in zip(self.buckets, self.parts, self.axes, strict=True)
            if parts and wanted(self.use_of(bucket))
        )

    def owned_views(
        self,
        flat: Tensor | Buffer,
        wanted: Callable[[BufferUsage], bool] = lambda use: True,
        *,
        without: Container[str] = (),
    ) -> Iterator[Tensor]:
        """Return views of this rank's shards, in order: complete parameters, or vectors. without:
        parameters that `flat` does not have.
        """
        return (
            flat[o.start : o.stop].view(self.layout.shapes[o.name] if o.part is None else (-1,))
            for o in self.owned
            if o.name not in without and wanted(self.uses(o.name))
        )

    def whole(
        self, owned: Iterable[Tensor], device: torch.device, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return all parameters unsharded, by name, from each rank's shards in order; dtype: of the
        shards; None: as the layout. Collectives: as `gather`.
        """
        flat = zeros(self.layout.numel, dtype or self.layout.dtype, device)
        for view, own in zip(self.owned_views(flat), owned, strict=True):
            view.copy_(own)
        self.gather(flat).wait()
        return self.layout.views(flat)

    def layout_of_owned(
        self,
        dtype: torch.dtype,
        *,
        offset_dtype: torch.dtype | None = None,
        wanted: Callable[[BufferUsage], bool] = lambda use: True,
    ) -> FlatLayout:
        """Return the layout of this rank's shards, in order: complete parameters, or vectors."""
        own = {
            o.name: self.layout.shapes[o.name] if o.part is None else (o.stop - o.start,)
            for o in self.owned
            if wanted(self.uses(o.name))
        }
        return FlatLayout(own, dtype, offset_dtype=offset_dtype)

    def _cut(self, bucket: Bucket, axis: Axis) -> Iterator[tuple[int, int, int]]:
        load = self._load[axis.name]
        align = ALIGN_BYTES // self.layout.dtype.itemsize
        for whole, run in groupby(bucket.names, lambda name: self._routes[name].whole > 0):
            names = list(run)
            if not whole:
                start = self.layout.ranges[names[0]][0]
                stop = self.layout.ranges[names[-1]][1]
                units = (stop - start) // align
                cuts = [start + units * i // axis.size * align for i in range(axis.size)]
                yield from (
                    (owner, a - bucket.start, b - bucket.start)
                    for owner, (a, b) in enumerate(pairwise((*cuts, stop)))
                )
                continue
            for name in names:
                owner = self._owner_of_whole[name] = load.index(min(load))
                load[owner] += self._routes[name].whole
                yield (
                    owner,
                    self.layout.ranges[name][0] - bucket.start,
                    self.layout.ranges[name][1] - bucket.start,
                )

    def _owned(self) -> Iterator[Owned]:
        for bucket, axis, parts in zip(self.buckets, self.axes, self.parts, strict=True):
            mine = [
                (bucket.start + a, bucket.start + b) for owner, a, b in parts if owner == axis.rank
            ]
            for name in bucket.names:
                start = self.layout.ranges[name][0]
                size = prod(self.layout.shapes[name])
                if not parts or self._owner_of_whole.get(name, -1) == axis.rank:
                    yield Owned(name, start, start + size, None, shared=not parts)
                elif name not in self._owner_of_whole:
                    for a, b in mine:
                        low = max(a, start)
                        high = min(b, start + size)
                        if low < high or (size == 0 and a <= start < b):
                            part = None if high - low == size else (low - start, high - start)
                            yield Owned(name, low, high, part, shared=False)
