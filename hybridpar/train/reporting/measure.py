"""Costs of the steps of a run's schedule, and where its time goes, from the actions that its ranks
recorded.

    own time of an action         what it costs, with what came before it since the last one:
                                  forward, backward, update, calls
    until a waiting rank goes on  what goes on beside it costs: transfers, reductions, norms,
    gathers
    CPU time of other threads     what transfers cost the cores

So time without a core, which is nobody's cost, is in none of them: it comes out of the simulation.
Forward and backward are kept micro-batch by micro-batch, too: stages whose times vary wait for each
other.

Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from hybridpar.runtime.recording import Event
from hybridpar.schedules.kinds import (
    ACTION_SPECS,
    BESIDE,
    COMPUTE,
    OF_STASH,
    PER_BATCH,
    PER_ITEM,
    Kind,
)
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.reporting.trace import RankEvents, transfer_times

CALLS = tuple(kind for kind in Kind if kind in BESIDE - PER_ITEM.union(OF_STASH) - {Kind.HOST})
VARYING = tuple(kind for kind in Kind if kind in COMPUTE and ACTION_SPECS[kind].part_of is None)
_FEWEST_CORES = 0.1
_MOST_VARYING = 128  # micro-batches whose own times are kept
_SHARED_ENOUGH = 0.02  # of the recorded time, to say how cores are shared


@dataclass(frozen=True)
class Parts:
    """Parts of the time of a step on one rank; all but `beside` add up to it.

    compute: forward and backward. optimizer: norm and update. calls: issuing transfers and
    reductions. between: from one action to the next (Python). waiting: for other ranks. no_core:
    ready to go on, but other work had the core. beside: CPU time of its other threads, which carry
    the transfers. host: waiting for the optimizer on the host. state: waiting for the rank's state,
    between the tiers of a budget or among replicas.
    """

    compute: float
    optimizer: float
    calls: float
    between: float
    waiting: float
    no_core: float
    beside: float
    host: float = 0.0
    state: float = 0.0


@dataclass(frozen=True)
class Measured:
    """A run's costs, and what they should explain: its step time, idle shares, and where the time
    went, by stage."""

    costs: Costs
    num_batches: int
    step_time: float
    idle: tuple[float, ...]
    parts: tuple[Parts, ...]


def measure(ranks: Sequence[RankEvents], sizes: PipelineShape, *, tied: bool) -> Measured | None:
    """Costs and times of what was recorded; None where that is less than three whole batches.

    Step time and costs are means over the same typical batches, those in the middle half by their
    time on the first stage: so that what holds up a batch now and then counts in neither.
    tied: whether the first and the last stage reduce a tied embedding together.
    """
    first_uses = {r.rank: _first_forwards(r.events, sizes.num_microbatches) for r in ranks}
    batches = sorted(set.intersection(*map(set, first_uses.values())))
    if len(batches) < 3:
        return None
    head = next(r for r in ranks if r.stage == 0)
    starts = [head.events[first_uses[head.rank][batch]].start for batch in batches]
    steps = sorted(
        (end - start, batch) for (start, end), batch in zip(pairwise(starts), batches, strict=False)
    )
    margin = len(steps) // 4
    typical = steps[margin : len(steps) - margin]
    typical_events = {
        r.rank: [
            list(r.events[first_uses[r.rank][batch] : first_uses[r.rank][batch + 1]])
            for batch in sorted(batch for _, batch in typical)
        ]
        for r in ranks
    }
    places = [[r for r in ranks if r.stage == s] for s in range(sizes.num_ranks)]
    parts = tuple(_mean([_parts(r, typical_events[r.rank]) for r in place]) for place in places)
    idle = tuple(p.waiting / sum(astuple(replace(p, beside=0.0))) for p in parts)
    costs = _costs(places, typical_events, sizes, tied=tied)
    return Measured(costs, len(typical), fmean(step for step, _ in typical), idle, parts)


def _costs(
    places: Sequence[Sequence[RankEvents]],
    typical: Mapping[int, list[list[Event]]],
    sizes: PipelineShape,
    *,
    tied: bool,
) -> Costs:
    """Costs of actions are means over the typical batches of the ranks of a place in the pipeline;
    those of what goes on beside them are medians."""
    ranks = [r for place in places for r in place]
    m = sizes.num_microbatches

    def times(kind: Kind) -> list[list[float]]:
        """Own times by stage, batch by batch in the order of micro-batches: so what slows down all
        stages at once still does. Those of a rank are by rank. Parts of an action, and of a
        backward, count as one."""
        kinds = {kind, *(part for part, row in ACTION_SPECS.items() if row.part_of is kind)}
        return [
            [
                time
                for r in places[sizes.rank_of(stage)]
                for batch in typical[r.rank]
                for time in _whole(batch, kinds, stage if kind in COMPUTE else None, m)
            ]
            for stage in range(sizes.num_stages if kind in COMPUTE else sizes.num_ranks)
        ]

    def work(kind: Kind) -> tuple[float, ...]:
        return tuple(map(_mean_or_0, times(kind)))

    def under_way(kind: Kind) -> tuple[float, ...]:
        return tuple(_under_way(place, kind) for place in places)

    links = [list(transfer_times(ranks, link)) for link in range(sizes.num_links)]
    all_links = [seconds for link in links for seconds in link]
    ends = [*places[0], *places[-1]] if tied else []
    reducing = [ends if tied and place in (places[0], places[-1]) else place for place in places]
    return Costs(
        work(Kind.F),
        work(Kind.B),
        work(Kind.UPDATE),
        {kind: work(kind) for kind in CALLS},
        reduce=tuple(_median_or_0(_collectives(group, Kind.REDUCE)) for group in reducing),
        norm=_median_or_0(_collectives(ranks, Kind.NORM)),
        gather=tuple(_median_or_0(_collectives(place, Kind.UPDATE)) for place in places),
        latency=tuple(_median_or_0(link or all_links) for link in links),
        tied=tied,
        host=under_way(Kind.HOST),
        offload=under_way(Kind.OFFLOAD),
        reload=under_way(Kind.RELOAD),
        blocking_norm=ranks[0].host.cores > 0,
        cores=_cores(ranks, len(places)),
        transfer_work=_beside(ranks),
        variation={kind: tuple(map(_variation, times(kind))) for kind in VARYING},
        backward_input=_inputs(times(Kind.I), times(Kind.W), work(Kind.B)),
    )


def _inputs(
    inputs: Sequence[Sequence[float]], weights: Sequence[Sequence[float]], whole: Sequence[float]
) -> tuple[float, ...] | None:
    """Time of a backward to the input, by stage; None: no backward was in two parts. Where a stage
    had only whole ones it is the share that it was on the others."""
    both = [
        (fmean(i), fmean(i) + fmean(w)) for i, w in zip(inputs, weights, strict=True) if i and w
    ]
    if not both:
        return None
    share = sum(i for i, _ in both) / sum(total for _, total in both)
    return tuple(_mean_or_0(i) if i else share * b for i, b in zip(inputs, whole, strict=True))


def _whole(
    batch: Sequence[Event], kinds: Collection[Kind], stage: int | None, m: int
) -> list[float]:
    """Own times of a stage's actions of these kinds, in the order of micro-batches: of each the sum
    of its parts."""
    sums: dict[tuple[int, int], float] = {}
    for e in batch:
        if e.action.kind in kinds and stage in (None, e.action.stage):
            # parts of what is of a batch may lie on both sides of where the next one begins
            key = 0 if e.action.kind in PER_BATCH else e.action.microbatch, e.action.stage
            sums[key] = sums.get(key, 0.0) + e.own + e.gap
    return [sums[key] for key in sorted(sums, key=lambda key: key[0] % m)]


def _variation(times: Sequence[float]) -> tuple[float, ...]:
    """The times as multiples of their mean."""
    kept = times[:_MOST_VARYING]
    mean = _mean_or_0(kept)
    return tuple(max(0.0, time) / mean for time in kept) if mean else (1.0,)


def _mean_or_0(values: Sequence[float]) -> float:
    return max(0.0, fmean(values)) if values else 0.0


def _median_or_0(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, median(found)) if found else 0.0


def _first_forwards(events: Sequence[Event], m: int) -> dict[int, int]:
    """Index of the event with which each batch begins."""
    first = min((e.action.stage for e in events), default=0)
    return {
        e.action.microbatch // m: i
        for i, e in enumerate(events)
        if e.action.kind is Kind.F
        and e.action.stage == first
        and e.action.microbatch % m == 0
        and e.action.part == 0
    }


def _collectives(ranks: Sequence[RankEvents], kind: Kind) -> Iterator[float]:
    """Seconds for which what actions of that kind start goes on once the last of these ranks has
    started it.

    A norm goes on once the reductions are over, too, where it has to wait for these in a queue.
    """
    batches: dict[int, list[Event]] = {}
    reduced: dict[int, float] = {}
    for e in (e for r in ranks for e in r.events if e.over is not None):
        number = e.action.microbatch
        if e.action.kind is kind:
            batches.setdefault(number, []).append(e)
        elif e.action.kind is Kind.REDUCE and kind is Kind.NORM:
            reduced[number] = max(reduced.get(number, 0.0), e.over or 0.0)
    for number, events in batches.items():
        if len(events) == len(ranks):
            # ranks that look for it late do not count
            over = min(e.over for e in events if e.over is not None)
            yield over - max(reduced.get(number, 0.0), *(e.end for e in events))


def _under_way(place: Sequence[RankEvents], kind: Kind) -> float:
    """Seconds for which what actions of that kind start goes on. HOST: until all its weights are
    there."""
    return _median_or_0(
        e.over - e.end
        for r in place
        for e in r.events
        if e.action.kind is kind and e.over is not None
    )


def _beside(ranks: Sequence[RankEvents]) -> float:
    """CPU time of other threads for each transfer."""
    sends = sum(
        ACTION_SPECS[e.action.kind].matching_recv is not None for r in ranks for e in r.events
    )
    return sum(r.usage.beside for r in ranks) / sends if sends else 0.0


def _cores(ranks: Sequence[RankEvents], num_ranks: int) -> float | None:
    """Number of ranks of one pipeline that can work at full speed at once, given that all on a
    machine share its cores.

    Where more of them wanted to: as many as did, on average, which is fewer than there are cores,
    because a scheduler takes time to find an idle one. Else those that other programs left.
    """
    shares = []
    for name in {r.host.name for r in ranks}:
        here = [r for r in ranks if r.host.name == name]
        usage = here[0].usage
        host = here[0].host
        if not host.cores:
            return None
        seconds = usage.seconds or math.inf
        others = max(0.0, usage.machine - sum(r.usage.process for r in here)) / seconds
        beside = sum(r.usage.beside for r in here) / seconds
        working = _working(here, host.cores / host.threads)
        cores = host.cores - others
        if working is not None:
            cores = min(host.cores, host.threads * working + beside)
        shares.append(max(_FEWEST_CORES, cores) / (host.threads * len(here)))
    return num_ranks * fmean(shares)


def _working(ranks: Sequence[RankEvents], enough: float) -> float | None:
    """Number of the ranks that were at work, on average over the times when at least `enough` did
    not wait for others; None where there was hardly such a time."""
    changes = sorted(
        change
        for r in ranks
        for since, until, speed in _ready(r)
        for change in ((since, 1, speed), (until, -1, -speed))
    )
    seconds = work = speed = 0.0
    ready = 0
    for (time, more, faster), (until, _, _) in pairwise(changes):
        ready += more
        speed += faster
        if ready >= enough:
            seconds += until - time
            work += speed * (until - time)
    recorded = changes[-1][0] - changes[0][0] if changes else 0.0
    return work / seconds if seconds > _SHARED_ENOUGH * recorded else None


def _ready(rank: RankEvents) -> Iterator[tuple[float, float, float]]:
    """Yields when the rank did not wait for others: since, until, and the share of that time in
    which it had a core."""
    before = rank.events[0].start
    for e in rank.events:
        edges = [before, *(edge for wait in e.waits for edge in wait), e.end]
        spans = [
            (since, until)
            for since, until in zip(edges[::2], edges[1::2], strict=True)
            if until > since
        ]
        seconds = sum(until - since for since, until in spans)
        for since, until in spans:
            yield since, until, min(1.0, (e.own + e.gap) / seconds)
        before = e.end


def _parts(rank: RankEvents, batches: Sequence[Sequence[Event]]) -> Parts:
    """The mean over these batches. Own times that are too short to be told may be a little below 0,
    of one action."""
    events = [e for batch in batches for e in batch]

    def mean(seconds: Iterable[float]) -> float:
        return max(0.0, sum(seconds)) / len(batches)

    def own(belongs: Callable[[Kind], bool]) -> float:
        return mean(e.own for e in events if belongs(e.action.kind))

    optimizer = (Kind.NORM, Kind.UPDATE)
    compute = own(COMPUTE.__contains__)
    update = own(optimizer.__contains__)
    calls = own(lambda kind: kind not in COMPUTE and kind not in optimizer)
    updates = {Kind.UPDATE} if any(e.action.kind is Kind.HOST for e in events) else set()
    between = mean(e.gap for e in events)
    host = mean(e.waited for e in events if e.action.kind in updates)
    state = mean(e.waited_for_state for e in events if e.action.kind not in updates)
    waiting = mean(e.waited for e in events) - host - state
    # from the end of what came before the batch to the end of the batch
    seconds = sum(batch[-1].end - batch[0].start + batch[0].gap for batch in batches) / len(batches)
    no_core = max(0.0, seconds - compute - update - calls - between - waiting - host - state)
    recorded = rank.events[-1].end - rank.events[0].start
    return Parts(
        compute,
        update,
        calls,
        between,
        waiting,
        no_core,
        rank.usage.beside * seconds / recorded,
        host,
        state,
    )


def _mean(parts: Sequence[Parts]) -> Parts:
    return Parts(*(fmean(getattr(p, name) for p in parts) for name in Parts.__dataclass_fields__))
