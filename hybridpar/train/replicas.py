"""Whole chunks of what replicas share (ZeRO-2 and 3), as the plan of a rank has them come and go.

    three parts, two blocks' weights at a time; FETCH gathers weights, RELEASE drops them, or sums gradients over dp

    FETCH0 FETCH1 F0 RELEASE0 FETCH2 F0.1 F0.2   B0.2 RELEASE5 RELEASE2 FETCH0 B0.1 RELEASE4 B0 RELEASE3   REDUCE0 ..

Replicas of a stage have equal plans, for their chunks are of equal sizes; so their collectives meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from hybridpar.comm import Works
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.check import PlanError
from hybridpar.pipeline.plan.copies import SharedItems
from hybridpar.pipeline.plan.kinds import PER_ITEM
from hybridpar.pipeline.plan.residency import FastTier, Mode, Residency, Touch
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.state import RankState
from hybridpar.state.shares import WholeChunk, WholeChunks, room
from hybridpar.train.parts import Parts


class SharedTouches:
    """What an action touches of the chunks that come and go, by number.

    weights of a part     F B I reads                       gradients   B I W adds
    what an UPDATE makes  new shares: a whole chunk is old              REDUCE: all are in the shares
    """

    def __init__(self, chunks: list[WholeChunk], state: RankState, parts: Parts, sizes: Sizes):
        self._chunks, self._state, self._parts, self._m = chunks, state, parts, sizes.num_microbatches
        self._by_kind: dict[str, list[int]] = {}
        for number, chunk in enumerate(chunks):
            self._by_kind.setdefault(chunk.kind, []).append(number)

    def of_weights(self, action: Action) -> list[Touch]:
        """The touches of weights."""
        weights = self._state.weights
        if action.kind in (Kind.F, Kind.B, Kind.I):
            return self._in_part(action, f"weights/{weights.slot(action.version)}", Mode.READ)
        if action.kind is Kind.UPDATE:
            return [Touch(i, Mode.RENEW) for i in self._by_kind.get(f"weights/{weights.slot(action.version)}", ())]
        return []

    def of_gradients(self, action: Action) -> list[Touch]:
        """The touches of gradients."""
        if action.kind in (Kind.B, Kind.I, Kind.W):
            return self._in_part(action, self._gradients(action.microbatch // self._m), Mode.ADD)
        if action.kind is Kind.REDUCE:
            return [Touch(i, Mode.RENEW) for i in self.gradients(action.microbatch)]
        return []

    def gradients(self, batch: int) -> list[int]:
        """The chunks of a batch's gradients."""
        return self._by_kind.get(self._gradients(batch), [])

    def _gradients(self, batch: int) -> str:
        return f"gradients/{self._state.gradients.buffer_index(batch)}"

    def _in_part(self, action: Action, kind: str, mode: Mode) -> list[Touch]:
        part = self._parts.number(action)
        return [Touch(i, mode) for i in self._by_kind.get(kind, ()) if part in self._chunks[i].use.parts]


class SharedChunks:
    """The chunks of a rank that come and go, along its plan: the executor's tiers.

    Weights have room for two consecutive parts, so what comes next is gathered while a part computes. Gradients have
    room for one, besides those that are being summed: before a backward makes new ones, the sums that were started
    ahead of the backward before it are over.
    """

    def __init__(self, memory: WholeChunks, state: RankState, parts: Parts, sizes: Sizes):
        self._chunks, self._state = memory.chunks, state
        self._touches, self._m = SharedTouches(memory.chunks, state, parts, sizes), sizes.num_microbatches
        num_bytes = [chunk.num_bytes for chunk in self._chunks]

        def residency(kind: str, touches: Callable[[Action], list[Touch]], consecutive: int) -> Residency:
            own = [(chunk.use, chunk.num_bytes) for chunk in self._chunks if chunk.kind == f"{kind}/0"]
            return Residency(touches, num_bytes, room(own, consecutive))

        self.items = SharedItems(
            residency("weights", self._touches.of_weights, 2), residency("gradients", self._touches.of_gradients, 1),
            frozenset(i for i, chunk in enumerate(self._chunks) if chunk.kind.startswith("gradients/")))
        """The chunks as a plan knows them."""
        self._arriving: dict[int, Works] = {}
        self._sums: deque[tuple[int, Works]] = deque()  # of gradients, the oldest first
        self._num_older = 0  # of them, that were started ahead of the newest backward
        self._batches: dict[int, int] = {}  # whose gradients a chunk adds up
        self._summed: dict[int, int] = {}  # and of which its share has any

    def plan(self, actions: Iterator[Action]) -> Iterator[Action]:
        """The actions of a rank that is drained, with FETCH and RELEASE. At the start nothing is whole."""
        self._settle()
        weights, gradients = FastTier(self.items.weights), FastTier(self.items.gradients)
        for action in self.items.moved(actions):
            own = gradients if action.microbatch in self.items.summed else weights
            for tier in (own,) if action.kind in PER_ITEM else (weights, gradients):
                if fault := tier.follow(action):
                    raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            yield action

    # -- as the executor asks for it -----------------------------------------------------------------------------------

    def move(self, action: Action) -> None:
        """Starts a FETCH or RELEASE. What was not made, as its batch was cut off, has nothing to give up.

        Collectives: an all-gather, or a reduce-scatter, for each bucket of the chunk.
        """
        number, chunk = action.microbatch, self._chunks[action.microbatch]
        if action.kind is Kind.FETCH:
            chunk.take()
            self._arriving[number] = self._state.weights.shares[chunk.index].gather(chunk.use)
        elif chunk.kind.startswith("weights/"):
            self._await(number)
            chunk.give_back()
        elif self._adds_up(number):
            self._sum(number)

    def are_here(self, action: Action) -> bool:
        """Whether `touch` would not wait."""
        arriving = (self._arriving.get(item, Works()) for item, _ in self._touches.of_weights(action))
        sums = (works for _, works in islice(self._sums, self._num_due(action)))
        return all(works.is_done() for works in (*arriving, *sums))

    def touch(self, action: Action) -> None:
        """Waits for weights that the action needs, for sums that must be over, and makes what it adds to."""
        for item, mode in self._touches.of_weights(action):
            if mode is Mode.READ:
                self._await(item)
        made = self._made(action)
        self._complete(self._num_due(action))
        if action.kind in (Kind.NORM, Kind.UPDATE):
            self._fill_up(action.microbatch)
        if made:
            self._num_older = len(self._sums)
        for item in made:
            chunk = self._chunks[item]
            chunk.take()
            self._batches[item] = action.microbatch // self._m
            self._state.gradients.renew(chunk.index, self._state.shares[chunk.index].names(chunk.use))

    def _adds_up(self, number: int) -> bool:
        """Whether a chunk of gradients is here, and not being summed."""
        return self._chunks[number].is_here and all(number != other for other, _ in self._sums)

    def _made(self, action: Action) -> list[int]:
        """The chunks that an action adds to as the first since they were summed."""
        return [item for item, mode in self._touches.of_gradients(action)
                if mode is Mode.ADD and not self._adds_up(item)]

    def _num_due(self, action: Action) -> int:
        """The number of sums, the oldest first, that must be over before an action."""
        if action.kind in (Kind.NORM, Kind.UPDATE):
            return len(self._sums)
        if not (made := self._made(action)):
            return 0
        return max([self._num_older, *(i + 1 for i, (number, _) in enumerate(self._sums) if number in made)])

    def _sum(self, number: int) -> None:
        """Starts to sum the gradients of a chunk over the replicas, if any came."""
        chunk, gradients = self._chunks[number], self._state.gradients
        shares = self._state.shares[chunk.index]
        names = shares.names(chunk.use)
        if gradients.missing(chunk.index).issuperset(names):
            chunk.give_back()
            return
        gradients.settle(chunk.index, names)
        self._sums.append((number, shares.reduce_scatter(chunk.use)))

    def _complete(self, count: int) -> None:
        """Waits for the oldest sums, and adds them to the shares."""
        for _ in range(count):
            number, works = self._sums.popleft()
            self._num_older = max(self._num_older - 1, 0)
            works.wait()
            chunk, batch = self._chunks[number], self._batches[number]
            shares = self._state.shares[chunk.index]
            shares.take(shares.names(chunk.use), add=self._summed.get(number) == batch)
            self._summed[number] = batch
            chunk.give_back()

    def _fill_up(self, batch: int) -> None:
        """Shares of what got no gradient in a batch are zero."""
        for number in self._touches.gradients(batch):
            if self._summed.get(number) != batch:
                chunk = self._chunks[number]
                shares = self._state.shares[chunk.index]
                for name in shares.views.keys() & shares.names(chunk.use):
                    shares.views[name].zero_()
                self._summed[number] = batch

    def _await(self, number: int) -> None:
        if (works := self._arriving.pop(number, None)) is not None:
            works.wait()

    def _settle(self) -> None:
        """Ends what a stretch of training has left: nothing is under way, and nothing is whole."""
        for number in list(self._arriving):
            self._await(number)
        self._complete(len(self._sums))
        for chunk in self._chunks:
            chunk.give_back()
        self._batches, self._summed = {}, {}
