"""Pictures of large plans show a window of the steady state, and some ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hybridpar.schedules.draw.excerpt import MOST_ROWS, excerpt
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.kinds import COMPUTE
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule
from hybridpar.schedules.simulate.simulator import Costs, simulate
from hybridpar.schedules.simulate.timeline import Timeline


def simulated(schedule: str, stages: int, num_microbatches: int, *, virtual: int = 1) -> Timeline:
    options = ScheduleOptions(schedule)
    shape = PipelineShape(stages, num_microbatches)
    if virtual > 1:
        shape = replace(shape, virtual_stages=virtual)
    plan = make_plan(make_schedule(options), shape, 0, 4 if schedule == "2bw" else 2)
    return simulate(plan, Costs(1.0, 2.0, update=1.0))


def test_a_small_picture_shows_all() -> None:
    timeline = simulated("1f1b", 4, 8)
    part = excerpt(timeline, timeline.makespan)
    assert part.timeline is timeline
    assert part.text == ""


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_window_of_the_steady_state_is_busy(schedule: str) -> None:
    """A window of 30 pairs of 32 stages and 64 micro-batches has no bubble, in 1f1b neither."""
    timeline = simulated(schedule, 32, 64)
    part = excerpt(timeline, 30.0)
    assert part.timeline.makespan == pytest.approx(30.0)
    assert list(part.timeline.plan) == [*range(8), *range(24, 32)]
    for rank in list(part.timeline.plan):
        assert part.timeline.idle_share(rank) == pytest.approx(
            timeline.idle_share(rank, part.since, part.since + 30.0)
        )
        assert part.timeline.idle_share(rank) < 0.1
    until = part.since + 30.0
    assert part.text == f"{part.since:,.6g} to {until:,.6g}, stages 0-7 and 24-31 of 32"


def test_boxes_of_the_window_are_those_of_the_plan() -> None:
    timeline = simulated("2bw", 20, 40)
    part = excerpt(timeline, 25.0)
    for rank in list(part.timeline.plan):
        inside = {
            (action, start)
            for action, start, end in timeline.shown(rank)
            if action.kind in COMPUTE and start > part.since and end < part.since + 25.0
        }
        shown = {
            (action, start + part.since)
            for action, start, end in part.timeline.shown(rank)
            if action.kind in COMPUTE and start > 0 and end < 25.0
        }
        assert {action for action, _ in inside} == {action for action, _ in shown}
        assert sorted(start for _, start in inside) == pytest.approx(
            sorted(start for _, start in shown)
        )


@pytest.mark.thorough
def test_a_picture_of_a_thousand_gpus_opens() -> None:
    """64 stages, 256 micro-batches: it was 17,197 pixels wide and had 20 MB."""
    picture = draw_svg(simulated("1f1b", 64, 256), title="large")
    found = re.match(r'<svg [^>]*width="(\d+)[^"]*" height="(\d+)', picture)
    assert found, picture[:200]
    assert int(found[1]) <= 3400
    assert int(found[2]) <= 50 * MOST_ROWS + 200
    assert len(picture) < 2e6
    assert "stages 0-7 and 56-63 of 64" in picture
    assert re.search(r"time in [^<]* from [\d,.]+ on", picture)
    assert picture.count('class="end"') == MOST_ROWS
