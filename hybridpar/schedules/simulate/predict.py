"""The time that a schedule takes with given costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Plan
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.passes.offload import most_away
from hybridpar.schedules.passes.segments import Division
from hybridpar.schedules.schedule_table import PipelineShape, ScheduleOptions, make_schedule
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.schedules.simulate.steady import fewer, repeats, time_of_more
from hybridpar.schedules.simulate.timeline import Timeline

_STEADY_BATCHES = 8
_BATCHES_TO_SETTLE = 5
"""Batches without a drain after which most pipelines repeat themselves."""
_FEWEST = 8
_STEADY = 0.999
_KEPT = 32
"""Number of plans in memory; one of 32 stages and 100 micro-batches takes 20 MB, and of as few as
show a step 5."""
_WORTH = 1.01
"""Step time that counts as the same: of a smaller early switch over the paper's, with activations
away over without."""
_ALL_TRIED = 16
"""Numbers of micro-batches of a rank that are simulated one by one."""
_WORTH_OF_TWO = 1.02
"""Step time that counts as equal with costs of two trials."""


def predict_timeline(
    options: ScheduleOptions, shape: PipelineShape, costs: Costs, num_batches: int = 0
) -> Timeline:
    """Simulate so many batches (0: as many as show all variations). Raises: ConfigError."""
    varying = max((len(row) for rows in costs.variation.values() for row in rows), default=0)
    # which micro-batches leave differs from batch to batch
    if not num_batches and not varying and not options.offload and make_schedule(options).flush:
        receives = any(costs.calls.get(kind) for kind in (Kind.RECV_F, Kind.RECV_B))
        timeline = simulate(_plan(options, shape, 2 + receives), costs)
        if timeline.drained(shape.num_microbatches):
            return timeline
    enough = _STEADY_BATCHES + 4 * -(-shape.num_ranks // shape.num_microbatches)
    enough += -(-2 * varying // shape.num_microbatches)
    return simulate(_plan(options, shape, num_batches or enough), costs)


def predict_step_time(options: ScheduleOptions, shape: PipelineShape, costs: Costs) -> float:
    """Return the steady-state time of a batch, from as few micro-batches and batches as show it.

    If the pipeline never drains, each further micro-batch takes as long as the previous one. If a
    few of them would wait for a reduction that more would hide, all are simulated.

    Raises: ConfigError.
    """
    m = shape.num_microbatches
    schedule = make_schedule(options)
    if not schedule.flush:
        few = max(2 * shape.num_ranks, schedule.warmup(shape, 0)) + 2 * _FEWEST
        least = max(
            map(
                sum,
                zip(
                    *(expand(each, shape.num_stages) for each in (costs.forward, costs.backward)),
                    strict=True,
                ),
            )
        )
        whole = m <= 2 * few or options.early_switch is not None
        return extended(
            partial(_endless, options, shape, costs), shape, few if not whole else m, least
        )
    for few in fewer(schedule, shape) if not costs.variation and not options.offload else ():
        small = replace(shape, num_microbatches=few)
        timeline, takes = _batch(options, small, costs)
        if (each := time_of_more(timeline, schedule, small)) is not None:
            return takes + (m - few) * each
    return _batch(options, shape, costs)[1]


def _batch(options: ScheduleOptions, shape: PipelineShape, costs: Costs) -> tuple[Timeline, float]:
    """Return a timeline of a schedule that drains, and the time of a batch in it.

    With a NORM all ranks start their updates at once, and nothing else is under way then, so one
    batch lasts until the next updates. More batches are simulated if work shares cores with an
    update, or if receives that are posted before it take time, or if the sender knows of them later
    than a forward.
    """
    calls = any(costs.calls.get(kind) for kind in (Kind.RECV_F, Kind.RECV_B))
    far = max(expand(costs.latency, shape.num_links), default=0.0) > min(
        expand(costs.forward, shape.num_stages)
    )
    others = costs.cores or costs.network or costs.variation or options.offload or options.host
    if not options.clip or calls or far or others:
        timeline = predict_timeline(options, shape, costs)
        return timeline, timeline.step_time(shape.num_microbatches)
    update, gather = (expand(each, shape.num_ranks) for each in (costs.update, costs.gather))
    timeline = simulate(
        _plan(options, shape, 1), costs, ready=[u + g for u, g in zip(update, gather, strict=True)]
    )
    return timeline, timeline.starts[0][-1]


def _endless(options: ScheduleOptions, shape: PipelineShape, costs: Costs, m: int) -> float:
    shape = replace(shape, num_microbatches=m)
    return repeats(
        predict_timeline(options, shape, costs, _BATCHES_TO_SETTLE), m
    ) or predict_timeline(options, shape, costs).step_time(m)


def extended(takes: Callable[[int], float], shape: PipelineShape, few: int, least: float) -> float:
    """Return the time of a batch, extrapolated from `few` micro-batches and some more. All are
    simulated if each additional one takes less than `least`, the time of the costliest rank.
    """
    m = shape.num_microbatches
    if few >= m:
        return takes(m)
    more = shape.num_ranks + _FEWEST
    if shape.is_ring:  # rounds of interleaved micro-batches are then alike
        more += -more % shape.num_ranks
    first = takes(few)
    each = (takes(few + more) - first) / more
    return first + (m - few) * each if each >= _STEADY * least else takes(m)


def _plan(options: ScheduleOptions, shape: PipelineShape, num_batches: int) -> Plan:
    """Return a plan, which is kept: a planner asks for it again with other costs."""
    if options.gather and make_schedule(options).flush:
        # each batch ends before it matters when an update comes
        options = replace(options, gather=False)
    return _kept_plan(options.steady, shape, num_batches)


@lru_cache(maxsize=_KEPT)
def _kept_plan(options: ScheduleOptions, shape: PipelineShape, num_batches: int) -> Plan:
    return make_plan(options, shape, 0, num_batches)


def exposed_on_host(
    options: ScheduleOptions, shape: PipelineShape, costs: Costs, parts: int | Division
) -> tuple[float, float]:
    """Return the steady-state time of a step with a host optimizer, and how much longer that is
    than with a host that takes no time. Raises: ConfigError.
    """
    plan = make_plan(options.steady, shape, 0, _STEADY_BATCHES, parts)
    times = [
        simulate(plan, one).step_time(shape.num_microbatches)
        for one in (costs, replace(costs, to_host=0.0, host=0.0, from_host=0.0))
    ]
    return times[0], times[0] - times[1]


def smallest_early_switch(costs: Costs, shape: PipelineShape, options: ScheduleOptions) -> int:
    """Return the smallest L of 2bw's early switch that costs no time: its simulated step takes at
    most 1 % longer than with the paper's rule.

    options: options of 2bw, whose early switch is ignored. Raises: ConfigError if it cannot run on
    this shape.
    """
    rule = replace(options, early_switch=None)
    m = shape.num_microbatches
    paper = predict_timeline(rule, shape, costs).step_time(m)
    for switch in range(m):
        early = replace(rule, early_switch=switch)
        try:
            make_schedule(early).check_shape(shape)
        except ConfigError:
            continue
        if predict_timeline(early, shape, costs).step_time(m) <= _WORTH * paper:
            return switch
    raise AssertionError("the paper's rule is one of them")


def free_to_leave(
    costs: Costs,
    shape: PipelineShape,
    options: ScheduleOptions,
    *,
    resident: Costs | None = None,
    at_most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return, for each rank, how many micro-batches may be offloaded at once so that the simulated
    step takes at most 1 % longer than with all in memory. The first rank, which has most in flight,
    gets as many as possible, then the next one.

    Activations can be offloaded at no cost if both copies fit between forward and backward, and the
    engines have time for all copies.

    Args:
        costs: Include the times of offloading and reloading a micro-batch.
        resident: Costs of ranks that offload nothing, if these were measured in a separate trial,
            such as with CUDA graphs. Two trials never take the same time, so the step may then take
            2 % longer.
        at_most: Numbers that fit into the slow tier, by rank.

    Raises: ConfigError.
    """
    schedule = make_schedule(options)

    def takes(away: Sequence[int]) -> float:
        return time_with_away(costs, shape, options, away, resident=resident)

    most = [most_away(schedule, shape, rank) for rank in range(shape.num_ranks)]
    if at_most is not None:
        most = list(map(min, most, at_most))
    chosen = [0] * shape.num_ranks
    limit = (_WORTH if resident is None else _WORTH_OF_TWO) * takes(chosen)
    if takes(most) <= limit:
        return tuple(most)
    for rank, bound in enumerate(most):

        def is_free(number: int, rank: int = rank) -> bool:
            return takes([*chosen[:rank], number, *chosen[rank + 1 :]]) <= limit

        chosen[rank] = largest(is_free, bound)
    return tuple(chosen)


def largest(holds: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to `bound` for which `holds`; 0 if there is none.

    It need not be monotone: step times are not, because the number decides which micro-batches are
    offloaded. If trying all would take long, return one for which it holds while it does not hold
    for the next.
    """
    if bound <= _ALL_TRIED:
        return next((number for number in range(bound, 0, -1) if holds(number)), 0)
    least = 0
    while least < bound:
        number = (least + bound + 1) // 2
        least, bound = (number, bound) if holds(number) else (least, number - 1)
    return least


def time_with_away(
    costs: Costs,
    shape: PipelineShape,
    options: ScheduleOptions,
    away: Sequence[int],
    *,
    resident: Costs | None = None,
) -> float:
    """Return the steady-state time of a step with so many micro-batches of each rank offloaded.

    resident: as in `free_to_leave`. Raises: ConfigError.
    """
    if resident is not None:
        homes = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        costs = costs.with_ranks_of(resident, [number == 0 for number in away], homes)
    timeline = predict_timeline(replace(options, offload=tuple(away)), shape, costs)
    return timeline.step_time(shape.num_microbatches)
