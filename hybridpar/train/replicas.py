"""Gather and release of state that replicas shard (ZeRO-2 and ZeRO-3), along a rank's plan.

Example: three segments, with room for the weights of two blocks. FETCH all-gathers weights. RELEASE
frees weights, or reduce-scatters gradients over dp.

    FETCH0 FETCH1 F0 RELEASE0 FETCH2 F0.1 F0.2   B0.2 RELEASE5 RELEASE2 FETCH0 B0.1 RELEASE4 B0 RELEASE3   REDUCE0 ..

Replicas of a stage have equal plans, because their chunks have equal sizes. So all of them call the
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridpar.comm import Waitable, Works
from hybridpar.runtime.state_moves import StateMoves
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import Mode
from hybridpar.schedules.passes.shared_items import SharedTiers, Sums
from hybridpar.schedules.proof.check import PlanError
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.state import RankState
from hybridpar.state.residency.segments import Segments
from hybridpar.state.residency.shared_access import SharedAccesses
from hybridpar.state.residency.shares import FROZEN, WholeChunks


class SharedChunks(StateMoves):
    """Gathers and releases the sharded chunks of a rank, and moves its shards between tiers.

    A backward that creates gradients first completes the reduce-scatters that were started before
    the previous such backward, which bounds the memory of gradients in flight.

    Args:
        memory: Buffers of the unsharded chunks.
        state: This rank's state.
        parts: Segments of this rank's stages.
        shape: Shape of the pipeline.
        tiers: Moves this rank's shards, if they do not stay resident. A shard stays until the
            reduce-scatter into it is complete.
    """

    def __init__(
        self,
        memory: WholeChunks,
        state: RankState,
        segments: Segments,
        shape: PipelineShape,
        tiers: StateMoves,
    ):
        self._state = state
        self._tiers = tiers
        self._m = shape.num_microbatches
        self._accesses = SharedAccesses(memory, state, segments, shape)
        self._chunks = self._accesses.chunks
        self.shared = self.items = self._accesses.items()
        """The chunks as items of a plan."""
        self._arriving: dict[int, Works] = {}
        """All-gathers in progress, by chunk."""
        self._sums: Sums[Works] = Sums(tiers.shares)
        """Reduce-scatters of gradients in progress."""
        self._batches: dict[int, int] = {}
        """Batch whose gradients a chunk accumulates."""
        self._summed: dict[int, int] = {}
        """Last batch that was added to the shard of a chunk."""

    def plan(self, actions: Iterator[Action], *, evaluates: bool = False) -> Iterator[Action]:
        """Add FETCH and RELEASE to the actions of a drained rank, on which no chunk is gathered."""
        self._drain()
        tiers = SharedTiers(self.items)
        for action in self._tiers.plan(self.items.moved(actions), evaluates=evaluates):
            if fault := tiers.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            yield action

    def rest(self) -> None:
        """Note that no plan runs."""
        self._tiers.rest()

    @property
    def peak(self) -> int:
        """Largest number of bytes of shards that have been in the fast tier."""
        return self._tiers.peak

    def hold(self, action: Action, until: Sequence[Waitable]) -> None:
        """See StateMoves."""
        self._tiers.hold(action, until)

    def hold_gradients(self, batch: int, part: int) -> None:
        """See StateMoves."""
        self._tiers.hold_gradients(batch, part)

    def hold_weights(self, version: int, group: int) -> None:
        """See StateMoves."""
        self._tiers.hold_weights(version, group)

    # -- called by the executor

    def move(self, action: Action) -> None:
        """Start a FETCH or RELEASE.

        Gradients of a batch that a stop request cut off were never created, so nothing is released.
        Collectives: an all-gather, or a reduce-scatter, for each bucket of the chunk.
        """
        number = action.microbatch
        if (chunk := self._chunks.get(number)) is None:
            self._move_share(action)
        elif action.kind is Kind.FETCH:
            chunk.take()
            weights = self._state.weights
            holder = weights.frozen if chunk.kind == FROZEN else weights.shares[chunk.index]
            self._arriving[number] = holder.gather(chunk.use)
        elif number not in self.items.summed:
            self._await(number)
            chunk.give_back()
        elif self._adds_up(number):
            self._sum(number)

    def are_here(self, action: Action) -> bool:
        """Return whether `access` would return without waiting."""
        arriving = (
            self._arriving.get(item, Works()) for item, _ in self._accesses.of_weights(action)
        )
        sums = self._sums.first(self._sums.num_due(action, self._made(action)))
        return all(works.is_done() for works in (*arriving, *sums)) and (
            self._is_cut_off(action) or self._tiers.are_here(action)
        )

    def access(self, action: Action) -> None:
        """Wait for the weights that the action needs and for reduce-scatters that are due, then
        create the gradients that it accumulates."""
        for item, mode in self._accesses.of_weights(action):
            if mode is Mode.READ:
                self._await(item)
        made = self._made(action)
        self._complete(self._sums.num_due(action, made))
        if not self._is_cut_off(action):
            # room may depend on a shard that waits to leave
            if self._tiers.is_resized or not self._tiers.are_here(action):
                self._complete(self._sums.num_into_leaving())
            self._tiers.access(action)
        if made:
            self._sums.note_backward()
        for item in made:
            chunk = self._chunks[item]
            chunk.take()
            self._batches[item] = action.microbatch // self._m
            self._state.gradients.renew(
                chunk.index, self._state.shares[chunk.index].names(chunk.use)
            )

    def _is_cut_off(self, action: Action) -> bool:
        """Return whether the action would release gradients that were never created."""
        number = action.microbatch
        return (
            action.kind is Kind.RELEASE
            and number in self.items.summed
            and not self._adds_up(number)
        )

    def _adds_up(self, number: int) -> bool:
        """Return whether a chunk accumulates gradients and is not being reduced yet."""
        return self._chunks[number].is_here and number not in self._sums

    def _made(self, action: Action) -> list[int]:
        """Return the gradient chunks that the action is the first to add to since their reduce."""
        return [
            item
            for item, mode in self._accesses.of_gradients(action)
            if mode is Mode.ADD and not self._adds_up(item)
        ]

    def _sum(self, number: int) -> None:
        """Start the reduce-scatter of a chunk's gradients, unless the chunk received none."""
        chunk = self._chunks[number]
        gradients = self._state.gradients
        shares = self._state.shares[chunk.index]
        names = shares.names(chunk.use)
        if gradients.missing(chunk.index).issuperset(names):
            chunk.give_back()
            if self._summed.get(number) != self._batches[number]:
                shares.clear(names)
                self._summed[number] = self._batches[number]
            return
        gradients.settle(chunk.index, names)
        self._sums.start(number, shares.reduce_scatter(chunk.use))

    def _complete(self, count: int) -> None:
        """Wait for the oldest reduce-scatters, and add their results to the shards."""
        for _ in range(count):
            number, works, leaves = self._sums.complete()
            works.wait()
            chunk = self._chunks[number]
            batch = self._batches[number]
            shares = self._state.shares[chunk.index]
            shares.take(shares.names(chunk.use), add=self._summed.get(number) == batch)
            self._summed[number] = batch
            chunk.give_back()
            if leaves is not None:
                self._tiers.move(leaves)

    def _move_share(self, action: Action) -> None:
        """Start to move an item of the tiers."""
        if action.kind is Kind.FETCH and action.microbatch in self._sums.leaving:
            self._complete(self._sums.num_into_leaving())
        if not self._sums.delays(action):
            self._tiers.move(action)

    def _await(self, number: int) -> None:
        if (works := self._arriving.pop(number, None)) is not None:
            works.wait()

    def _drain(self) -> None:
        """Complete all collectives in progress, and release all chunks."""
        for number in list(self._arriving):
            self._await(number)
        self._complete(len(self._sums))
        for chunk in self._chunks.values():
            chunk.give_back()
        self._batches = {}
        self._summed = {}
