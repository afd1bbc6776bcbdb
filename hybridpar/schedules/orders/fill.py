"""Fill idle time with weight gradients: place W's in the gaps of an order of forwards and
backwards, by their costs.

1f1b on two ranks, three micro-batches; F and I take 2, W takes 1:

    order   F0 F1 I0 F2 I1 I2   filled   stage 0  F0--- F1---       I0--- W0 F2--- I1--- W1    I2--- W2
            F0 I0 F1 I1 F2 I2            stage 1        F0--- I0--- F1--- I1--- W0 F2--- I2--- W1 W2

A rank takes the next step of its order as soon as its input has arrived. Until then it runs a W; it
does so too when its memory is full, because a W frees what its micro-batch keeps. A W that would
delay the next step may wait. A step that comes soon in the order may run early, if there is memory
for it and for the later steps that it needs on the rank. How long a gap must be, and how far a rank
looks ahead, is tried; the shortest result counts. The result is a function of the arguments alone,
so all ranks find the same.

Source: list scheduling (Graham, 1969), applied to W's in arXiv 2401.10241, section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from math import inf

from hybridpar.schedules.kinds import Kind, Step
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.costs import Costs, expand

_WAITS = (0.5, 1.0, 0.0)
_LOOKS = (1, 0, 2, 4, 8)
_LARGE = 10_000
"""Number of forwards and backwards from which on only one variant is computed: all would take
seconds."""
_SHORTER = 1 - 1e-9


@dataclass(frozen=True)
class Room:
    """Memory that micro-batches may use, in any one unit.

    Attributes:
        kept: Memory of one micro-batch from F to W, by stage.
        most: Memory available at once, by rank.
    """

    kept: Sequence[float]
    most: Sequence[float]


def fill(
    orders: Sequence[Sequence[Step]],
    shape: PipelineShape,
    costs: Costs,
    room: Room,
    *,
    swaps: bool = True,
) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's steps for a draining batch: F's and I's about in order, and W's.

    Args:
        orders: F, and B or I, of each rank for micro-batches 0 to m - 1. With W right after each I
            they must fit into `room`.
        swaps: F's and I's may change places; on each link, transfers stay in the order of
            micro-batches of each stage.
    """
    forwards = [
        [
            (Kind.I if kind is Kind.B else kind, stage, k)
            for kind, stage, k in order
            if kind is not Kind.W
        ]
        for order in orders
    ]
    found: tuple[float, list[list[Step]]] | None = None
    large = sum(map(len, forwards)) > _LARGE
    for look, wait in product(_LOOKS if swaps else (0,), _WAITS):
        if large and found is not None:
            break
        ranks = _Ranks(forwards, shape, costs, room)
        end = ranks.run(wait, look, inf if found is None else found[0])
        if end is not None and (found is None or end < _SHORTER * found[0]):
            found = end, ranks.done
    assert found is not None, f"orders do not fit into {room.most}, or wait for each other"
    return tuple(map(tuple, found[1]))


def in_any_order(shape: PipelineShape, costs: Costs, room: Room) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's steps for a draining batch: whatever can run runs, otherwise W's.

    I comes before F, or F before I except on the first virtual stage; the shorter result counts. An
    F of a later virtual stage comes before an F of an earlier one.
    """
    found = []
    for late in (False, True):
        ranks = _Free(shape, costs, room, late)
        end = ranks.run(0.0, 0)
        if end is not None:
            found.append((end, ranks.done))
    assert found, f"micro-batches do not fit into {room.most}"
    return tuple(map(tuple, min(found, key=lambda one: one[0])[1]))


class _Ranks:
    """Simulates all ranks. Events are times at which a rank may be able to run a step."""

    def __init__(
        self, orders: Sequence[Sequence[Step]], shape: PipelineShape, costs: Costs, room: Room
    ):
        p = shape.num_ranks
        stages = range(shape.num_stages)
        self.shape = shape
        self.room = room
        self.home = [shape.rank_of(stage) for stage in stages]
        steady = replace(costs, variation={})
        self.times = {
            kind: [times[0] for times in steady.durations(kind, self.home)]
            for kind in (Kind.F, Kind.I, Kind.W)
        }
        self.way = {flow: _ways(costs, shape, flow) for flow in (1, -1)}
        self.later = [
            sum(room.kept[other] for other in shape.stages_of(self.home[stage]) if other > stage)
            for stage in stages
        ]
        self.left = [list(order) for order in orders]
        self.there = {(Kind.F, 0, k): 0.0 for k in range(shape.num_microbatches)}
        """When the inputs of steps arrive, as far as known."""
        self.waiting: list[list[Step]] = [[] for _ in range(p)]  # W's, in the order of their I's
        self.done: list[list[Step]] = [[] for _ in range(p)]
        self.free = [0.0] * p
        self.held = [0.0] * p
        self.rest = [
            sum(
                self.times[kind][stage] + (kind is Kind.I) * self.times[Kind.W][stage]
                for kind, stage, _ in order
            )
            for order in orders
        ]
        """Remaining work of each rank."""
        self.events = [(0.0, rank) for rank in range(p)]

    def run(self, wait: float, look: int, within: float = inf) -> float | None:
        """Return when all steps are done; None if never, or not within the time `within`.

        Args:
            wait: Gaps shorter than this share of a W are left empty.
            look: How many steps before its turn a step may run.
            within: Give up after this time.
        """
        while self.events:
            now, rank = heappop(self.events)
            if self.free[rank] > now:
                continue
            if now + self.rest[rank] > within:
                return None
            step, soon = self._next(rank, now, look)
            if step is not None:
                self._take(rank, step)
            elif waiting := self.waiting[rank]:
                first = min(waiting, key=lambda step: (step[2], -step[1]))
                if soon is None or soon - now >= wait * self.times[Kind.W][first[1]]:
                    waiting.remove(first)
                    step = first
            if step is not None:
                self._do(rank, step, now)
            elif soon is not None:
                heappush(self.events, (soon, rank))
        return None if any(self.left) or any(self.waiting) else max(self.free)

    def _next(self, rank: int, now: float, look: int) -> tuple[Step | None, float | None]:
        """Return the F or I that can run now; else when the input of the next one arrives."""
        soon = None
        seen = set()
        for turn, step in enumerate(self.left[rank][: 1 + look]):
            kind, stage, _ = step
            if (kind, stage) in seen:
                continue
            seen.add((kind, stage))
            needed = 0.0
            if kind is Kind.F:
                needed = self.room.kept[stage] + (self.later[stage] if turn else 0.0)
            arrival = self.there.get(step)
            if arrival is None or self.held[rank] + needed > self.room.most[rank] / _SHORTER:
                continue
            if arrival <= now:
                return step, None
            soon = arrival if turn == 0 else soon
        return None, soon

    def _take(self, rank: int, step: Step) -> None:
        self.left[rank].remove(step)

    def _do(self, rank: int, step: Step, now: float) -> None:
        kind, stage, k = step
        time = self.times[kind][stage]
        end = self.free[rank] = now + time
        self.rest[rank] -= time
        heappush(self.events, (end, rank))
        self.done[rank].append(step)
        if kind is Kind.W:
            self.held[rank] -= self.room.kept[stage]
            return
        following = stage + 1
        flow = 1
        if kind is Kind.F:
            self.held[rank] += self.room.kept[stage]
        else:
            self.waiting[rank].append((Kind.W, stage, k))
            following = stage - 1
            flow = -1
        if kind is Kind.F and following == self.shape.num_stages:
            self.there[Kind.I, stage, k] = end
        elif following >= 0:
            arrival = end + self.way[flow][stage]
            self.there[kind, following, k] = arrival
            heappush(self.events, (arrival, self.home[following]))


class _Free(_Ranks):
    """Simulates ranks without an order: a queue for each kind and stage, the urgent ones first."""

    def __init__(self, shape: PipelineShape, costs: Costs, room: Room, late: bool):
        super().__init__([[]] * shape.num_ranks, shape, costs, room)
        self.rows: list[list[deque[Step]]] = []
        for rank in range(shape.num_ranks):
            stages = shape.stages_of(rank)
            backwards, forwards = (
                [(kind, stage) for stage in of]
                for kind, of in ((Kind.I, stages), (Kind.F, list(reversed(stages))))
            )
            urgent = [*forwards[:-1], *backwards, forwards[-1]] if late else [*backwards, *forwards]
            self.rows.append(
                [deque((*row, k) for k in range(shape.num_microbatches)) for row in urgent]
            )
        self.left = [[step for row in rows for step in row] for rows in self.rows]

    def _next(self, rank: int, now: float, look: int) -> tuple[Step | None, float | None]:
        for row in filter(None, self.rows[rank]):
            kind, stage, _ = step = row[0]
            full = (
                kind is Kind.F
                and self.held[rank] + self.room.kept[stage] > self.room.most[rank] / _SHORTER
            )
            if not full and self.there.get(step, inf) <= now:
                return step, None
        return None, None

    def _take(self, rank: int, step: Step) -> None:
        for row in self.rows[rank]:
            if row and row[0] == step:
                row.popleft()
                self.left[rank].pop()


def _ways(costs: Costs, shape: PipelineShape, flow: int) -> list[float]:
    """Return the transfer time of what each stage sends in this direction."""
    transfer = costs.transfer if flow > 0 or costs.transfer_back is None else costs.transfer_back
    parts = [
        expand(cost, shape.num_links) for cost in (costs.transfer_work, transfer, costs.latency)
    ]
    links = [shape.link(stage, flow) for stage in range(shape.num_stages)]
    return [0.0 if link is None else sum(part[link] for part in parts) for link in links]
