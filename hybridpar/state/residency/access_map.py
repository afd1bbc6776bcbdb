"""Map each action of a rank to the items of its state that it accesses. A plan is thus an access
string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from hybridpar.errors import config_error
from hybridpar.schedules.action import PER_ITEM, Action, Kind
from hybridpar.schedules.passes.residency import Access, Budget, Mode, Residency, Room
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.state import RankState
from hybridpar.state.compression.feedback import FEEDBACK
from hybridpar.state.residency.segments import Segments
from hybridpar.state.residency.shares import FROZEN
from hybridpar.state.residency.tiered import ItemMemory, StateItem

_Accesses = tuple[Access, ...]


class AccessMap:
    """The items that an action accesses, except those that are always resident.

        weights of a segment     read by F B I
        gradients of a segment   changed by B I W, written by the first of a batch; changed by NORM,
                                 if they are reduced there
        unsent gradients         changed by the last B or W of a batch, which sends them (compression)
        frozen weights           read by F B I; nothing writes them
        an UPDATE                all items of its group: reads gradients, changes moments and master,
                                 writes the new weights
        a HOST                   likewise, if the host updates; its UPDATE then needs the new weights

    If replicas shard state, items are shards, and unsharded chunks have the numbers before the
    items, so that they have equal numbers on all replicas (shared_access.py):

        FETCH of weights         reads the shard
        RELEASE of gradients     adds to the shard; the first B or I writes it

    Args:
        memory: The memory that holds the items.
        state: The rank's state.
        parts: The segments of the rank's stages.
        shape: The shape of the pipeline.
        norms: Squared norms of some segments are computed by NORM, not at their backward.

    Attributes:
        first: Number of the first item.
        num_bytes: Bytes of each item, by number.
        padding: Bytes of all items that hold nothing.
    """

    def __init__(
        self,
        memory: ItemMemory,
        state: RankState,
        segments: Segments,
        shape: PipelineShape,
        *,
        norms: bool,
    ):
        self.state = state
        self.whole_bytes = memory.whole_bytes
        self.padding = memory.padding
        chunks = [] if memory.whole is None else memory.whole.chunks
        self.first = len(chunks)
        items = dict(enumerate(memory.items, self.first))
        self.num_bytes = [0] * self.first + [item.num_bytes for item in memory.items]
        self.shares = {
            number: i
            for number, chunk in enumerate(chunks)
            for i, item in items.items()
            if (item.kind, item.use) == (chunk.kind, chunk.use)
        }
        """Numbers of the shards, by the numbers of their unsharded chunks."""
        self._parts = segments
        self._m = shape.num_microbatches
        self._norms = norms
        self.pinned = frozenset(i for i, item in items.items() if item.use.stays)
        self.moving = {i: item for i, item in items.items() if i not in self.pinned}
        """Items that may be offloaded."""
        self.void = frozenset(
            i for i, item in self.moving.items() if item.kind.startswith("gradients/")
        )
        """Items whose content is void after a batch."""
        self._compute, self._update = cache(self._compute_accesses), cache(self._update_accesses)

    @property
    def most_bytes(self) -> int:
        """Bytes of memory with which nothing has to move."""
        return sum(self.num_bytes) + self.whole_bytes

    def least_budget(self) -> int:
        """Return the smallest number of bytes that the state needs in memory."""
        state = self.state
        versions = range(state.weights.num_versions)
        buffers = range(len(state.gradients.buffers))
        one = [
            self._compute(Kind.B, part, slot, buffer, False, True)
            for part in range(self._parts.last + 1)
            for slot in versions
            for buffer in buffers
        ]
        one += [
            self._norm_accesses(buffer, part)
            for part in range(state.num_groups)
            for buffer in buffers
        ]
        one += [
            self._shared(kind, number)
            for number in self.shares
            for kind in (Kind.FETCH, Kind.RELEASE)
        ]
        one += [
            self._update(kind, group, slot, state.weights.slot(slot + 1), buffer)
            for kind in (Kind.HOST, Kind.UPDATE)
            for group in range(state.num_groups)
            for slot in versions
            for buffer in buffers
        ]
        return (
            self.whole_bytes
            + sum(self.num_bytes[i] for i in self.pinned)
            + max(sum(self.num_bytes[access.item] for access in accesses) for accesses in one)
        )

    def require(self, room: Room) -> None:
        """Check the size of the fast tier. What a limit must be, a plan alone says (least_room).

        Raises:
            ConfigError: A budget is too small for any plan.
        """
        if isinstance(room, Budget) and (least := self.least_budget()) > room.most:
            rule = f"too small: one segment of this rank needs {least} bytes at a time"
            raise config_error(room.field, room.most, rule, str(least))

    def residency(self, room: Room, resident: Mapping[int, bool] | None = None) -> Residency:
        """Return what the tiers keep and move.

        If not all items fit, space for two of the largest is kept free: one arrives while another
        leaves.

        Args:
            room: The size of the fast tier. A budget also has to hold the unsharded chunks.
            resident: As in Residency; None: all items are in the slow tier.
        """
        num_bytes = self.num_bytes
        if isinstance(room, Budget):
            room = Budget(room.most - self.whole_bytes)
        spare = 2 * max((num_bytes[i] for i in self.moving), default=0)
        return Residency(
            self,
            num_bytes,
            room,
            self.pinned,
            resident or {},
            self.void,
            spare,
            range(self.first, len(num_bytes)),
        )

    def __call__(self, action: Action) -> _Accesses:
        kind = action.kind
        number = action.microbatch
        gradients = self.state.gradients
        weights = self.state.weights
        if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            batch, index = divmod(number, self._m)
            return self._compute(
                kind,
                self._parts.number(action),
                weights.slot(action.version),
                gradients.buffer_index(batch),
                index == 0,
                index == self._m - 1,
            )
        if kind is Kind.NORM:
            return self._norm_accesses(gradients.buffer_index(number), action.part)
        if kind in (Kind.HOST, Kind.UPDATE):
            versions = weights.slot(number), weights.slot(number + 1)
            return self._update(kind, action.part, *versions, gradients.buffer_index(number))
        return self._shared(kind, number) if kind in PER_ITEM else ()

    def of(self, kind: str) -> Iterator[tuple[int, StateItem]]:
        """Yield the items of a kind of state that may be offloaded."""
        return ((i, item) for i, item in self.moving.items() if item.kind == kind)

    def _compute_accesses(
        self, kind: Kind, part: int, slot: int, buffer: int, begins: bool, ends: bool
    ) -> _Accesses:
        accesses = [
            Access(i, Mode.READ)
            for of in (f"weights/{slot}", FROZEN)
            for i, item in self.of(of)
            if kind is not Kind.W and part in item.use.parts
        ]
        for i, item in self.of(f"gradients/{buffer}") if kind is not Kind.F else ():
            if part in item.use.parts:
                first = begins and kind is not Kind.W and part == item.use.parts[-1]
                if first or not self.state.shares:
                    accesses.append(Access(i, Mode.WRITE if first else Mode.UPDATE))
        if ends and kind in (Kind.B, Kind.W):
            accesses += [
                Access(i, Mode.UPDATE)
                for i, item in self.moving.items()
                if item.kind.startswith(FEEDBACK) and item.use.parts[0] == part
            ]
        return tuple(accesses)

    def _shared(self, kind: Kind, number: int) -> _Accesses:
        """Return the shard that a FETCH of weights reads, or that a RELEASE of gradients adds
        to.
        """
        if (share := self.shares.get(number)) is None or (share in self.void) is not (
            kind is Kind.RELEASE
        ):
            return ()
        return (Access(share, Mode.UPDATE if share in self.void else Mode.READ),)

    def _norm_accesses(self, buffer: int, part: int) -> _Accesses:
        """Return the gradients whose squares were not computed at their backward."""
        return tuple(
            Access(i, Mode.UPDATE)
            for i, item in self.of(f"gradients/{buffer}")
            if not self.state.is_alone(own := item.use.parts[0])
            and (own == part or not self._norms)
        )

    def _update_accesses(
        self, kind: Kind, group: int, old: int, new: int, buffer: int
    ) -> _Accesses:
        if kind is Kind.UPDATE and self.state.is_hosted(group):
            mode = Mode.UPDATE if self.state.partition.is_sharded else Mode.READ
            made = (i for i, item in self.of(f"weights/{new}") if item.use.group == group)
            return tuple(Access(i, mode) for i in made)
        modes = {f"gradients/{buffer}": Mode.READ, "master": Mode.UPDATE}
        if self.state.weights.master is None:
            modes[f"weights/{old}"] = Mode.READ
        modes[f"weights/{new}"] = Mode.UPDATE if modes.get(f"weights/{new}") else Mode.WRITE
        return tuple(
            Access(i, modes.get(item.kind, Mode.UPDATE))
            for i, item in self.moving.items()
            if item.use.group == group
            and (item.kind in modes or item.kind.startswith("optimizer/"))
        )
