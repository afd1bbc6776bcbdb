"""Measure the costs of a schedule's actions, and where a step's time goes, from recorded actions.

    own time of an action         its cost, including what came before it since the last action:
                                  forward, backward, update, calls
    end of a rank's wait          the cost of concurrent work: transfers, reductions, norms, gathers
    CPU time of other threads     the cost of transfers for the cores

Time without a core is nobody's cost and thus in none of them; it results from the simulation.
Forward and backward times are also kept for each micro-batch, because stages whose times vary wait
for each other.

Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from hybridpar.runtime.recording import Event
from hybridpar.schedules.kinds import ACTION_SPECS, BESIDE, COMPUTE, MOVES, PER_BATCH, Kind
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.reporting.trace import RankEvents, transfer_times

CALLS = tuple(kind for kind in Kind if kind in BESIDE - MOVES - {Kind.HOST})
VARYING = tuple(kind for kind in Kind if kind in COMPUTE and ACTION_SPECS[kind].part_of is None)
_FEWEST_CORES = 0.1
_MOST_VARYING = 128  # most micro-batches whose own times are kept
_SHARED_ENOUGH = 0.02  # least share of the recorded time that shows how cores are shared


@dataclass(frozen=True)
class StepParts:
    """StepParts of a step's time on one rank; all but `beside` add up to it.

    Attributes:
        compute: Forward and backward.
        optimizer: Norm and update.
        calls: Issuing transfers and reductions.
        between: Time between actions (Python).
        waiting: Waiting for other ranks.
        no_core: Ready to run, while other work had the core.
        beside: CPU time of the rank's other threads, which carry the transfers.
        host: Waiting for the host optimizer.
        state: Waiting for state that moves between tiers or among replicas, and for activations that
            are offloaded or reloaded.
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
    """Costs of a run, and the measured step time, idle shares and parts of the time by rank."""

    costs: Costs
    num_batches: int
    step_time: float
    idle: tuple[float, ...]
    parts: tuple[StepParts, ...]


def measure(ranks: Sequence[RankEvents], shape: PipelineShape, *, tied: bool) -> Measured | None:
    """Return costs and times of recorded batches, or None for fewer than three whole batches.

    Step time and costs are means over the same typical batches: the middle half by their time on
    the first stage, so that rare delays count in neither.

    tied: whether the first and the last stage reduce a tied embedding together.
    """
    first_uses = {r.rank: _first_forwards(r.events, shape.num_microbatches) for r in ranks}
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
    places = [[r for r in ranks if r.stage == s] for s in range(shape.num_ranks)]
    parts = tuple(_mean([_parts(r, typical_events[r.rank]) for r in place]) for place in places)
    idle = tuple(p.waiting / sum(astuple(replace(p, beside=0.0))) for p in parts)
    costs = _costs(places, typical_events, shape, tied=tied)
    return Measured(costs, len(typical), fmean(step for step, _ in typical), idle, parts)


def _costs(
    places: Sequence[Sequence[RankEvents]],
    typical: Mapping[int, list[list[Event]]],
    shape: PipelineShape,
    *,
    tied: bool,
) -> Costs:
    """Return costs: means of action times over typical batches, medians for concurrent work."""
    ranks = [r for place in places for r in place]
    m = shape.num_microbatches

    def times(kind: Kind) -> list[list[float]]:
        """Return own times by stage (or by rank), batch by batch in the order of micro-batches.

        This order keeps slowdowns aligned that affect all stages at once. Segments of an action,
        and both parts of a split backward, count as one.
        """
        kinds = {kind, *(part for part, row in ACTION_SPECS.items() if row.part_of is kind)}
        is_of_stage = kind in COMPUTE
        num_places = shape.num_stages if is_of_stage else shape.num_ranks
        return [
            [
                time
                for r in places[shape.rank_of(stage)]
                for batch in typical[r.rank]
                for time in _whole(batch, kinds, stage if is_of_stage else None, m)
            ]
            for stage in range(num_places)
        ]

    def work(kind: Kind) -> tuple[float, ...]:
        return tuple(map(_mean_or_0, times(kind)))

    def under_way(kind: Kind) -> tuple[float, ...]:
        return tuple(_under_way(place, kind) for place in places)

    links = [list(transfer_times(ranks, link)) for link in range(shape.num_links)]
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
    """Return the time of the input part of a backward, by stage; None if no backward was split.

    A stage with unsplit backwards only is assumed to have the share of the other stages.
    """
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
    """Return own times of a stage's actions in the order of micro-batches, segments summed."""
    sums: dict[tuple[int, int], float] = {}
    for e in batch:
        if e.action.kind in kinds and stage in (None, e.action.stage):
            # segments of a per-batch action may lie on both sides of the next batch's start
            number = 0 if e.action.kind in PER_BATCH else e.action.microbatch
            key = (number, e.action.stage)
            sums[key] = sums.get(key, 0.0) + e.own + e.gap
    return [sums[key] for key in sorted(sums, key=lambda key: key[0] % m)]


def _variation(times: Sequence[float]) -> tuple[float, ...]:
    """Return the times as multiples of their mean."""
    kept = times[:_MOST_VARYING]
    mean = _mean_or_0(kept)
    return tuple(max(0.0, time) / mean for time in kept) if mean else (1.0,)


def _mean_or_0(values: Sequence[float]) -> float:
    return max(0.0, fmean(values)) if values else 0.0


def _median_or_0(values: Iterable[float]) -> float:
    found = list(values)
    return max(0.0, median(found)) if found else 0.0


def _first_forwards(events: Sequence[Event], m: int) -> dict[int, int]:
    """Return the index of the event that begins each batch."""
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
    """Yield how long collectives of an action kind take after the last rank has started them.

    A norm counts from the end of the reductions, if it had to queue behind them.
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
            # the earliest, because some ranks notice the end late
            over = min(e.over for e in events if e.over is not None)
            yield over - max(reduced.get(number, 0.0), *(e.end for e in events))


def _under_way(place: Sequence[RankEvents], kind: Kind) -> float:
    """Return the median time of work that actions start; of HOST, until all weights are back."""
    return _median_or_0(
        e.over - e.end
        for r in place
        for e in r.events
        if e.action.kind is kind and e.over is not None
    )


def _beside(ranks: Sequence[RankEvents]) -> float:
    """Return the CPU time of other threads for each transfer."""
    sends = sum(
        ACTION_SPECS[e.action.kind].matching_recv is not None for r in ranks for e in r.events
    )
    return sum(r.usage.beside for r in ranks) / sends if sends else 0.0


def _cores(ranks: Sequence[RankEvents], num_ranks: int) -> float | None:
    """Return how many ranks of one pipeline can run at full speed at once on the machine's cores.

    If more ranks wanted to run: as many as ran on average, which is less than the number of cores
    because a scheduler takes time to find an idle one. Otherwise: the cores left by other programs.
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
    """Return the mean number of running ranks while at least `enough` were ready to run.

    None if that was hardly ever the case.
    """
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
    """Yield the spans in which the rank did not wait: start, end, and share of time with a core."""
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


def _parts(rank: RankEvents, batches: Sequence[Sequence[Event]]) -> StepParts:
    """Return mean parts of the time of these batches.

    Own times near 0 may be measured slightly below 0 for one action; means are at least 0.
    """
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
    # from the end of the last action before the batch to the end of the batch
    seconds = sum(batch[-1].end - batch[0].start + batch[0].gap for batch in batches) / len(batches)
    no_core = max(0.0, seconds - compute - update - calls - between - waiting - host - state)
    recorded = rank.events[-1].end - rank.events[0].start
    return StepParts(
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


def _mean(parts: Sequence[StepParts]) -> StepParts:
    return StepParts(
        *(fmean(getattr(p, name) for p in parts) for name in StepParts.__dataclass_fields__)
    )
