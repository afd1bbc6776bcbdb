"""The order of V-shaped pipelines: a rank holds two virtual stages, stage r on the way down and
stage 2p-1-r on the way back.

A gradient returns to a rank soon after its second virtual stage's forward, so activations of later
stages are short-lived, and all ranks hold about as many. Three orders, by the activations that a
rank may hold (in micro-batches of a whole rank; 1f1b's first rank holds p):

    full    ZB-V      p          for batches that drain: (p-1)F/2 of idle time in each if F = I = W
    half    V-Half    p/2 + 1    for 2bw: no idle time in the steady state
    min     V-Min     p/3 + 1    for 2bw: no idle time in the steady state if F = I = W

half and min repeat a pattern of six slots, in each of which a rank runs an F, I or W of a virtual
stage; a slot is the time of one of them. Slots in which a rank runs micro-batch 0, p = 4, half (b:
the second virtual stage):

    rank 0   F 0    Fb 10    Ib 14    Wb 15    I 25    W 29        micro-batch k: 6k later
    rank 1   F 2    Fb 9     Ib 16    Wb 17    I 24    W 25
    rank 2   F 4    Fb 8     Ib 18    Wb 19    I 23    W 27
    rank 3   F 6    Fb 7     Ib 20    Wb 21    I 22    W 23

A rank never has two steps in one slot, so the pattern never waits, and never has to drain: 2bw
repeats it without end. If it drains between batches, steps run earlier than in the pattern if they
can, and Ws fill the gaps (fill.py). Idle time then, as a share of the work, p = 4, m = 8, F = I =
W: full 6 %, half 10 %, min 23 %.

Source: arXiv 2405.15362 (offsets of V-Half and V-Min, building blocks), 2401.10241 (ZB-V).

p = ranks, m = micro-batches of a batch, r = rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations
from types import MappingProxyType

from hybridpar.schedules.kinds import Kind, Step
from hybridpar.schedules.orders.fill import Room, fill, in_any_order
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.proof.liveness import most_held
from hybridpar.schedules.simulate.costs import Costs

PERIOD = 6
"""Slots from a micro-batch to the next: two forwards, and two backwards of two parts."""


def _half(p: int, r: int) -> tuple[int, int, int, int]:
    more = 0 if p % 2 else 3
    return 2 * r, 3 * p - r - 2, 3 * p + more + 2 * r - 1, 6 * p + more - r - 2


def _min(p: int, r: int) -> tuple[int, int, int, int]:
    more = 0 if p % 3 else 2
    return r, 2 * p - r - 1, 2 * p + more + r, 4 * p + more - r - 1


_OFFSETS = {"half": _half, "min": _min}
"""Slots of F and Fb, Ib and I of micro-batch 0 on a rank."""
_FEW = 4096
"""Ranks times micro-batches up to which an order is searched for batches that never fill the
pipeline."""
ENDLESS = tuple(_OFFSETS)
"""Orders of schedules that never drain."""


@lru_cache(maxsize=256)
def slots(activations: str, num_ranks: int, rank: int) -> Mapping[tuple[Kind, int], int]:
    """Return the slots in which a rank runs micro-batch 0, by kind and virtual stage. The two Ws
    take the remaining slots of the period, each after its I, and together as early as possible.
    """
    there, back, back_again, there_again = _OFFSETS[activations](num_ranks, rank)
    taken = {slot % PERIOD for slot in (there, back, back_again, there_again)}
    free = [slot for slot in range(PERIOD) if slot not in taken]
    assert len(free) == 2, f"two things in a slot: {activations}, {num_ranks} ranks, rank {rank}"

    def after(slot: int, residue: int) -> int:
        return slot + 1 + (residue - slot - 1) % PERIOD

    ways = [
        (after(back_again, one), after(there_again, other)) for one, other in permutations(free)
    ]
    weights_back, weights = min((way for way in ways if way[0] < way[1]), key=sum)
    return MappingProxyType(
        {
            (Kind.F, 0): there,
            (Kind.F, 1): back,
            (Kind.I, 1): back_again,
            (Kind.W, 1): weights_back,
            (Kind.I, 0): there_again,
            (Kind.W, 0): weights,
        }
    )


def slot_of(shape: PipelineShape, activations: str, step: Step) -> int:
    """Return the slot of a step in a pattern that never ends."""
    kind, stage, k = step
    chunk = stage // shape.num_ranks
    return slots(activations, shape.num_ranks, shape.rank_of(stage))[kind, chunk] + PERIOD * k


def forwards_before(shape: PipelineShape, activations: str, step: Step) -> int:
    """Return how many micro-batches a rank has started before one of its steps."""
    first = slot_of(shape, activations, (Kind.F, shape.rank_of(step[1]), 0))
    return -((first - slot_of(shape, activations, step)) // PERIOD)


def warmup(shape: PipelineShape, rank: int, *, activations: str) -> int:
    """Return how many micro-batches a rank starts before it has finished the first."""
    return forwards_before(shape, activations, (Kind.W, rank, 0))


def pattern(
    shape: PipelineShape, rank: int, activations: str, first: int, num: int | None
) -> Iterator[Step]:
    """Yield the steps of a rank for `num` micro-batches (None: endless), in the order of slots."""
    stages = shape.stages_of(rank)
    of_slots = slots(activations, shape.num_ranks, rank)
    in_turn = sorted(
        (slot % PERIOD, slot // PERIOD, kind, stages[chunk])
        for (kind, chunk), slot in of_slots.items()
    )
    longest = max(of_slots.values()) // PERIOD
    period = first
    while num is None or period < first + num + longest:
        for _, later, kind, stage in in_turn:
            k = period - later
            if k >= first and (num is None or k < first + num):
                yield kind, stage, k
        period += 1


@lru_cache(maxsize=256)
def batch_order(shape: PipelineShape, rank: int, activations: str) -> tuple[Step, ...]:
    """Return the steps of a rank for a batch that drains, whose micro-batches count from 0."""
    if activations == "full":
        m = shape.num_microbatches
        p = shape.num_ranks
        as_comes = shape.virtual_stages > 2 or m <= p <= _FEW // m
        return _as_comes(shape)[rank] if as_comes else tuple(_Full(shape, rank).steps())
    return _filled(shape, activations)[rank]


@lru_cache(maxsize=8)
def _as_comes(shape: PipelineShape) -> tuple[tuple[Step, ...], ...]:
    """Return an order in which each step runs as soon as it can, in the memory of 1f1b's first
    rank, as if F, I and W took equally long.
    """
    return in_any_order(
        shape, Costs(1, 2), Room((1,) * shape.num_stages, (shape.num_stages,) * shape.num_ranks)
    )


@lru_cache(maxsize=8)
def _filled(shape: PipelineShape, activations: str) -> tuple[tuple[Step, ...], ...]:
    """Return the pattern of all ranks for a batch that drains, in the memory of the fullest rank:
    steps run early if they can, and Ws fill the gaps, as if F, I and W took equally long.
    """
    p = shape.num_ranks
    patterns = [
        tuple(pattern(shape, rank, activations, 0, shape.num_microbatches)) for rank in range(p)
    ]
    return fill(
        patterns,
        shape,
        Costs(1, 2),
        Room((1,) * shape.num_stages, (max(map(most_held, patterns)),) * p),
    )


@lru_cache(maxsize=256)
def room(shape: PipelineShape, activations: str) -> int:
    """Return the most micro-batches that any rank holds, counted on each virtual stage."""
    if activations == "full":
        return shape.num_stages
    return max(
        most_of_rank(shape, rank, activations, drains=False) for rank in range(shape.num_ranks)
    )


class _Full:
    """ZB-V: as many forwards ahead as 1f1b's first rank holds, then one F and one backward
    alternately; Ws fill the end.
    """

    def __init__(self, shape: PipelineShape, rank: int):
        self._m = shape.num_microbatches
        self._p = shape.num_ranks
        self._r = rank
        self._stages = shape.stages_of(rank)
        self._until = max(self._m, 2 * self._p - 1)  # a short batch skips what it lacks
        self._done = {
            (kind, stage): 0 for kind in (Kind.F, Kind.I, Kind.W) for stage in self._stages
        }

    def steps(self) -> Iterator[Step]:
        p = self._p
        r = self._r
        there, back = self._stages
        for _ in range(2 * (p - r) - 1):
            yield from self._next(Kind.F, there)
        for _ in range(r):
            yield from self._next(Kind.F, back)
            yield from self._next(Kind.F, there)
        for _ in range(p - r):
            for kind in (Kind.F, Kind.I, Kind.W):
                yield from self._next(kind, back)
        while self._done[Kind.F, back] < self._until:
            for stage in (there, back):
                for kind in (Kind.F, Kind.I, Kind.W):
                    yield from self._next(kind, stage)
        for _ in range(r):
            yield from self._next(Kind.I, there)
            yield from self._next(Kind.I, back)
        for _ in range(p - r):
            yield from self._next(Kind.I, there)
            yield from self._next(Kind.W, there)
        for stage in (back, there):
            while self._done[Kind.W, stage] < self._until:
                yield from self._next(Kind.W, stage)

    def _next(self, kind: Kind, stage: int) -> Iterator[Step]:
        k = self._done[kind, stage]
        if k < self._until:
            self._done[kind, stage] = k + 1
        if k < self._m:
            yield kind, stage, k


@lru_cache(maxsize=1 << 14)
def most_of_rank(shape: PipelineShape, rank: int, activations: str, *, drains: bool) -> int:
    """Return the most micro-batches that a rank holds, counted on each virtual stage."""
    if drains:
        return most_held(batch_order(shape, rank, activations))
    number = PERIOD + sum(slots(activations, shape.num_ranks, rank).values()) // PERIOD
    return most_held(pattern(shape, rank, activations, 0, number))
