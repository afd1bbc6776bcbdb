"""Moves of a rank's state along its plan, as the executor and the actions of a batch see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hybridpar.comm import Waitable
from hybridpar.schedules.action import Action
from hybridpar.schedules.passes.shared_items import SharedItems


class StateMoves:
    """Moves nothing: all state is always resident. Subclasses move state between tiers
    (train/tiers.py) and among replicas (train/replicas.py).

    Attributes:
        shared: The items that replicas shard; None: there are none.
        shares: Numbers of the shards in the tiers, by the numbers of their unsharded chunks.
    """

    shared: SharedItems | None = None
    shares: Mapping[int, int] = MappingProxyType({})

    @property
    def peak(self) -> int:
        """Largest number of bytes of state that has been resident, if memory is limited."""
        return 0

    @property
    def is_resized(self) -> bool:
        """Whether the next action has more or less room than the one before."""
        return False

    def plan(self, actions: Iterator[Action], *, evaluates: bool = False) -> Iterator[Action]:
        """Add the moves to the actions of a drained rank. Raises: ConfigError."""
        return actions

    def rest(self) -> None:
        """Note that no plan runs."""

    def move(self, action: Action) -> None:
        """Start a FETCH, RELEASE or DROP."""
        raise AssertionError(f"{action}: nothing moves on this rank")

    def are_here(self, action: Action) -> bool:
        """Return whether `access` would return without waiting."""
        return True

    def access(self, action: Action) -> None:
        """Wait for the state that the action accesses, and note what it changes."""

    def hold(self, action: Action, until: Sequence[Waitable]) -> None:
        """Keep the state that an action accesses resident until these are done."""

    def hold_gradients(self, batch: int, part: int) -> None:
        """Keep the gradients of a segment resident while they are reduced."""

    def hold_weights(self, version: int, group: int) -> None:
        """Keep the weights of an update group resident while they are gathered from replicas."""
