"""Plan and run the moves between the tiers of a rank's state: device, host memory, file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridpar.comm import Waitable
from hybridpar.prediction.predict import Rooms
from hybridpar.runtime.state_moves import StateMoves
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import FastTier, Mode, Tide, add_residency
from hybridpar.schedules.proof.check import PlanError
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.tiered import TieredMemory


class RankTiers(StateMoves):
    """Moves a rank's state between its tiers.

    Raises:
        ConfigError: Memory is too small for any plan.

    Args:
        memory: Holds the state.
        accesses: The items that each action accesses.
        rooms: The size of the fast tier.
    """

    def __init__(self, memory: TieredMemory, accesses: AccessMap, rooms: Rooms):
        self.memory = memory
        self._tiers = memory.tiers
        self.accesses = accesses
        self.shares = accesses.shares
        self._rooms = rooms
        self._room = self._idle_room = self._tiers.budget
        if isinstance(rooms.training, Tide):  # initial weights and checkpoints take copies
            copies = 2 * max(accesses.num_bytes)
            self._idle_room = max(self._idle_room - copies, accesses.least_budget())
        accesses.require(rooms.training)
        self.rest()

    @property
    def peak(self) -> int:
        """Largest number of bytes of resident state so far."""
        return self._tiers.traffic.peak

    def plan(self, actions: Iterator[Action], *, evaluates: bool = False) -> Iterator[Action]:
        """Add FETCH, RELEASE and DROP to the actions of a drained rank. Raises: ConfigError."""
        self._tiers.settle()  # complete moves that a batch left when it was cut off
        accesses = self.accesses
        items = self._tiers.items
        first = accesses.first
        residency = accesses.residency(
            self._rooms.evaluation if evaluates else self._rooms.training,
            {
                i: items[i - first].changed
                for i in accesses.moving
                if self._tiers.is_here(i - first)
            },
        )
        fast = FastTier(residency)
        for action in add_residency(actions, residency):
            if fault := fast.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            self._room = fast.room
            yield action

    def rest(self) -> None:
        """Note that no plan runs: outside of plans all room is for state, except the room of copies."""
        self._room = self._idle_room
        self._tiers.shrink(self._room)

    # -- called by the executor

    @property
    def is_resized(self) -> bool:
        """Return whether the next action has more or less room than the one before."""
        return self._tiers.budget != self._room

    def move(self, action: Action) -> None:
        """Start a FETCH, RELEASE or DROP.

        An item of a batch that a stop request cut off was never created, so nothing is released.
        """
        self.memory.forget()
        number = action.microbatch - self.accesses.first
        tiers = self._tiers
        if action.kind is Kind.FETCH:
            tiers.fetch(number)
        elif tiers.is_absent(number):
            return
        elif action.kind is Kind.RELEASE:
            tiers.release(number)
        else:
            tiers.drop(number)

    def are_here(self, action: Action) -> bool:
        """Return whether all items that the action accesses are in memory."""
        first = self.accesses.first
        return all(self._tiers.is_here(access.item - first) for access in self.accesses(action))

    def access(self, action: Action) -> None:
        """Wait for the items that the action accesses, create those that it writes first, and mark
        the changed ones."""
        if self.is_resized:
            self._tiers.resize(self._room)
        for item, mode in self.accesses(action):
            number = item - self.accesses.first
            if mode is Mode.WRITE and self._tiers.is_absent(number):
                self._tiers.create(number)
            self._tiers.await_item(number, changing=mode is not Mode.READ)

    def hold(self, action: Action, until: Sequence[Waitable]) -> None:
        """Keep the items that an action accesses resident until these are done."""
        for access in self.accesses(action):
            for one in until:
                self._hold(access.item, one)

    def hold_gradients(self, batch: int, part: int) -> None:
        """Keep the gradients of a segment resident while they are reduced. If they are compressed,
        return once they are: the unsent rest has to be resident, too.
        """
        state = self.accesses.state
        for i, item in self.accesses.of(f"gradients/{state.gradients.buffer_index(batch)}"):
            if item.use.parts[0] != part:
                continue
            reduction = state.reducer.of(item.use)
            if state.compression is None:
                self._hold(i, reduction)
            else:
                reduction.wait()

    def hold_weights(self, version: int, group: int) -> None:
        """Keep the weights of an update group resident while they are gathered from replicas."""
        weights = self.accesses.state.weights
        arriving = weights.arriving_parts(version)
        if not arriving.is_done():
            for i, item in self.accesses.of(f"weights/{weights.slot(version)}"):
                if item.use.group == group:
                    self._hold(i, arriving)

    def _hold(self, number: int, until: Waitable) -> None:
        self._tiers.hold(number - self.accesses.first, until)
