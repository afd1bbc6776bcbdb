"""The room of a rank's state in its fast tier: of a constant size, or what a limit leaves beside the
memory of each action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybridpar.schedules.action import Action

BytesOf = Callable[[Action], int]
"""Returns bytes of memory while an action runs. It is called with each action in order."""


@dataclass(frozen=True)
class Room:
    """Room of a constant size, for the state alone.

    Attributes:
        most: Bytes that it never exceeds.
    """

    most: int

    field = "memory.budget"
    """The setting that decides it."""
    is_constant = True
    """It does not depend on what else is in memory."""

    def follow(self) -> BytesOf:
        """Return the size of the fast tier along a plan that begins with nothing in flight."""
        return lambda action: self.most

    def beside(self, unsharded: int) -> Room:
        """Return the room of all other items, if unsharded chunks take up to so many bytes."""
        return replace(self, most=self.most - unsharded)

    def at_rest(self, available: int, copies: int, least: int) -> int:
        """Return the bytes of the fast tier while no plan runs.

        Args:
            available: The bytes that unsharded chunks leave.
            copies: Bytes of the copies of items that initial weights and checkpoints take.
            least: Bytes that items need in any case.
        """
        return available

    def can_hold(self, num_bytes: int) -> bool:
        """Return whether items of this size, which any plan needs at once, may fit."""
        return num_bytes <= self.most

    def least(self, of_items: int, along: Iterable[tuple[Action, int]]) -> int:
        """Return the smallest `most` with which a plan runs.

        Args:
            of_items: Bytes of the items that any plan needs at once.
            along: Each action of the plan, and the bytes of the items that it needs.
        """
        return of_items

    def excess(self, state: int, total: int) -> int:
        """Return the bytes of the state that are in the slow tier at the peak.

        Args:
            state: Bytes of the state and of unsharded chunks.
            total: Bytes of these and of all other memory.
        """
        return max(state - self.most, 0)


UNLIMITED = Room(sys.maxsize)
"""Room for any state."""


@dataclass(frozen=True)
class Tide(Room):
    """Room that a limit leaves beside the memory that each action takes for other purposes.

    Attributes:
        most: The limit.
        others: Returns a function that returns this other memory, unsharded chunks included.
    """

    others: Callable[[], BytesOf]

    field = "memory.limit"
    is_constant = False

    def follow(self) -> BytesOf:
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


class Rooms(NamedTuple):
    """The room of a rank's state in training, and in evaluations."""

    training: Room
    evaluation: Room
