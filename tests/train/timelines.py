"""Recordings that ranks would have made, had they run as simulated."""

from __future__ import annotations

from hybridpar.runtime.recording import Event, Usage
from hybridpar.schedules.action import COMPUTE, PER_BATCH, Kind
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.train.reporting.trace import Host, RankEvents

STARTED = (Kind.REDUCE, Kind.NORM, Kind.HOST)


def recorded(
    schedule: str,
    sizes: PipelineShape,
    costs: Costs,
    num_batches: int,
    *,
    host: Host | None = None,
    split: bool = False,
    parts: int = 1,
) -> list[RankEvents]:
    """The events of one pipeline that ran a schedule with these costs; its time goes on in whole
    batches.

    parts: of each stage.
    """
    schedule_options = ScheduleOptions(
        schedule, gather=bool(costs.gather), split=split, host=float(bool(costs.host))
    )
    timeline = simulate(make_plan(schedule_options, sizes, 0, num_batches, parts=parts), costs)
    return [
        RankEvents(
            stage,
            f"rank {stage}",
            (0, 0),
            stage,
            tuple(_events(timeline, stage, sizes, costs)),
            host or Host(),
            Usage(),
        )
        for stage in timeline.plan
    ]


def _events(timeline: Timeline, stage: int, sizes: PipelineShape, costs: Costs) -> list[Event]:
    own = {Kind.F: costs.forward, Kind.B: costs.backward, Kind.UPDATE: costs.update, **costs.calls}
    made = []
    before = 0.0
    for action, start, done, end in timeline.actions(stage):
        waits = ((before, start),) if start > before else ()
        size = sizes.num_stages if action.kind in COMPUTE else sizes.num_ranks
        in_parts = ACTION_SPECS[action.kind].cut and any(a.part for a in timeline.plan[stage])
        own_time = (
            done - start
            if in_parts or action.kind in (Kind.I, Kind.W, *costs.variation)
            else expand(own.get(action.kind, 0.0), size)[action.stage % size]
        )
        over = (
            end if action.kind in STARTED or (action.kind is Kind.UPDATE and costs.gather) else None
        )
        made.append(Event(action, before, done, waits, own_time, 0.0, over))
        before = done
    assert all(e.action.kind not in PER_BATCH or e.end >= e.start for e in made)
    return made
