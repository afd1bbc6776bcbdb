"""A lower bound on a step time, so that a search can try the most promising configurations first.

Units: seconds.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.schedules.orders import vee
from hybridpar.schedules.schedule_table import Schedule, make_schedule
from hybridpar.schedules.simulate.costs import Costs, expand

_MEASURED = 0.99


def least_time(cost: StepCost) -> float:
    """Return a lower bound on the step time: the work of the costliest rank, or the time of the
    slowest link, plus what cannot overlap with it."""
    m = cost.shape.num_microbatches
    chunks = cost.shape.virtual_stages
    schedule = (
        make_schedule(cost.schedule_options)
        if cost.config.pipeline.early_switch != "auto"
        else None
    )
    flush = schedule is not None and schedule.flush
    # a micro-batch crosses a link once for each virtual stage of the rank before it, except the
    # model's last; on a V once
    link = max(
        (
            m * (1 if cost.shape.is_v else chunks - (r == cost.pp - 1)) * taken
            for links in (cost.links, cost.links_back)
            for r, (taken, _, _) in enumerate(links)
        ),
        default=0.0,
    )
    if schedule and flush:
        return max(link, _drained(cost, schedule))
    work = max(m * rank.compute + rank.update + rank.norm for rank in cost.ranks)
    reduction = max(cost.reduction(rank, r)[0] for r, rank in enumerate(cost.ranks))
    return max(
        work, link, reduction, _round_trips(cost, schedule) if schedule and chunks == 1 else 0.0
    )


def _drained(cost: StepCost, schedule: Schedule) -> float:
    """Return a lower bound on a batch in a pipeline that drains: from one NORM, which ends on all
    ranks at once, to the next.

    rank r   UPDATE gather . wait for F of stages before | F, as many as it runs ahead | wait for the first I | ..
             .. | last I | W | REDUCE

    A rank's first I comes after the first micro-batch's forward on all stages and its backward on
    all later stages. After the rank's last I, earlier ranks still have to compute theirs; meanwhile
    this rank computes its remaining W, and rank 0 has one more W and a REDUCE. (An unsplit backward
    counts as I.) Without a NORM, and if state moves, REDUCE and the gather are not counted.
    """
    shape = cost.shape
    stages = cost.stages
    ranks = cost.ranks
    there, back = _ways(cost, schedule)
    inputs = _inputs(cost)
    meets = cost.schedule_options.clip and cost.moves is None
    costs = cost.costs if meets else Costs()
    reduce, gather = (list(expand(each, cost.pp)) for each in (costs.reduce, costs.gather))
    if costs.tied:
        reduce[0] = reduce[-1] = min(reduce[0], reduce[-1])
    least = 0.0
    for r, rank in enumerate(ranks):
        own = shape.stages_of(r)
        ready = rank.update + gather[r]
        first = ranks[0].update + gather[0] if meets else rank.update
        # end of rank 0, after the work of this rank
        begin = max(ready, first + there[r])
        end = -inf
        if not schedule.activations:
            ahead = (
                min(schedule.warmup(shape, r), shape.num_microbatches * shape.virtual_stages - 1)
                + 1
            )
            first_back = there[-1] + back[own[-1] + 1]
            begin = max(begin, first + first_back - ahead * max(stages[s].forward for s in own))
            left = (schedule.weight_delay(shape, r) + 1) * max(
                stages[s].backward - inputs[s] for s in own
            )
            end = back[0] - back[r] + stages[0].backward - inputs[0] - left
        elif meets:
            held = vee.room(shape, schedule.activations)
            again = own[1]
            begin = max(
                begin, first + there[again] - min(held, shape.num_microbatches) * stages[r].forward
            )
            left = held * max(
                stages[r].backward, *(stages[s].backward - inputs[s] for s in own[1:])
            )
            end = back[0] - back[again + 1] - inputs[again] + stages[0].backward - inputs[0] - left
        work = begin + shape.num_microbatches * rank.compute
        least = max(
            least,
            work
            + max(rank.norm, reduce[r], end + reduce[0] if meets else end + rank.norm)
            + costs.norm,
        )
    return least


def _inputs(cost: StepCost) -> list[float]:
    """Return for each stage the seconds of its backward that the previous stage waits for."""
    whole = [stage.backward for stage in cost.stages]
    if not cost.config.pipeline.split_backward:
        return whole
    return cost.backward_input or [0.5 * backward for backward in whole]


def _ways(cost: StepCost, schedule: Schedule) -> tuple[list[float], list[float]]:
    """Return the times at which one micro-batch reaches the stages.

    Returns:
        [s]: seconds until stage s begins its forward; [-1] is the end of the last forward. [s + 1]:
        seconds from the start of the last stage's backward until stage s begins its own; [0] is the
        end of all backwards.
    """
    links = [
        (sum(there), sum(back)) for there, back in zip(cost.links, cost.links_back, strict=True)
    ]
    over = [cost.shape.link(s, 1) for s in range(len(cost.stages) - 1)]
    hops = [(0.0, 0.0) if link is None else links[link] for link in over]
    there = [
        0.0,
        *accumulate(
            stage.forward + hop
            for stage, (hop, _) in zip(cost.stages, [*hops, (0.0, 0.0)], strict=True)
        ),
    ]
    back = [
        0.0,
        *accumulate(
            i + hop
            for i, (_, hop) in zip(_inputs(cost)[::-1], [*hops[::-1], (0.0, 0.0)], strict=True)
        ),
    ]
    return there, back[::-1]


def _round_trips(cost: StepCost, schedule: Schedule) -> float:
    """Return a lower bound from the round trips to the last stage: once a stage has as many
    micro-batches in flight as its warm-up allows, its next forward waits for a backward.

    (Measured over few batches, the step may be slightly shorter.)
    """
    way = 0.0
    most = 0.0
    links = [
        0.0,
        *(
            (sum(there) + sum(back)) / 2
            for there, back in zip(cost.links[::-1], cost.links_back[::-1], strict=True)
        ),
    ]
    for r, link in zip(reversed(range(cost.pp)), links, strict=True):
        way += cost.stages[r].compute + 2 * link
        most = max(most, way / (schedule.warmup(cost.shape, r) + 1))
    return _MEASURED * cost.shape.num_microbatches * most
