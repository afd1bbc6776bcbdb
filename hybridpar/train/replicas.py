"""Whole chunks of what replicas share (ZeRO-2 and 3), as the plan of a rank has them come and go.

    three parts, two blocks' weights at a time; FETCH gathers weights, RELEASE drops them, or sums
    gradients over dp

    FETCH0 FETCH1 F0 RELEASE0 FETCH2 F0.1 F0.2   B0.2 RELEASE5 RELEASE2 FETCH0 B0.1 RELEASE4 B0 RELEASE3   REDUCE0 ..

Replicas of a stage have equal plans, for their chunks are of equal sizes; so their collectives
meet.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.comm import Works
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import Mode
from hybridpar.schedules.passes.shared_items import SharedTiers, Sums
from hybridpar.schedules.proof.check import PlanError
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.state import RankState
from hybridpar.state.residency.segments import Parts
from hybridpar.state.residency.shared_access import SharedTouches
from hybridpar.state.residency.shares import FROZEN, WholeChunks
from hybridpar.train.tiers import RankTiers


class SharedChunks:
    """The chunks of a rank that come and go, along its plan: the executor's tiers.

    Before a backward makes gradients, the sums that were started ahead of the backward before it
    are over. `tiers`: have this rank's shares; None: they are always here. A share stays until what
    is summed into it is over.
    """

    def __init__(
        self,
        memory: WholeChunks,
        state: RankState,
        parts: Parts,
        sizes: PipelineShape,
        tiers: RankTiers | None = None,
    ):
        self._state = state
        self._tiers = tiers
        self._m = sizes.num_microbatches
        shares, first = (
            ({}, 0) if tiers is None else (tiers.touches.shares, len(tiers.touches.items))
        )
        self._touches = SharedTouches(memory, state, parts, sizes, first)
        self._chunks, self.items = self._touches.chunks, self._touches.items()
        """The chunks as a plan knows them."""
        self._arriving: dict[int, Works] = {}
        self._sums: Sums[Works] = Sums(shares)  # of gradients
        self._batches: dict[int, int] = {}  # whose gradients a chunk adds up
        self._summed: dict[int, int] = {}  # and of which its share has any

    def plan(self, actions: Iterator[Action]) -> Iterator[Action]:
        """The actions of a rank that is drained, with FETCH and RELEASE. At the start nothing is
        whole."""
        self._settle()
        tiers = SharedTiers(self.items)
        moved = self.items.moved(actions)
        for action in moved if self._tiers is None else self._tiers.plan(moved):
            if fault := tiers.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            yield action

    # -- as the executor asks for it

    def move(self, action: Action) -> None:
        """Starts a FETCH or RELEASE. What was not made, as its batch was cut off, has nothing to
        give up.

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
        """Whether `touch` would not wait."""
        arriving = (
            self._arriving.get(item, Works()) for item, _ in self._touches.of_weights(action)
        )
        sums = self._sums.first(self._sums.num_due(action, self._made(action)))
        return all(works.is_done() for works in (*arriving, *sums)) and (
            self._tiers is None or self._is_cut_off(action) or self._tiers.are_here(action)
        )

    def touch(self, action: Action) -> None:
        """Waits for weights that the action needs, for sums that must be over, and makes what it
        adds to."""
        for item, mode in self._touches.of_weights(action):
            if mode is Mode.READ:
                self._await(item)
        made = self._made(action)
        self._complete(self._sums.num_due(action, made))
        if self._tiers is not None and not self._is_cut_off(action):
            if not self._tiers.are_here(action):  # may wait for what is to leave
                self._complete(self._sums.num_into_leaving())
            self._tiers.touch(action)
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
        """Whether it would release gradients that were not made."""
        number = action.microbatch
        return (
            action.kind is Kind.RELEASE
            and number in self.items.summed
            and not self._adds_up(number)
        )

    def _adds_up(self, number: int) -> bool:
        """Whether a chunk of gradients is here, and not being summed."""
        return self._chunks[number].is_here and number not in self._sums

    def _made(self, action: Action) -> list[int]:
        """The chunks that an action adds to as the first since they were summed."""
        return [
            item
            for item, mode in self._touches.of_gradients(action)
            if mode is Mode.ADD and not self._adds_up(item)
        ]

    def _sum(self, number: int) -> None:
        """Starts to sum the gradients of a chunk over the replicas, if any came."""
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
        """Waits for the oldest sums, and adds them to the shares."""
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
                assert self._tiers is not None
                self._tiers.move(leaves)

    def _move_share(self, action: Action) -> None:
        """Starts to move an item of the tiers."""
        assert self._tiers is not None
        if action.kind is Kind.FETCH and action.microbatch in self._sums.leaving:
            self._complete(self._sums.num_into_leaving())
        if not self._sums.delays(action):
            self._tiers.move(action)

    def _await(self, number: int) -> None:
        if (works := self._arriving.pop(number, None)) is not None:
            works.wait()

    def _settle(self) -> None:
        """Ends what a stretch of training has left: nothing is under way, and nothing is whole."""
        for number in list(self._arriving):
            self._await(number)
        self._complete(len(self._sums))
        for chunk in self._chunks.values():
            chunk.give_back()
        self._batches = {}
        self._summed = {}
