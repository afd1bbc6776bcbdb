"""Move a rank's memory along its plan: state between tiers (memory.limit, memory.budget), state that
replicas shard (ZeRO-2 and ZeRO-3), and activations.

Example: three segments, with room for the weights of two blocks. FETCH all-gathers weights. RELEASE
frees weights, or reduce-scatters gradients over dp.

    FETCH0 FETCH1 F0 RELEASE0 FETCH2 F0.1 F0.2   B0.2 RELEASE5 RELEASE2 FETCH0 B0.1 RELEASE4 B0 RELEASE3   REDUCE0 ..

Replicas of a stage have equal moves of unsharded chunks, because their chunks have equal sizes. So
all of them call the collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hybridpar.comm import Waitable, Works
from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, Kind
from hybridpar.schedules.passes.fast_tier import FastTiers, Reductions
from hybridpar.schedules.passes.residency import Access, Mode, add_residency
from hybridpar.schedules.passes.rooms import Rooms
from hybridpar.schedules.proof.check import PlanError
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.shares import FROZEN


class StateMoves:
    """Moves the items of a rank's state, as its plan says.

    A backward that creates unsharded gradients first completes the reduce-scatters that were
    started before the previous such backward, which bounds the memory of gradients in flight. A
    shard stays until the reduce-scatters into it are complete.

    Args:
        rooms: The size of the fast tier.

    Raises:
        ConfigError: Memory is too small for any plan.
    """

    def __init__(self, accesses: AccessMap, rooms: Rooms, activations: ActivationOffloader):
        self.accesses = accesses
        self.activations = activations
        self._state = accesses.state
        self._memory = accesses.memory
        self._tiers = accesses.memory.tiers
        self._chunks = accesses.chunks
        self._first = accesses.first
        self._rooms = rooms
        copies = 2 * max(accesses.num_bytes[self._first :], default=0)
        self._room_at_rest = rooms.training.at_rest(
            self._tiers.budget, copies, accesses.least_budget()
        )
        self._room = self._room_at_rest
        # all-gathers in progress, by chunk
        self._arriving: dict[int, Works] = {}
        self._reductions: Reductions[Works] = Reductions(accesses.shards)
        # by chunk: the batch whose gradients it accumulates, and the last batch that was added to
        # its shard
        self._batches: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        accesses.require(rooms.training)
        if accesses.moving:
            rooms.training.follow()  # traces the stages now, while gradients are enabled
        self.rest()

    @property
    def peak(self) -> int:
        """Largest number of bytes of state in the fast tier so far; 0 if none of it moves."""
        return self._tiers.traffic.peak

    def plan(self, actions: Iterator[Action], *, evaluates: bool = False) -> Iterator[Action]:
        """Add FETCH, RELEASE and DROP to the actions of a drained rank, on which no chunk is
        gathered.

        Raises: ConfigError if memory is too small.
        """
        self._drain()
        self._tiers.settle()  # complete moves that a batch left when it was cut off
        room = self._rooms.evaluation if evaluates else self._rooms.training
        resident = {
            i: self._tiers.items[i - self._first].changed
            for i in self.accesses.moving
            if self._is_here(i)
        }
        pools = self.accesses.pools(room, resident)
        if not pools:
            yield from actions
            return
        fast = FastTiers(pools)
        for action in add_residency(actions, pools):
            if fault := fast.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            if fast.store is not None:
                self._room = fast.store.room
            yield action

    def rest(self) -> None:
        """Note that no plan runs: all room of the tiers is for state, except the room of copies."""
        self._room = self._room_at_rest
        self._tiers.shrink(self._room)

    # -- called by the executor

    def move(self, action: Action) -> Callable[[], bool] | None:
        """Start a move; return a function that tells whether it is complete, or None for moves of
        state, whose items tell that.

        Collectives: for an unsharded chunk an all-gather, or a reduce-scatter, for each bucket.
        """
        if ACTION_SPECS[action.kind].is_offload:
            return self.activations.move(action)
        self._move_state(action)
        return None

    def _move_state(self, action: Action) -> None:
        """Start a FETCH, RELEASE or DROP. Gradients of a batch that a stop request cut off were never
        created, so nothing is released.
        """
        number = action.microbatch
        if number >= self._first:
            if action.kind is Kind.FETCH and number in self._reductions.leaving:
                self._complete(self._reductions.num_into_leaving())
            if not self._reductions.delays(action):
                self._move_item(action)
        elif action.kind is Kind.FETCH:
            chunk = self._chunks[number]
            chunk.take()
            weights = self._state.weights
            shares = weights.frozen.shares if chunk.kind == FROZEN else weights.shares
            self._arriving[number] = shares[chunk.index].gather(chunk.use)
        elif number not in self.accesses.reduced:
            self._await(number)
            self._chunks[number].give_back()
        elif self._accumulates(number):
            self._reduce(number)

    def are_here(self, action: Action) -> bool:
        """Return whether `access` would return without waiting."""
        if not self.activations.are_here(action):
            return False
        chunks, items = self._split(action)
        arriving = (self._arriving.get(item, Works()) for item, _ in chunks)
        due = self._reductions.num_due(action, self._created(chunks))
        return all(works.is_done() for works in (*arriving, *self._reductions.first(due))) and (
            all(self._is_here(item) for item, _ in items)
        )

    def access(self, action: Action) -> None:
        """Wait for the activations and the state that the action accesses, and for reduce-scatters
        that are due. Then create what it writes first, and mark what it changes.
        """
        self.activations.access(action)
        if not self.accesses.num_bytes:  # all state stays
            return
        chunks, items = self._split(action)
        for item, mode in chunks:
            if mode is Mode.READ:
                self._await(item)
        created = self._created(chunks)
        self._complete(self._reductions.num_due(action, created))
        is_resized = self._tiers.budget != self._room
        # room may depend on a shard that waits to leave
        if is_resized or not all(self._is_here(item) for item, _ in items):
            self._complete(self._reductions.num_into_leaving())
        if is_resized:
            self._tiers.resize(self._room)
        for item, mode in items:
            if mode is Mode.WRITE and self._tiers.is_absent(item - self._first):
                self._tiers.create(item - self._first)
            self._tiers.await_item(item - self._first, changing=mode is not Mode.READ)
        if created:
            self._reductions.note_backward()
        for item in created:
            chunk = self._chunks[item]
            chunk.take()
            self._batches[item] = action.microbatch // self.accesses.num_microbatches
            names = self._state.shares[chunk.index].names(chunk.use)
            self._state.gradients.renew(chunk.index, names)

    # -- called by the actions of a batch

    def hold(self, action: Action, until: Sequence[Waitable]) -> None:
        """Keep the items that an action accesses resident until these are done."""
        for item, _ in self._split(action)[1]:
            for one in until:
                self._hold(item, one)

    def hold_gradients(self, batch: int, part: int) -> None:
        """Keep the gradients of a segment resident while they are reduced. If they are compressed,
        return once they are: the unsent rest has to be resident, too.
        """
        state = self._state
        for i in self.accesses.of(f"gradients/{state.gradients.buffer_index(batch)}"):
            use = self.accesses.moving[i].use
            if use.parts[0] != part:
                continue
            reduction = state.reducer.of(use)
            if state.compression.packed:
                reduction.wait()
            else:
                self._hold(i, reduction)

    def hold_weights(self, version: int, group: int) -> None:
        """Keep the weights of an update group resident while they are gathered from replicas."""
        weights = self._state.weights
        arriving = weights.arriving_parts(version)
        if not arriving.is_done():
            for i in self.accesses.of(f"weights/{weights.slot(version)}"):
                if self.accesses.moving[i].use.group == group:
                    self._hold(i, arriving)

    # -- items of the tiers

    def _split(self, action: Action) -> tuple[list[Access], list[Access]]:
        """Return the accesses of an action to unsharded chunks, and to items of the tiers.

        A RELEASE of gradients that were never created, because a stop request cut off their batch,
        accesses nothing.
        """
        number = action.microbatch
        if (
            action.kind is Kind.RELEASE
            and number in self.accesses.reduced
            and not self._accumulates(number)
        ):
            return [], []
        accesses = self.accesses(action)
        chunks = [access for access in accesses if access.item < self._first]
        return chunks, [access for access in accesses if access.item >= self._first]

    def _is_here(self, item: int) -> bool:
        return self._tiers.is_here(item - self._first)

    def _hold(self, item: int, until: Waitable) -> None:
        self._tiers.hold(item - self._first, until)

    def _move_item(self, action: Action) -> None:
        """Start to move an item. One of a batch that was cut off may never have been created."""
        self._memory.forget()
        number = action.microbatch - self._first
        if action.kind is Kind.FETCH:
            self._tiers.fetch(number)
        elif not self._tiers.is_absent(number):
            (self._tiers.release if action.kind is Kind.RELEASE else self._tiers.drop)(number)

    # -- unsharded chunks

    def _accumulates(self, number: int) -> bool:
        """Return whether a chunk accumulates gradients and is not being reduced yet."""
        return self._chunks[number].is_here and number not in self._reductions

    def _created(self, chunks: Sequence[Access]) -> list[int]:
        """Return the gradients that an action is the first to add to since their reduction."""
        return [item for item, mode in chunks if mode is Mode.ADD and not self._accumulates(item)]

    def _reduce(self, number: int) -> None:
        """Start the reduce-scatter of a chunk's gradients, unless the chunk received none."""
        chunk = self._chunks[number]
        gradients = self._state.gradients
        shares = self._state.shares[chunk.index]
        names = shares.names(chunk.use)
        if gradients.missing(chunk.index).issuperset(names):
            chunk.give_back()
            if self._reduced.get(number) != self._batches[number]:
                shares.clear(names)
                self._reduced[number] = self._batches[number]
            return
        gradients.settle(chunk.index, names)
        self._reductions.start(number, shares.reduce_scatter(chunk.use))

    def _complete(self, count: int) -> None:
        """Wait for the oldest reduce-scatters, and add their results to the shards."""
        for _ in range(count):
            number, works, leaves = self._reductions.complete()
            works.wait()
            chunk = self._chunks[number]
            batch = self._batches[number]
            shares = self._state.shares[chunk.index]
            shares.take(shares.names(chunk.use), add=self._reduced.get(number) == batch)
            self._reduced[number] = batch
            chunk.give_back()
            if leaves is not None:
                self._move_item(leaves)

    def _await(self, number: int) -> None:
        if (works := self._arriving.pop(number, None)) is not None:
            works.wait()

    def _drain(self) -> None:
        """Complete all collectives in progress, and release all chunks."""
        for number in list(self._arriving):
            self._await(number)
        self._complete(len(self._reductions))
        for chunk in self._chunks:
            chunk.give_back()
        self._batches = {}
        self._reduced = {}
