"""A lower bound on a step time, for a search that looks at the most promising configurations first. Units: seconds."""

from __future__ import annotations

from itertools import accumulate

from hybridpar.pipeline.plan.schedules import Schedule
from hybridpar.planner.cost import StepCost

_MEASURED = 0.99


def least_time(cost: StepCost) -> float:
    """Time that a step takes at least: the costliest rank's work, or the slowest link's, with what cannot overlap."""
    m, chunks = cost.sizes.num_microbatches, cost.sizes.chunks
    schedule = cost.ordering.make() if cost.config.pipeline.early_switch != "auto" else None
    flush = schedule is not None and schedule.flush
    idle = _idle(cost, schedule) if schedule and flush else [0.0] * cost.pp
    work = max(m * rank.compute + rank.update + rank.norm + waits for rank, waits in zip(cost.ranks, idle, strict=True))
    # a micro-batch takes a link once for each chunk of the rank before it, but for the model's end; on a V once
    link = max((m * (1 if cost.sizes.is_v else chunks - (r == cost.pp - 1)) * taken
                for links in (cost.links, cost.links_back) for r, (taken, _, _) in enumerate(links)), default=0.0)
    reduction = max(cost.reduction(rank, r)[0] for r, rank in enumerate(cost.ranks))
    return max(work, link, reduction, _round_trips(cost, schedule)
               if schedule and not flush and not schedule.activations else 0.0)


def _idle(cost: StepCost, schedule: Schedule) -> list[float]:
    """Least time that each rank has nothing to do in a pipeline that drains between batches.

        rank r   . wait for F of stages before | F, as many as it runs ahead | wait for the first I | .. | last I | W

    Its first I comes when the first micro-batch has been forward on all stages and back on those behind it. After its
    last I those before it have theirs to do, beside which it has the W that are left, and rank 0 one W more. (A whole
    backward is an I.) On a V, where a rank has both ends of the way: only what stages before it take at first.
    """
    sizes, stages = cost.sizes, cost.stages
    inputs = [stage.backward for stage in stages]
    if cost.config.pipeline.split_backward:
        inputs = cost.backward_input or [0.5 * backward for backward in inputs]
    links = [] if sizes.is_v else [(sum(there), sum(back)) for there, back in zip(
        cost.links, cost.links_back, strict=True)]
    hops = [links[s % cost.pp] if links else (0.0, 0.0) for s in range(sizes.num_stages - 1)]
    there = [0.0, *accumulate(stage.forward + hop for stage, (hop, _) in zip(stages, [*hops, (0.0, 0.0)], strict=True))]
    back = [0.0, *accumulate(i + hop for i, (_, hop) in zip(inputs, [*hops, (0.0, 0.0)], strict=True))]
    if schedule.activations:
        return there[: cost.pp]
    found = []
    for r in range(cost.pp):
        own = sizes.stages_of(r)
        ahead = min(schedule.warmup(sizes, r), sizes.num_microbatches * sizes.chunks - 1) + 1
        first_back = there[-1] + back[-1] - back[own[-1] + 1] + (hops[own[-1]][1] if own[-1] < len(hops) else 0.0)
        start = max(there[r], first_back - ahead * max(stages[s].forward for s in own))
        left = (schedule.weight_delay(sizes, r) + 1) * max(stages[s].backward - inputs[s] for s in own)
        found.append(start + max(0.0, back[r] + stages[0].backward - inputs[0] - left))
    return found


def _round_trips(cost: StepCost, schedule: Schedule) -> float:
    """Least time of the ways to the last stage and back: a stage's next forward waits for a backward once it has as
    many micro-batches in flight as its warm-up allows. (Of a few batches slightly less may be measured.)"""
    way, most = 0.0, 0.0
    links = [0.0, *((sum(there) + sum(back)) / 2 for there, back in zip(cost.links[::-1], cost.links_back[::-1],
                                                                        strict=True))]
    for r, link in zip(reversed(range(cost.pp)), links, strict=True):
        way += cost.stages[r].compute + 2 * link
        most = max(most, way / (schedule.warmup(cost.sizes, r) + 1))
    return _MEASURED * cost.sizes.num_microbatches * most
