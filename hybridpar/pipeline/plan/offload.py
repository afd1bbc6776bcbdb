"""Offload: what micro-batches keep from forward to backward waits in the slow tier meanwhile.

One rank of 1f1b with four micro-batches in flight, of which two are away at a time (o, e, r: OFFLOAD, EVICT, RELOAD):

    .. F3 o3  B0  e3 r1  F4 o4  B1  e4 r2  F5 o5  B2  e5 r3  F6 ..
    away     1 2        2 3            3 4            4 5

It leaves beside the next forward or backward of its rank, and comes back beside the one before its backward. So beside
what is computed with there is at most one micro-batch that leaves or comes. What would not be away for one forward or
backward at least stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import COMPUTE, INPUTS, Kind
from hybridpar.pipeline.plan.schedules import Schedule, Sizes

_BESIDE = 2
"""Micro-batches in flight that are in memory in any case: one in its backward, one that leaves or comes."""
_AHEAD = 4
"""Forwards and backwards of which one must be known to decide on the first."""


def most_away(schedule: Schedule, sizes: Sizes, rank: int) -> int:
    """Micro-batches of a rank that can be away at once, counted on each of its stages."""
    return max(schedule.max_live_activations(sizes, rank) - _BESIDE, 0)


def add_offload(actions: Iterable[Action], away: int, most: int) -> Iterator[Action]:
    """Adds OFFLOAD, EVICT and RELOAD to one rank's actions, such that `away` micro-batches are away at once.

    Of `most` forwards in a row, so many that follow each other in flight, `away` leave, evenly spread: which ones
    depends on the place in the list alone. More than `most` are as many.
    """
    away = min(away, most)
    return _Pass(actions, away, most).run() if away > 0 else iter(actions)


class _Pass:
    def __init__(self, actions: Iterable[Action], away: int, most: int):
        self._source, self._share = iter(actions), (away, most)
        self._read = deque[Action]()
        self._num_computing = self._num_forwards = 0  # of what has been read; and of what has left
        self._leaving: list[Action] = []
        self._gone: set[tuple[int, int]] = set()

    def run(self) -> Iterator[Action]:
        while action := self._next():
            computes = action.kind in COMPUTE
            if computes:
                following = next((one for one in self._read if one.kind in COMPUTE), None)
                if following is not None and _is_backward(following) and _key(following) in self._gone:
                    self._gone.remove(_key(following))
                    yield _move(Kind.RELOAD, following)
            yield action
            if computes:
                for left in self._leaving:
                    yield _move(Kind.EVICT, left)
                    self._gone.add(_key(left))
                self._leaving = [action] if action.kind is Kind.F and self._leaves(action) else []
                for leaving in self._leaving:
                    yield _move(Kind.OFFLOAD, leaving)

    def _next(self) -> Action | None:
        while self._num_computing < _AHEAD + 1 and (action := next(self._source, None)) is not None:
            self._read.append(action)
            self._num_computing += action.kind in COMPUTE
        if not self._read:
            return None
        action = self._read.popleft()
        self._num_computing -= action.kind in COMPUTE
        return action

    def _leaves(self, forward: Action) -> bool:
        """Whether it is this one's turn, and time enough until its backward."""
        number, (away, most) = self._num_forwards, self._share
        self._num_forwards += 1
        soon = [one for one in self._read if one.kind in COMPUTE][: _AHEAD - 1]
        near = len(soon) < _AHEAD - 1 or any(_is_backward(one) and _key(one) == _key(forward) for one in soon)
        return number * away % most < away and not near


def _is_backward(action: Action) -> bool:
    """Whether it needs what its forward has kept."""
    return action.kind in INPUTS and action.kind is not Kind.F


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def _move(kind: Kind, action: Action) -> Action:
    return Action(kind, action.stage, action.microbatch)
