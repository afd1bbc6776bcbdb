"""The room of a rank's state in its fast tier: of a constant size, or what a limit leaves beside the
memory of each action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hybridpar.schedules.action import Action

RoomOf = Callable[[Action], int]
"""Returns the bytes of the fast tier while an action runs. It is called with each action in order."""


class Room(Protocol):
    """The size of the fast tier, which may change from action to action.

    Attributes:
        most: Bytes that it never exceeds.
        field: The setting that decides it.
        is_constant: It does not depend on what else is in memory.
    """

    @property
    def most(self) -> int: ...
    @property
    def field(self) -> str: ...
    @property
    def is_constant(self) -> bool: ...
    def follow(self) -> RoomOf:
        """Return the room along a plan that begins with nothing in flight."""

    def beside(self, unsharded: int) -> Room:
        """Return the room of all other items, if unsharded chunks take up to so many bytes."""

    def at_rest(self, available: int, copies: int, least: int) -> int:
        """Return the bytes of the fast tier while no plan runs.

        Args:
            available: The bytes that unsharded chunks leave.
            copies: Bytes of the copies of items that initial weights and checkpoints take.
            least: Bytes that items need in any case.
        """

    def can_hold(self, num_bytes: int) -> bool:
        """Return whether items of this size, which any plan needs at once, may fit."""

    def least(self, of_items: int, along: Iterable[tuple[Action, int]]) -> int:
        """Return the smallest `most` with which a plan runs.

        Args:
            of_items: Bytes of the items that any plan needs at once.
            along: Each action of the plan, and the bytes of the items that it needs.
        """

    def excess(self, state: int, total: int) -> int:
        """Return the bytes of the state that are in the slow tier at the peak.

        Args:
            state: Bytes of the state and of unsharded chunks.
            total: Bytes of these and of all other memory.
        """


class Rooms(NamedTuple):
    """The room of a rank's state in training, and in evaluations."""

    training: Room
    evaluation: Room


@dataclass(frozen=True)
class Budget:
    """Room of a constant size, for the state alone."""

    most: int
    field: str = "memory.budget"
    is_constant: bool = True

    def follow(self) -> RoomOf:
        return lambda action: self.most

    def beside(self, unsharded: int) -> Budget:
        return Budget(self.most - unsharded)

    def at_rest(self, available: int, copies: int, least: int) -> int:
        return available

    def can_hold(self, num_bytes: int) -> bool:
        return num_bytes <= self.most

    def least(self, of_items: int, along: Iterable[tuple[Action, int]]) -> int:
        return of_items

    def excess(self, state: int, total: int) -> int:
        return max(state - self.most, 0)


UNLIMITED = Budget(sys.maxsize)
"""Room for any state."""


@dataclass(frozen=True)
class Tide:
    """Room that a limit leaves beside the memory that each action takes for other purposes.

    Attributes:
        most: The limit.
        others: Returns a function that returns this other memory (bytes), unsharded chunks
            included, for each action in order.
    """

    most: int
    others: Callable[[], Callable[[Action], int]]
    field: str = "memory.limit"
    is_constant: bool = False

    def follow(self) -> RoomOf:
        others = self.others()
        return lambda action: self.most - others(action)

    def beside(self, unsharded: int) -> Tide:
        return self

    def at_rest(self, available: int, copies: int, least: int) -> int:
        return max(available - copies, least)

    def can_hold(self, num_bytes: int) -> bool:
        return True  # only a plan tells

    def least(self, of_items: int, along: Iterable[tuple[Action, int]]) -> int:
        others = self.others()
        return max(others(action) + num_bytes for action, num_bytes in along)

    def excess(self, state: int, total: int) -> int:
        return max(total - self.most, 0)
