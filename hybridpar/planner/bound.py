"""A lower bound on a step time, for a search that looks at the most promising configurations first. Units: seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hybridpar.pipeline.plan.schedules import Schedule
from hybridpar.planner.cost import StepCost

_MEASURED = 0.99


def least_time(cost: StepCost) -> float:
    """Time that a step takes at least: the costliest rank's work, or the slowest link's, with what cannot overlap."""
    m, chunks = cost.sizes.num_microbatches, cost.sizes.chunks
    schedule = cost.ordering.make() if cost.config.pipeline.early_switch != "auto" else None
    flush = schedule is not None and schedule.flush
    split = cost.config.pipeline.split_backward
    before = [0.0, *accumulate(stage.forward if split else stage.compute for stage in cost.stages)]
    work = max(m * rank.compute + rank.update + rank.norm
               + (_fill(cost, schedule, r, before) if schedule and flush else 0.0) for r, rank in enumerate(cost.ranks))
    # a micro-batch takes a link once for each chunk of the rank before it, but for the model's end; on a V once
    link = max((m * (1 if cost.sizes.is_v else chunks - (r == cost.pp - 1)) * taken
                for links in (cost.links, cost.links_back) for r, (taken, _, _) in enumerate(links)), default=0.0)
    reduction = max(cost.reduction(rank, r)[0] for r, rank in enumerate(cost.ranks))
    return max(work, link, reduction, _round_trips(cost, schedule)
               if schedule and not flush and not schedule.activations else 0.0)


def _fill(cost: StepCost, schedule: Schedule, rank: int, before: Sequence[float]) -> float:
    """Least time that a rank has nothing to do in a pipeline that drains between batches.

    Before its first forward and after its last backward the stages before it work; once its first micro-batch has
    left, and once its last one has, those behind it, while it has what it runs ahead to do. before: work of a
    micro-batch on the stages before each; of a split backward, whose part for weights may be beside all else, none.
    """
    if cost.sizes.chunks > 1 or cost.config.pipeline.split_backward:  # it has other chunks, or such parts, to do
        return before[rank]
    own, behind = cost.stages[rank], before[-1] - before[rank + 1]
    ahead = min(schedule.warmup(cost.sizes, rank), cost.sizes.num_microbatches - 1)
    return before[rank] + max(0.0, behind - ahead * min(own.forward, own.backward))


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
