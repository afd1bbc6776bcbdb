"""ZeRO-2 and 3: a rank keeps its own share of each chunk, and has the whole chunk only while it
needs it.

    whole    [ a a a a ]   .   .   [ b b b b ]     chunks of a flat buffer, here for as long as a part computes
    share    [ a | b | c | d ]                     this rank's own part of each, always here

Weights: a whole chunk is gathered from the shares of all replicas, and dropped. Gradients: a
backward adds to a whole chunk, which is summed over the replicas into their shares, and dropped.
Uses that stay are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, Chunk, Memory, Use, cut
from hybridpar.state.residency.region import TensorRegion, taken

SHARES = "shares/"
"""Prefix of a share's kind: the kind of the whole follows."""
FROZEN = "frozen/0"
"""Kind of state of the frozen weights, of which there is one version."""


class WholeChunk(TensorRegion):
    """A chunk that comes and goes. kind: of state, with its number: 'weights/0', 'gradients/1'.
    index: that number. listeners: called with it when it has come or gone."""

    def __init__(
        self,
        kind: str,
        use: Use,
        tensor: Tensor,
        listeners: Sequence[Callable[[WholeChunk], object]],
    ):
        super().__init__(tensor)
        self.kind, self.use, self.index = kind, use, int(kind.rpartition("/")[2])
        self._listeners = listeners

    def take(self) -> None:
        """Takes memory, if it has none; its content is anything."""
        if not self.is_here:
            super().take()
            self._tell()

    def give_back(self) -> None:
        """Gives the memory back, if there is any."""
        if self.is_here:
            super().give_back()
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self)


class WholeChunks(Memory):
    """Memory of a device, where the chunks that replicas share come and go: `chunks`, in the order
    of their making. At the start none is here. `listeners`: as a chunk's."""

    chunk = WholeChunk

    def __init__(self, device: torch.device, policy: StatePolicy):
        super().__init__(device)
        self.chunks: list[WholeChunk] = []
        self.listeners: list[Callable[[WholeChunk], object]] = []
        self._kinds = ("gradients/",) * policy.moves_gradients + (
            "weights/",
            FROZEN,
        ) * policy.splits_weights

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if not self.has(kind, chunk.use):
            return super().zeros(kind, chunk, dtype)
        flat = torch.empty(chunk.stop - chunk.start, dtype=dtype, device=self.device)
        self.chunks.append(self.chunk(kind, chunk.use, flat, self.listeners))
        self.chunks[-1].give_back()
        return flat

    def has(self, kind: str, use: Use) -> bool:
        """Whether chunks of a kind and a use come and go."""
        return not use.stays and kind.startswith(self._kinds)

    def room_of_weights(self) -> int:
        """Most bytes of weights that are whole at once, trained and frozen: of two consecutive
        parts."""
        return self._room(("weights/0", FROZEN), 2)

    def room_of_gradients(self, consecutive: int) -> int:
        """Bytes of the gradients of so many consecutive parts, at most."""
        return self._room(("gradients/0",), consecutive)

    def _room(self, kinds: Sequence[str], consecutive: int) -> int:
        return room(
            ((chunk.use, chunk.num_bytes) for chunk in self.chunks if chunk.kind in kinds),
            consecutive,
        )

    @property
    def most_bytes(self) -> int:
        """Most bytes that are whole at once: weights of two parts, gradients of one and of the one
        being summed."""
        return self.room_of_weights() + self.room_of_gradients(2)

    def _storage(self, view: Tensor) -> object:
        return view.untyped_storage()._cdata

    def viewing(self, chunk: Tensor) -> AbstractContextManager[None]:
        return self.writing(chunk)

    def writing(self, *views: Tensor) -> AbstractContextManager[None]:
        """While in it, the chunks of these views are here. Their content is lost afterwards:
        `Shares` keep it."""
        return taken(chunk for chunk in map(self.of, views) if chunk is not None)

    def of(self, view: Tensor) -> WholeChunk | None:
        """The chunk that a tensor is a view of, if any."""
        storage = self._storage(view)
        return next(
            (chunk for chunk in self.chunks if self._storage(chunk.tensor) == storage), None
        )


def room(chunks: Iterable[tuple[Use, int]], consecutive: int) -> int:
    """Most bytes of chunks that so many consecutive parts need, without those that stay. chunks:
    use and bytes."""
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
    """This rank's shares of the chunks of `whole` that do not stay, or `of_all`.

    buffer: their memory, in chunks by use. kind: of state of the whole ones. views: by name, each
    parameter that it owns, or its part of it as a vector.
    """

    def __init__(
        self,
        partition: Partition,
        whole: Buffer,
        dtype: torch.dtype,
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
        layout = partition.layout_of_owned(dtype, wanted=self.has)
        self.buffer = buffer or Buffer(
            layout, dtype, memory, () if of_all else cut(layout, partition.uses), f"{SHARES}{kind}"
        )
        self.views = self.buffer.views()
        self._owned = {o.name: o for o in partition.owned}
        self._names: dict[Use, list[str]] = {}
        for name in partition.layout.names:
            self._names.setdefault(partition.uses(name), []).append(name)
        # autograd need not know that a chunk comes back with what it had
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
        """Shares of all buffers of a kind; none if replicas do not split them. of_all: in one
        memory, as only one buffer's are needed at a time."""
        found: list[Shares] = []
        for i, whole in enumerate(buffers if split else ()):
            found.append(
                Shares(
                    partition,
                    whole,
                    whole.tensors[0].dtype,
                    memory,
                    f"{kind}/{i}",
                    of_all=of_all,
                    buffer=found[0].buffer if of_all and found else None,
                )
            )
        return found

    def has(self, use: Use) -> bool:
        """Whether there are shares of a use."""
        return self._of_all or not use.stays

    def base(self, use: Use) -> int:
        """The element of the buffer at which the memory of a use begins."""
        return (
            0
            if self._of_all
            else next(chunk.start for chunk in self.buffer.chunks if chunk.use == use)
        )

    def owned(self) -> list[Tensor]:
        """This rank's own parts, in the order of the partition: its shares, and views of what
        stays."""
        kept = self.partition.owned_views(self.whole, lambda use: not self.has(use))
        return [
            self.views[o.name] if o.name in self.views else next(kept) for o in self.partition.owned
        ]

    @torch.no_grad()
    def take(self, names: Iterable[str], *, add: bool = False) -> None:
        """Copies (or adds) some parameters from the whole chunks to their shares."""
        for share, part in self._pairs(names):
            share.add_(part) if add else share.copy_(part)

    @torch.no_grad()
    def put(self, name: str, whole: Tensor) -> None:
        """Copies the same part of a whole tensor to a parameter's share, if there is one."""
        if name in self.views:
            start, stop = self._owned[name].part or (0, whole.numel())
            self.views[name].view(-1).copy_(whole.view(-1)[start:stop])

    @torch.no_grad()
    def clear(self, names: Iterable[str]) -> None:
        """Makes the shares of some parameters zero."""
        for name in self.views.keys() & names:
            self.views[name].zero_()

    @torch.no_grad()
    def gather(self, use: Use) -> Works:
        """Starts to fill a whole chunk, which has memory. Collectives: an all-gather for each of
        its buckets."""
        for share, part in self._pairs(self.names(use)):
            part.copy_(share)
        return self.partition.gather(self._unwatched, lambda other: other == use)

    def reduce_scatter(self, use: Use) -> Works:
        """Starts to sum a whole chunk over replicas, for `take`. Collectives: a reduce-scatter for
        each bucket."""
        return self.partition.reduce_scatter(self._unwatched, lambda other: other == use)

    def names(self, use: Use) -> list[str]:
        """The parameters of a use."""
        return self._names[use]

    def _pairs(self, names: Iterable[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of these in which this rank has a share: the share, and the same part of the
        whole chunk."""
        for name in names:
            if name in self.views:
                owned = self._owned[name]
                yield self.views[name].view(-1), self._unwatched[owned.start : owned.stop]
