"""ZeRO-2 and 3: a rank keeps its own shard of each chunk, and has the unsharded chunk only while it
needs it.

    unsharded   [ a a a a ]   .   .   [ b b b b ]     chunks of a flat buffer, resident while a segment computes
    shard       [ a | b | c | d ]                     this rank's shard of each, always resident

Weights: an unsharded chunk is gathered from the shards of all replicas, and dropped. Gradients: a
backward adds to an unsharded chunk, which is reduce-scattered over the replicas into their shards,
and dropped. Chunks whose use `stays` are unsharded on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.state.layout import FlatLayout
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, BufferUsage, Chunk, Memory, StateItem, cut
from hybridpar.state.residency.region import TensorRegion, taken
from hybridpar.state.residency.store import Store
from hybridpar.state.residency.tiers import Tiers

SHARES = "shares/"
"""Prefix of the kind of a shard; the kind of the unsharded state follows."""
FROZEN = "frozen/0"
"""Kind of the frozen weights, which have one version."""


class WholeChunk(TensorRegion):
    """An unsharded chunk that is gathered and released.

    Args:
        kind: Kind of state, with its number: 'weights/0', 'gradients/1'.
        listeners: Called with the chunk when it has been allocated or freed.

    Attributes:
        index: The number in `kind`.
    """

    def __init__(
        self,
        kind: str,
        use: BufferUsage,
        tensor: Tensor,
        listeners: Sequence[Callable[[WholeChunk], object]],
    ):
        super().__init__(tensor)
        self.kind = kind
        self.use = use
        self.index = int(kind.rpartition("/")[2])
        self._listeners = listeners

    def holds(self, view: Tensor) -> bool:
        """Return whether a tensor is a view of this chunk."""
        return view.untyped_storage()._cdata == self.tensor.untyped_storage()._cdata

    def take(self) -> None:
        """Allocate the memory, if it is not allocated; its content is undefined."""
        if not self.is_here:
            super().take()
            self._tell()

    def give_back(self) -> None:
        """Free the memory, if it is allocated."""
        if self.is_here:
            super().give_back()
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self)


class ShardedMemory(Memory):
    """Memory of a device in which unsharded chunks are gathered and released. At the start none is
    allocated. All other state is allocated once and kept.

    Args:
        sharded: Prefixes of the kinds of state that replicas shard (StatePolicy.moved_kinds).
        chunk: Class of the unsharded chunks.

    Attributes:
        chunks: The unsharded chunks, in the order of their creation.
        listeners: As in WholeChunk.
        items: State that can move between tiers.
        padding: Bytes of the items that hold nothing.
        tiers: Moves items; the base class has none.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        sharded: tuple[str, ...] = (),
        chunk: type[WholeChunk] = WholeChunk,
    ):
        super().__init__(device)
        self.chunks: list[WholeChunk] = []
        self.items: list[StateItem] = []
        self.padding = 0
        self.listeners: list[Callable[[WholeChunk], object]] = []
        self.tiers = Tiers((), frozenset(), 0, Store())
        self._sharded = sharded
        self._chunk = chunk

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if not self._moves(kind, chunk.use):
            return super().zeros(kind, chunk, dtype)
        flat = torch.empty(chunk.stop - chunk.start, dtype=dtype, device=self.device)
        self.chunks.append(self._chunk(kind, chunk.use, flat, self.listeners))
        self.chunks[-1].give_back()
        return flat

    def _moves(self, kind: str, use: BufferUsage) -> bool:
        """Return whether chunks of a kind and a use are gathered and released."""
        return not use.stays and kind.startswith(self._sharded)

    def viewing(self, chunk: Tensor) -> AbstractContextManager[object]:
        return self._allocating(chunk)

    def writing(self, *views: Tensor) -> AbstractContextManager[object]:
        return self._allocating(*views)

    def _allocating(self, *views: Tensor) -> AbstractContextManager[object]:
        """Return a context that allocates these views' chunks, and then loses their content."""
        if not self.chunks:
            return nullcontext()
        return taken(chunk for chunk in self.chunks if any(map(chunk.holds, views)))


def room(chunks: Iterable[tuple[BufferUsage, int]], consecutive: int) -> int:
    """Return an upper bound of the bytes of chunks that so many consecutive segments need, without
    the chunks that stay. chunks: use and bytes.
    """
    moving = [(set(use.parts), num_bytes) for use, num_bytes in chunks if not use.stays]
    last = max((max(parts) for parts, _ in moving), default=-1)
    return max(
        (
            sum(
                num_bytes
                for parts, num_bytes in moving
                if not parts.isdisjoint(range(part, part + consecutive))
            )
            for part in range(last + 1)
        ),
        default=0,
    )


class Shares:
    """This rank's shards of a flat buffer.

    Args:
        partition: The shards that this rank updates.
        whole: The unsharded buffer.
        kind: Kind of state of the unsharded buffer.
        of_all: Also have shards of the chunks that stay.
        buffer: Memory of the shards; None: allocate it.

    Attributes:
        buffer: Memory of the shards, in chunks by use.
        views: By name, each parameter that this rank owns, or its shard of it as a vector.
    """

    def __init__(
        self,
        partition: Partition,
        whole: Buffer,
        memory: Memory,
        kind: str = "",
        *,
        of_all: bool = False,
        buffer: Buffer | None = None,
    ):
        self.partition = partition
        self.whole = whole
        self.memory = memory
        self._of_all = of_all
        layout = partition.layout_of_owned(whole.dtype, wanted=self.has)
        self.buffer = buffer or Buffer(
            layout,
            whole.dtype,
            memory,
            () if of_all else cut(layout, partition.uses),
            f"{SHARES}{kind}",
        )
        self.views = self.buffer.views()
        self._owned = {o.name: o for o in partition.owned}
        self._names: dict[BufferUsage, list[str]] = {}
        for name in partition.layout.names:
            self._names.setdefault(partition.uses(name), []).append(name)
        # detached: a chunk that comes back with its old content is no change for autograd
        self._unwatched = whole.detached()

    @staticmethod
    def of(
        partition: Partition,
        buffers: Sequence[Buffer],
        memory: Memory,
        kind: str,
        *,
        split: bool,
        of_all: bool = False,
    ) -> list[Shares]:
        """Create the shards of all buffers of a kind; none unless `split`.

        of_all: All shards use one memory, because only one buffer's are needed at a time.
        """
        found: list[Shares] = []
        for i, whole in enumerate(buffers if split else ()):
            found.append(
                Shares(
                    partition,
                    whole,
                    memory,
                    f"{kind}/{i}",
                    of_all=of_all,
                    buffer=found[0].buffer if of_all and found else None,
                )
            )
        return found

    def has(self, use: BufferUsage) -> bool:
        """Return whether there are shards of a use."""
        return self._of_all or not use.stays

    def home(self, use: BufferUsage, start: int) -> tuple[FlatLayout, int]:
        """Return the layout of a use, and the element at which its memory starts; of unsharded
        chunks as Buffer.home.
        """
        if not self.has(use):
            return self.whole.home(use, start)
        if self._of_all:
            return self.buffer.layout, 0
        starts = (chunk.start for chunk in self.buffer.chunks if chunk.use == use)
        return self.buffer.layout, next(starts)

    def owned(self) -> list[Tensor]:
        """Return the parameters that this rank updates, in the order of the partition: shards, and
        views of chunks that stay.
        """
        kept = self.partition.owned_views(self.whole, lambda use: not self.has(use))
        return [
            self.views[o.name] if o.name in self.views else next(kept) for o in self.partition.owned
        ]

    @torch.no_grad()
    def take(self, names: Iterable[str], *, add: bool = False) -> None:
        """Copy (or add) some parameters from the unsharded chunks to their shards."""
        for share, part in self._pairs(names):
            share.add_(part) if add else share.copy_(part)

    @torch.no_grad()
    def put(self, name: str, whole: Tensor) -> None:
        """Copy this rank's range of an unsharded tensor to the parameter's shard, if it has one."""
        if name in self.views:
            start, stop = self._owned[name].part or (0, whole.numel())
            self.views[name].view(-1).copy_(whole.view(-1)[start:stop])

    @torch.no_grad()
    def clear(self, names: Iterable[str]) -> None:
        """Zero the shards of some parameters."""
        for name in self.views.keys() & names:
            self.views[name].zero_()

    @torch.no_grad()
    def gather(self, use: BufferUsage) -> Works:
        """Start to gather an allocated chunk. Collectives: an all-gather for each bucket."""
        for share, part in self._pairs(self.names(use)):
            part.copy_(share)
        return self.partition.gather(self._unwatched, lambda other: other == use)

    def reduce_scatter(self, use: BufferUsage) -> Works:
        """Start to reduce a chunk, for `take`. Collectives: a reduce-scatter for each bucket."""
        return self.partition.reduce_scatter(self._unwatched, lambda other: other == use)

    def names(self, use: BufferUsage) -> list[str]:
        """Return the parameters of a use."""
        return self._names[use]

    def _pairs(self, names: Iterable[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each of these parameters of which this rank has a shard, the shard and the
        same range of the unsharded chunk.
        """
        for name in names:
            if name in self.views:
                owned = self._owned[name]
                yield self.views[name].view(-1), self._unwatched[owned.start : owned.stop]
