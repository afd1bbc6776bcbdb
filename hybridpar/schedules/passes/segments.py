"""Segments: a stage's blocks are cut into consecutive segments, and its actions into as many
actions.

    whole           F7@0                        B4@0                        UPDATE1@0
    three segments  F7@0    F7@0.1  F7@0.2      B4@0.2  B4@0.1  B4@0        UPDATE1@0  UPDATE1@0.1  UPDATE1@0.2

    gpipe on one rank, segment by segment (part_major), all @0
    F0 F1 F2  F0.1 F1.1 F2.1  F0.2 F1.2 F2.2     B0.2 B1.2 B2.2  B0.1 B1.1 B2.1  B0 B1 B2

    the same if each segment is updated just before it is used (late), so its state may be loaded
    while others compute
    .. B0 B1 B2  UPDATE0 F3 F4 F5  UPDATE0.1 F3.1 F4.1 F5.1  UPDATE0.2 F3.2 F4.2 F5.2  B3.2 ..

A receive feeds the segment that runs first, and a send follows the one that runs last. So the
weights, gradients and optimizer state of one segment at a time are enough in fast memory
(residency.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from operator import attrgetter

from hybridpar.errors import config_error
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, PER_BATCH, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape

NumParts = int | Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Division:
    """Cut of a plan's actions into segments.

    Attributes:
        num_parts: Segments of a stage: one number for all, or by stage.
        update_parts: Parts of an UPDATE, likewise by rank, counted through the segments of all the
            rank's stages; None: as many as these have together.
        norms: NORM is cut like UPDATE; else it is not cut.
        hosts: HOST is cut like UPDATE; else it is not cut. Its first part stays where it is, and the
            others come one ahead of the same parts of the UPDATE.
        spreads: Parts of HOST are spread evenly over the forwards and backwards up to the UPDATE
            instead. That gives the host more time, but new weights may leave before they are used.
        part_major: Consecutive forwards (or backwards) of micro-batches on a stage all go through
            one segment before the next. A segment's weights are then needed once for all these
            micro-batches.
        late: On the first rank each part of an UPDATE comes right before the first forward through
            its segment, or before any other action that may need it. Other ranks wait for that
            forward, so updating the other segments first would delay them. With a host optimizer
            every UPDATE only waits, so all ranks update late.
    """

    num_parts: NumParts = 1
    update_parts: NumParts | None = None
    norms: bool = False
    hosts: bool = False
    spreads: bool = False
    part_major: bool = False
    late: bool = False

    def on(self, shape: PipelineShape, rank: int, *, updates_wait: bool = False) -> Division:
        """Return the division with that rank's number and order of UPDATEs. updates_wait: an UPDATE
        only waits, for a host. Raises: ConfigError.
        """
        if self.part_major and shape.num_ranks > 1:
            raise config_error(
                "parallel.pp",
                shape.num_ranks,
                "must be 1 if all micro-batches pass one segment before the next: other ranks "
                "would wait for the last micro-batch",
                "1",
            )
        if self.update_parts is None:
            updates = sum(_number(self.num_parts, stage) for stage in shape.stages_of(rank))
        else:
            updates = _number(self.update_parts, rank)
        return replace(self, update_parts=updates, late=updates_wait or (self.late and rank == 0))

    @property
    def _cuts(self) -> dict[Kind, bool]:
        """Whether actions are cut, by kind, if that is a choice."""
        return {Kind.NORM: self.norms, Kind.HOST: self.hosts}

    def count(self, action: Action) -> int:
        """Return the number of actions that an action of an undivided plan becomes."""
        if not ACTION_SPECS[action.kind].cut or not self._cuts.get(action.kind, True):
            return 1
        if action.kind in PER_BATCH and self.update_parts is not None:
            return _number(self.update_parts, action.stage)
        return _number(self.num_parts, action.stage)


WHOLE = Division()
"""The division that changes nothing."""


def _number(numbers: NumParts, index: int) -> int:
    number = numbers if isinstance(numbers, int) else numbers[index]
    assert number >= 1, f"{number} parts of stage {index}"
    return number


def divide(actions: Iterable[Action], division: Division) -> Iterator[Action]:
    """Cut one rank's actions into segments. Only the pass that moves items comes later.

    Each action is replaced by its parts at the same place; with `part_major` each run of forwards
    (or backwards, B) of one stage is replaced by the runs of the segments. So properties of the
    order of undivided plans still hold.
    """
    cut = _cut(actions, division)
    if division.hosts:
        cut = _place_hosts(cut, spreads=division.spreads)
    return _delay_updates(cut, division) if division.late else cut


def _cut(actions: Iterable[Action], division: Division) -> Iterator[Action]:
    """Replace each action by its parts."""

    def together(action: Action) -> object:
        """Neighbours of which this is equal go through the parts together."""
        major = division.part_major and action.kind in (Kind.F, Kind.B)
        return (action.kind, action.stage) if major else object()

    for _, neighbours in groupby(actions, together):
        run = list(neighbours)
        for part in order(run[0].kind, division.count(run[0])):
            yield from (replace(action, part=part) for action in run) if part else run


def _place_hosts(actions: Iterator[Action], *, spreads: bool) -> Iterator[Action]:
    """Place the parts of each HOST between it and its UPDATE; see Division."""
    for action in actions:
        if action.kind is not Kind.HOST:
            yield action
            continue
        hosts = deque([action])
        between: list[Action] = []
        updates: list[Action] = []
        while not updates:
            following = next(actions)
            if following.kind is Kind.HOST:
                hosts.append(following)
            else:
                (updates if following.kind is Kind.UPDATE else between).append(following)
        if spreads:
            yield from _spread(hosts, between)
        else:
            yield from (hosts.popleft(), *between)
        while hosts and updates[-1].part < hosts[-1].part:
            updates.append(next(actions))
        for update in updates:
            while hosts and hosts[0].part <= update.part + 1:
                yield hosts.popleft()
            yield update


def _spread(hosts: deque[Action], between: Sequence[Action]) -> Iterator[Action]:
    """Yield actions with the hosts evenly between those that compute; none if nothing does."""
    computing = [i for i, action in enumerate(between) if action.kind in COMPUTE]
    number = len(hosts)
    places = Counter(
        computing[part * len(computing) // number] for part in range(number) if computing
    )
    for i, action in enumerate(between):
        for _ in range(places[i]):
            yield hosts.popleft()
        yield action


def _delay_updates(actions: Iterable[Action], division: Division) -> Iterator[Action]:
    """Move each part of an UPDATE to the place before the first forward that needs it, or before
    the next action that is neither a forward nor a transfer. Parts of a HOST between them stay one
    ahead, and a NORM stays behind them: a batch is reported before the sums of the next one start.
    """
    waiting = deque[Action]()
    # first segment of the rank, by stage: stages run forward in order
    first: dict[int, int] = {}
    for action in actions:
        if action.kind is Kind.UPDATE or (waiting and action.kind in (Kind.HOST, Kind.NORM)):
            waiting.append(action)
            continue
        if action.kind is Kind.F:
            parts = max(
                (at + _number(division.num_parts, stage) for stage, at in first.items()), default=0
            )
            needed: float = first.setdefault(action.stage, parts) + action.part
        else:
            needed = -1 if ACTION_SPECS[action.kind].peer_offset else inf
        while waiting and _earliest(waiting[0]) <= needed:
            yield waiting.popleft()
        yield action
    yield from waiting


def _earliest(action: Action) -> float:
    """Return the first segment whose forward a waiting action must precede."""
    if action.kind is Kind.NORM:
        return -inf
    return action.part - (action.kind is Kind.HOST)


def order(kind: Kind, num_parts: int) -> range:
    """Return the parts of an action in the order in which they run."""
    return range(num_parts) if ACTION_SPECS[kind].cut >= 0 else range(num_parts - 1, -1, -1)


class PartCounts:
    """Numbers of parts of a rank's actions: computations by stage, NORM, HOST, UPDATE."""

    def __init__(self, actions: Iterable[Action]):
        self._counts: dict[tuple[Kind, int], int] = {}  # actions that are divided
        for kind, stage, part in set(map(attrgetter("kind", "stage", "part"), actions)):
            if part:
                key = self._key(kind, stage)
                self._counts[key] = max(self._counts.get(key, 1), part + 1)

    @staticmethod
    def _key(kind: Kind, stage: int) -> tuple[Kind, int]:
        return (Kind.F if kind in COMPUTE else kind), stage

    def __bool__(self) -> bool:
        """Return whether anything is divided."""
        return bool(self._counts)

    def count(self, kind: Kind, stage: int) -> int:
        """Return the number of parts of such an action."""
        return self._counts.get(self._key(kind, stage), 1)

    def needed(self, kind: Kind, action: Action, stages: Sequence[int]) -> int:
        """Return the last part of a batch's action that a part of a computation needs."""
        own = [self.count(action.kind, stage) for stage in stages]
        if sum(own) != self.count(kind, stages[0]):
            return self.last(kind, stages[0])
        return sum(own[: stages.index(action.stage)]) + action.part

    def first(self, kind: Kind, stage: int) -> int:
        """Return the part that runs first."""
        return self.count(kind, stage) - 1 if ACTION_SPECS[kind].cut < 0 else 0

    def last(self, kind: Kind, stage: int) -> int:
        """Return the part that runs last."""
        return self.count(kind, stage) - 1 if ACTION_SPECS[kind].cut > 0 else 0
