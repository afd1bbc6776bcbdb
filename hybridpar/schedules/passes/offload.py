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
    return _offload(actions, away, in_flight) if away > 0 else iter(actions)


def _offload(actions: Iterable[Action], away: int, in_flight: int) -> Iterator[Action]:
    """Yield the actions and the moves that `add_offload` adds."""
    most = in_flight - _LEAST
    room = in_flight - away
    num_here = 0  # micro-batches in memory
    num_forwards = 0
    gone = set[tuple[int, int]]()
    leaving: Action | None = None

    def bring(action: Action) -> Iterator[Action]:
        """Yield the RELOAD of the activations that an action needs, if they are offloaded."""
        nonlocal num_here
        if action.kind in INPUTS and _key(action) in gone:
            gone.remove(_key(action))
            num_here += 1
            yield Action(Kind.RELOAD, *_key(action))

    for action, following in _with_following(actions):
        if action.kind not in COMPUTE:
            yield action
            continue
        yield from bring(action)
        if following and num_here + (action.kind is Kind.F) < room:
            yield from bring(following[0])
        yield action
        num_here += ACTION_SPECS[action.kind].holds
        if leaving is not None:
            gone.add(_key(leaving))
            num_here -= 1
            yield Action(Kind.EVICT, *_key(leaving))
            leaving = None
        if action.kind is Kind.F:
            is_its_turn = num_forwards * away % most < away
            num_forwards += 1
            has_time = len(following) == _GAP and _key(action) not in map(_key, following)
            if is_its_turn and has_time:
                leaving = action
                yield Action(Kind.OFFLOAD, *_key(action))


def _with_following(actions: Iterable[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Yield each action; with a forward or backward, also the next ones, at most _GAP."""
    read = deque[Action]()
    num_computing = 0

    def leave() -> tuple[Action, list[Action]]:
        nonlocal num_computing
        head = read.popleft()
        num_computing -= head.kind in COMPUTE
        return head, [one for one in read if one.kind in COMPUTE]

    for action in actions:
        read.append(action)
        num_computing += action.kind in COMPUTE
        while num_computing > _GAP:
            yield leave()
    while read:
        yield leave()


def _key(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch
