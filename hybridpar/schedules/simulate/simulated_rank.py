"""A rank in the simulator, and the two kinds of functions that connect it with the others.

A dependency says when an action can start, and an effect applies its consequences after the rank's
own time for it. The rules of a kind of action (simulator.py) are lists of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from hybridpar.errors import HybridparError
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind

_step = attrgetter("kind", "stage")


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's place in its list, and its clock."""

    index: int
    actions: Sequence[Action]
    starts: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    clock: float = 0.0
    waits_for: Any = None
    """The Channel, Meeting, HostEngines or queue of sends that it waits for."""
    stages: frozenset[tuple[Kind, int]] = field(init=False)
    """The kinds of its actions, each with a stage."""
    kinds: frozenset[Kind] = field(init=False)
    """The kinds of its actions."""

    def __post_init__(self) -> None:
        self.stages = frozenset(map(_step, self.actions))
        self.kinds = frozenset(kind for kind, _ in self.stages)


Dependency = Callable[[Rank, Action, float], float | None]
"""(rank, action, start) -> when the action can start, `start` at the earliest. None: that is not
known yet; `rank.waits_for` is then what wakes the rank."""
Effect = Callable[[Rank, Action, int], None]
"""(rank, action, step) -> None, after the rank's own time for the action."""
Wake = Callable[[Rank, object], None]
"""(rank, waited_for) -> None: continues the rank if it waits for this object."""


class StuckError(HybridparError):
    """A plan cannot continue: `waiting` says, by rank, at which step and for what."""

    def __init__(self, waiting: Mapping[int, tuple[int, str]]):
        self.waiting = waiting
        rank, (step, reason) = next(iter(waiting.items()))
        super().__init__(f"{len(waiting)} ranks wait forever; rank {rank}, step {step}: {reason}")
