"""Plan and run the moves between the tiers of a rank's state: device, host memory, file."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import FastTier, Mode, add_residency
from hybridpar.schedules.proof.check import PlanError
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.tiered import TieredMemory


class RankTiers:
    """The tiers of a rank's state, as the executor sees them.

    Raises:
        ConfigError: memory.budget is too small for any plan.
    """

    def __init__(self, memory: TieredMemory, accesses: AccessMap):
        self.memory = memory
        self._tiers = memory.tiers
        self.accesses = accesses
        accesses.require(memory.budget)

    @property
    def peak(self) -> int:
        """Return the peak of resident state, in bytes."""
        return self._tiers.traffic.peak

    def plan(self, actions: Iterator[Action]) -> Iterator[Action]:
        """Add FETCH, RELEASE and DROP to the actions of a drained rank. Raises: ConfigError."""
        self._tiers.settle()  # complete moves that a batch left when it was cut off
        accesses = self.accesses
        items = self._tiers.items
        residency = accesses.residency(
            self.memory.budget,
            {i: items[i].changed for i in accesses.moving if self._tiers.is_here(i)},
        )
        fast = FastTier(residency)
        for action in add_residency(actions, residency):
            if fault := fast.follow(action):
                raise PlanError(fault, {action.stage: [action]}, [(action.stage, 0)])
            yield action

    # -- called by the executor

    def move(self, action: Action) -> None:
        """Start a FETCH, RELEASE or DROP.

        An item of a batch that a stop request cut off was never created, so nothing is released.
        """
        self.memory.forget()
        number = action.microbatch
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
        """Return whether all items that the action accesses are resident."""
        return all(self._tiers.is_here(access.item) for access in self.accesses(action))

    def access(self, action: Action) -> None:
        """Wait for the items that the action accesses, create those that it writes first, and mark
        the changed ones."""
        for item, mode in self.accesses(action):
            if mode is Mode.WRITE and self._tiers.is_absent(item):
                self._tiers.create(item)
            self._tiers.await_item(item, changing=mode is not Mode.READ)

    def hold_gradients(self, batch: int, part: int) -> None:
        """Keep the gradients of a segment resident while they are reduced."""
        for i, item in self.accesses.of(
            f"gradients/{self.accesses.state.gradients.buffer_index(batch)}"
        ):
            if item.use.parts[0] == part:
                self._tiers.hold(i, self.accesses.state.reducer.of(item.use))

    def hold_weights(self, version: int, group: int) -> None:
        """Keep the weights of an update group resident while they are gathered from replicas."""
        weights = self.accesses.state.weights
        arriving = weights.arriving_parts(version)
        if not arriving.is_done():
            for i, item in self.accesses.of(f"weights/{weights.slot(version)}"):
                if item.use.group == group:
                    self._tiers.hold(i, arriving)
