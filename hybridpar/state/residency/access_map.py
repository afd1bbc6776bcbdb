"""Map each action of a rank to the items of its state that it accesses. A plan is thus an access
string.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

from hybridpar.errors import config_error
from hybridpar.schedules.action import PER_ITEM, Action, Kind
from hybridpar.schedules.passes.residency import Access, Away, Mode, Pool
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.state import RankState
from hybridpar.state.compression.feedback import FEEDBACK
from hybridpar.state.residency.chunks import StateItem
from hybridpar.state.residency.shares import FROZEN, ShardedMemory, WholeChunk

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

    If replicas shard state, unsharded chunks are items too. They have the first numbers, so that
    they have equal numbers on all replicas. The other items are then shards:

        FETCH of weights         gathers a chunk from the shards, so it reads this rank's
        weights of a segment     read by F B I; an UPDATE makes new shards, which outdates the chunk
        gradients of a segment   added to by B I W; after REDUCE all are in the shards
        RELEASE of gradients     adds to the shard; the first B or I writes it

    Attributes:
        chunks: The unsharded chunks.
        first: Number of the first item that is no unsharded chunk.
        num_bytes: Bytes of each item, by number.
        unsharded_bytes: Upper bound of the bytes of chunks that are unsharded at once.
        shards: Numbers of the shards, by the numbers of their unsharded chunks.
        reduced: Numbers of the unsharded chunks that are gradients.
    """

    def __init__(self, memory: ShardedMemory, state: RankState, shape: PipelineShape):
        self.memory = memory
        self.state = state
        self.chunks = memory.chunks
        self.first = len(self.chunks)
        items = dict(enumerate(memory.items, self.first))
        self._all: list[WholeChunk | StateItem] = [*self.chunks, *memory.items]
        self.num_bytes = [item.num_bytes for item in self._all]
        self.shards = {
            number: i
            for number, chunk in enumerate(self.chunks)
            for i, item in items.items()
            if (item.kind, item.use) == (chunk.kind, chunk.use)
        }
        self.reduced = _gradients(dict(enumerate(self.chunks)))
        self._parts = state.segments
        self.num_microbatches = shape.num_microbatches
        self.pinned = frozenset(i for i, item in items.items() if item.use.stays)
        self.moving = {i: item for i, item in items.items() if i not in self.pinned}
        """Items that may be offloaded."""
        self.void = _gradients(self.moving)
        """Items whose content is void after a batch."""
        # numbers of chunks and moving items
        self._of_kind: defaultdict[str, list[int]] = defaultdict(list)
        for i, item in enumerate(self._all):
            if i not in self.pinned:
                self._of_kind[item.kind].append(i)
        self.unsharded_bytes = sum(state.unsharded_bytes())
        self._compute, self._update = cache(self._compute_accesses), cache(self._update_accesses)

    @property
    def most_bytes(self) -> int:
        """Bytes of memory with which nothing has to move."""
        return sum(self.num_bytes[self.first :]) + self.unsharded_bytes

    def least_budget(self) -> int:
        """Return the smallest number of bytes that the state needs in memory."""
        weights = self.state.weights
        buffers = range(len(self.state.gradients.buffers))
        one = [
            self._of_shard(kind, number)
            for number in self.shards
            for kind in (Kind.FETCH, Kind.RELEASE)
        ]
        for old, buffer in product(range(weights.num_versions), buffers):
            new = weights.slot(old + 1)
            for part in range(self._parts.last + 1):
                one.append(self._compute(Kind.B, part, old, buffer, False, True))
            for group in range(self.state.num_groups):
                one.append(self._norm_accesses(buffer, group))
                one.append(self._update(Kind.HOST, group, old, new, buffer))
                one.append(self._update(Kind.UPDATE, group, old, new, buffer))
        most = max(
            sum(self.num_bytes[item] for item, _ in accesses if item >= self.first)
            for accesses in one
        )
        return self.unsharded_bytes + sum(self.num_bytes[i] for i in self.pinned) + most

    def require(self, room: Room) -> None:
        """Check the size of the fast tier. Raises: ConfigError if it is too small for any plan."""
        if not room.can_hold(least := self.least_budget()):
            rule = f"too small: one segment of this rank needs {least} bytes at a time"
            raise config_error(room.field, room.most, rule, str(least))

    def pools(self, room: Room, resident: Mapping[int, bool] | None = None) -> list[Pool]:
        """Return all items that move, in the order in which their moves are added to a plan.
        Arguments as for `tiers`.
        """
        sharded = self.sharded_pools()
        tiers = self.tiers(room, resident)
        return [*sharded, tiers] if tiers.items else sharded

    def sharded_pools(self) -> list[Pool]:
        """Return the items that replicas shard.

        Gradients have space for one segment besides the ones being reduced, weights for two.
        """
        weights, gradients = self.state.unsharded_bytes(gradients=1)
        others = frozenset(range(self.first)) - self.reduced
        return [
            Pool(self, self.num_bytes, Room(most), own=own, away=away, shards=self.shards)
            for most, own, away in (
                (gradients, self.reduced, Away.REDUCED),
                (weights, others, Away.GATHERED),
            )
            if own
        ]

    def tiers(self, room: Room, resident: Mapping[int, bool] | None = None) -> Pool:
        """Return what moves between tiers.

        If not all items fit, space for two of the largest is kept free: one arrives while another
        leaves.

        Args:
            room: The size of the fast tier and of the space of unsharded chunks.
            resident: As in Pool; None: all items are in the slow tier.
        """
        num_bytes = self.num_bytes
        return Pool(
            self,
            num_bytes,
            room.beside(self.unsharded_bytes),
            self.pinned,
            resident or {},
            self.void,
            spare=2 * max((num_bytes[i] for i in self.moving), default=0),
            own=range(self.first, len(num_bytes)),
        )

    def __call__(self, action: Action) -> _Accesses:
        """Return the accesses of an action."""
        kind = action.kind
        number = action.microbatch
        gradients = self.state.gradients
        weights = self.state.weights
        if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            batch, index = divmod(number, self.num_microbatches)
            return self._compute(
                kind,
                self._parts.number(action),
                weights.slot(action.version),
                gradients.buffer_index(batch),
                index == 0,
                index == self.num_microbatches - 1,
            )
        if kind is Kind.REDUCE:
            buffer = self._of_kind[f"gradients/{gradients.buffer_index(number)}"]
            return tuple(Access(i, Mode.RENEW) for i in buffer if i < self.first)
        if kind is Kind.NORM:
            return self._norm_accesses(gradients.buffer_index(number), action.part)
        if kind in (Kind.HOST, Kind.UPDATE):
            versions = weights.slot(number), weights.slot(number + 1)
            return self._update(kind, action.part, *versions, gradients.buffer_index(number))
        return self._of_shard(kind, number) if kind in PER_ITEM else ()

    def of(self, kind: str) -> Iterator[int]:
        """Yield the items of a kind of state that may be offloaded."""
        return (i for i in self._of_kind[kind] if i >= self.first)

    def _compute_accesses(
        self, kind: Kind, part: int, slot: int, buffer: int, begins: bool, ends: bool
    ) -> _Accesses:
        accesses = []
        if kind is not Kind.W:
            accesses += [
                Access(i, Mode.READ)
                for i in (*self._of_kind[f"weights/{slot}"], *self._of_kind[FROZEN])
                if part in self._all[i].use.parts
            ]
        if kind is Kind.F:
            return tuple(accesses)
        for i in self._of_kind[f"gradients/{buffer}"]:
            parts = self._all[i].use.parts
            if part in parts:
                first = begins and kind is not Kind.W and part == parts[-1]
                if i < self.first:
                    accesses.append(Access(i, Mode.ADD))
                elif first or not self.state.shares:
                    accesses.append(Access(i, Mode.WRITE if first else Mode.UPDATE))
        if ends and kind in (Kind.B, Kind.W):
            accesses += [
                Access(i, Mode.UPDATE)
                for i, item in self.moving.items()
                if item.kind.startswith(FEEDBACK) and item.use.parts[0] == part
            ]
        return tuple(accesses)

    def _of_shard(self, kind: Kind, number: int) -> _Accesses:
        """Return the shard that a FETCH of weights reads, or a RELEASE of gradients adds to."""
        is_reduced = number in self.reduced
        if number not in self.shards or is_reduced is not (kind is Kind.RELEASE):
            return ()
        return (Access(self.shards[number], Mode.UPDATE if is_reduced else Mode.READ),)

    def _norm_accesses(self, buffer: int, part: int) -> _Accesses:
        """Return the gradients whose squares were not computed at their backward."""
        return tuple(
            Access(i, Mode.UPDATE)
            for i in self.of(f"gradients/{buffer}")
            if not self.state.is_alone(own := self._all[i].use.parts[0])
            and (own == part or not self.state.division.norms)
        )

    def _update_accesses(
        self, kind: Kind, group: int, old: int, new: int, buffer: int
    ) -> _Accesses:
        outdated = tuple(
            Access(i, Mode.RENEW)
            for i in self._of_kind[f"weights/{new}"]
            if i < self.first and kind is Kind.UPDATE and self._all[i].use.group == group
        )
        if kind is Kind.UPDATE and self.state.is_hosted(group):
            mode = Mode.UPDATE if self.state.partition.is_sharded else Mode.READ
            made = (i for i in self.of(f"weights/{new}") if self._all[i].use.group == group)
            return (*outdated, *(Access(i, mode) for i in made))
        modes = {f"gradients/{buffer}": Mode.READ, "master": Mode.UPDATE}
        if self.state.weights.master is None:
            modes[f"weights/{old}"] = Mode.READ
        # a host that updates a part of the group has written that part before
        keeps_part = kind is Kind.UPDATE and self.state.host.num_groups > 0
        keeps = keeps_part or f"weights/{new}" in modes
        modes[f"weights/{new}"] = Mode.UPDATE if keeps else Mode.WRITE
        updated = (
            Access(i, modes.get(item.kind, Mode.UPDATE))
            for i, item in self.moving.items()
            if item.use.group == group
            and (item.kind in modes or item.kind.startswith("optimizer/"))
        )
        return (*outdated, *updated)


def _gradients(items: Mapping[int, StateItem | WholeChunk]) -> frozenset[int]:
    return frozenset(i for i, item in items.items() if item.kind.startswith("gradients/"))
