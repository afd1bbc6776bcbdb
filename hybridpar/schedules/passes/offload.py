"""Offload activations to the slow tier between a micro-batch's forward and backward.

A rank with four micro-batches in flight, of which two are offloaded at a time (o, e, r: OFFLOAD,
EVICT, RELOAD):

    F0 o0  F1  e0 o1  F2  e1 o2  F3  e2 o3 r0  B0  e3 r1  F4  o4  B1  e4 r2  F5  o5  B2  e5 r3  F6
    ..
    offloaded  0      0 1        0 1 2         1 2        2 3     2 3        3 4     3 4

Activations are written during the next forward or backward of the rank, and read back during the
one before their backward, or, if that has no memory for them, right before their backward, which
waits. Activations that would not be offloaded for at least one forward or backward stay. So if four
or more micro-batches are in flight, memory never holds more than the ones that are not to be
offloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, INPUTS, Kind
from hybridpar.schedules.schedule_table import PipelineShape, Schedule

_LEAST = 2
"""Micro-batches in memory in any case: the one that is computed with, and one that is being written
or read."""
_GAP = 3
"""Forwards and backwards between a micro-batch's own in which it can be written, stay offloaded,
and be read back."""


def most_away(schedule: Schedule, shape: PipelineShape, rank: int) -> int:
    """Return how many micro-batches of a rank, counted by stage, can be offloaded at once."""
    return max(schedule.max_live_activations(shape, rank) - _LEAST, 0)


def num_away(schedule: Schedule, shape: PipelineShape, rank: int) -> int:
    """Return how many micro-batches of a rank are offloaded at once: as many as the schedule's
    options ask for, limited to what is possible.
    """
    offload = schedule.options.offload
    asked = offload if isinstance(offload, int) else offload[rank]
    return min(asked, most_away(schedule, shape, rank))


def add_offload(actions: Iterable[Action], away: int, in_flight: int) -> Iterator[Action]:
    """Add OFFLOAD, EVICT and RELOAD to one rank's actions, of which at most `in_flight`
    micro-batches are in flight.

    At most `away` of these are offloaded at once. Of each run of consecutive forwards, `away` are
    offloaded, evenly spread; the choice depends only on their place in the list.
    """
    away = min(away, in_flight - _LEAST)
    return _Pass(actions, away, in_flight).run() if away > 0 else iter(actions)


class _Pass:
    def __init__(self, actions: Iterable[Action], away: int, in_flight: int):
        self._source = iter(actions)
        self._away = away
        self._most = in_flight - _LEAST
        self._room = in_flight - away
        self._read = deque[Action]()
        self._num_computing = 0  # computations read
        self._num_forwards = 0  # forwards done
        self._num_here = 0  # micro-batches in memory
        self._gone: set[tuple[int, int]] = set()

    def run(self) -> Iterator[Action]:
        leaving: Action | None = None
        while action := self._next():
            if action.kind not in COMPUTE:
                yield action
                continue
            yield from self._bring(action)
            following = next(self._computing(), None)
            if following is not None and self._num_here + (action.kind is Kind.F) < self._room:
                yield from self._bring(following)
            yield action
            self._num_here += ACTION_SPECS[action.kind].holds
            if leaving is not None:
                yield self._move(Kind.EVICT, leaving)
            leaving = action if action.kind is Kind.F and self._leaves(action) else None
            if leaving is not None:
                yield self._move(Kind.OFFLOAD, leaving)

    def _next(self) -> Action | None:
        while self._num_computing <= _GAP and (action := next(self._source, None)) is not None:
            self._read.append(action)
            self._num_computing += action.kind in COMPUTE
        if not self._read:
            return None
        action = self._read.popleft()
        self._num_computing -= action.kind in COMPUTE
        return action

    def _computing(self) -> Iterator[Action]:
        """Yield the next forwards and backwards."""
        return (action for action in self._read if action.kind in COMPUTE)

    def _bring(self, action: Action) -> Iterator[Action]:
        """Yield the RELOAD of the activations that an action needs, if they are offloaded."""
        if action.kind in INPUTS and _key(action) in self._gone:
            yield self._move(Kind.RELOAD, action)

    def _move(self, kind: Kind, action: Action) -> Action:
        if kind is Kind.EVICT:
            self._gone.add(_key(action))
            self._num_here -= 1
        elif kind is Kind.RELOAD:
            self._gone.remove(_key(action))
            self._num_here += 1
        return Action(kind, action.stage, action.microbatch)

    def _leaves(self, forward: Action) -> bool:
        """Return whether it is this forward's turn, with enough time until its backward."""
        number = self._num_forwards
        soon = list(self._computing())[:_GAP]
        self._num_forwards += 1
        near = len(soon) < _GAP or any(_key(one) == _key(forward) for one in soon)
        return number * self._away % self._most < self._away and not near


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch
