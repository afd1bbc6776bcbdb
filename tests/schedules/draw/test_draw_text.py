import re
import xml.etree.ElementTree as ElementTree
from inspect import cleandoc
from itertools import pairwise

import pytest

from hybridpar.config import from_mapping
from hybridpar.job import JobPlan
from hybridpar.schedules.action import COMPUTE, Action, Kind
from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.passes.lowering import forward_actions, make_plan
from hybridpar.schedules.proof.liveness import live_counts, peak_live
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape
from hybridpar.schedules.simulate.simulator import Costs, simulate
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.train.forecasts.preview import preview

SVG = "{http://www.w3.org/2000/svg}"


def test_update_that_takes_time():
    timeline = simulate(make_plan("1f1b", PipelineShape(2, 2), 0, 2), Costs(1, 1, update=2))
    assert draw(timeline) == cleandoc("""
        stage 0  F0 F1    B0    B1 U0--- F2 F3    B2    B3 U1---
        stage 1     F0 B0 F1 B1    U0---    F2 B2 F3 B3    U1---""")


def test_equal_costs():
    timeline = simulate(make_plan("gpipe", PipelineShape(2, 2), 0, 1), Costs(0.5, 0.5))
    assert draw(timeline) == cleandoc("""
        stage 0  F0 F1       B0 B1*
        stage 1     F0 F1 B0 B1   *""")


def test_columns_grow_with_the_numbers():
    lines = draw(make_plan("1f1b", PipelineShape(2, 6), 0, 2)).splitlines()
    assert "F8- B8----- F9- B9-----" in lines[1]
    assert "F10 B10---- F11 B11----" in lines[1]
    assert draw(make_plan("1f1b", PipelineShape(12, 1))).splitlines()[-1].startswith("stage 11  ")


def test_empty():
    assert draw({0: ()}) == "stage 0"
    ElementTree.fromstring(draw_svg({0: ()}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_shows_every_micro_batch(name):
    plan = make_plan(name, PipelineShape(3, 4), 0, 3)
    root = ElementTree.fromstring(draw_svg(plan, title="a < b & c"))
    tips = [element.text for element in root.iter(f"{SVG}title")]
    for actions in plan.values():
        for action in actions:
            if action.kind in COMPUTE:
                assert sum(tip.startswith(f"{action}:") for tip in tips) == 1
    assert sum("makes W2 at" in tip for tip in tips) == 3  # one update a stage
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "a < b & c" in texts
    assert "stage 2" in texts
    assert "http" not in draw_svg(plan).replace("http://www.w3.org/2000/svg", "")  # self-contained


def test_svg_boxes_lie_in_the_picture_and_do_not_overlap():
    timeline = simulate(
        make_plan("2bw", PipelineShape(4, 6), 0, 4), Costs(1, 2, update=0.5, reduce=2, latency=0.1)
    )
    root = ElementTree.fromstring(draw_svg(timeline))
    rows = {}
    for box in root.iter(f"{SVG}rect"):
        if box.get("rx"):
            x = float(box.get("x"))
            width = float(box.get("width"))
            rows.setdefault(box.get("y"), []).append((x, x + width))
    assert len(rows) == 4
    for boxes in rows.values():
        boxes.sort()
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(boxes))
        assert boxes[-1][1] < float(root.get("width"))


def test_svg_of_a_long_plan_widens():
    root = ElementTree.fromstring(draw_svg(make_plan("2bw", PipelineShape(2, 64), 0, 4)))
    assert float(root.get("width")) > 3 * 64 * 4 * 4


def test_svg_says_the_unit_of_time_and_what_black_blocks_are():
    def texts(costs, **options):
        svg = draw_svg(simulate(make_plan("1f1b", PipelineShape(2, 4), 0, 2), costs), **options)
        return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]

    assert "time in forwards of one micro-batch on the costliest rank" in texts(Costs())
    measured = texts(Costs(update=0.5), unit="milliseconds")
    assert "time in milliseconds" in measured
    assert "optimizer makes the new weights" in measured
    assert "optimizer makes the new weights" not in texts(Costs()), "there are none"


def test_svg_of_many_or_short_micro_batches_fits_a_page_where_it_must():
    timeline = simulate(make_plan("2bw", PipelineShape(2, 200), 0, 3), Costs((0.001, 1.0), 2.0))
    assert float(ElementTree.fromstring(draw_svg(timeline, widens=False)).get("width")) == 1200
    window = ElementTree.fromstring(draw_svg(timeline))
    assert 3000 < float(window.get("width")) < 3400, "a window of a picture that would be too wide"


def test_svg_of_an_evaluation():
    plan = {stage: tuple(forward_actions(PipelineShape(2, 1), stage, 3)) for stage in range(2)}
    assert "evaluation" in draw_svg(plan)


def idle_texts(svg: str) -> list[str]:
    return re.findall(r">(\d+\.\d %)<", svg)


def job(schedule: str, m: int) -> JobPlan:
    return JobPlan(
        from_mapping(
            {
                "model": {"num_layers": 3, "vocab_size": 64},
                "parallel": {"pp": 5, "dp": 1},
                "pipeline": {"schedule": schedule, "num_microbatches": m, "split": [1] * 5},
            }
        )
    )


@pytest.mark.parametrize("m", [5, 7])
def test_a_picture_says_how_long_ranks_idle_in_the_steady_state(m):
    """2bw never drains, so its picture ends among busy ranks; 1f1b idles (p-1)/(m+p-1)."""
    costs = Costs(1.0, 2.0)
    shown = preview(job("2bw", m), 2, costs)
    assert max(shown.timeline.idle_share(rank) for rank in range(5)) > 0.2, "the run's ends"
    drawn = shown.drawn()
    assert drawn.makespan == shown.timeline.makespan
    for rank in range(5):
        filled = 12.0 + 3.0  # forwards there and a backward back, at most
        assert drawn.idle_share(rank, since=filled) == pytest.approx(0)
        starts, ends = drawn.starts[rank], drawn.ends[rank]
        assert len(drawn.plan[rank]) == len(starts) == len(ends)
        assert max(ends) <= drawn.makespan
        for i, action in enumerate(drawn.plan[rank]):
            if action.kind is Kind.F and action.microbatch < 2 * m:
                at = shown.timeline.plan[rank].index(action)
                assert starts[i] == shown.timeline.starts[rank][at], "the same actions as before"
    assert idle_texts(draw_svg(drawn, steady_idle=shown.bubble)) == ["0.0 %"] * 5
    drains = preview(job("1f1b", m), 2, costs)
    assert drains.drawn() is drains.timeline
    svg = draw_svg(drains.drawn(), steady_idle=drains.bubble)
    assert idle_texts(svg) == [f"{100 * 4 / (m + 4):.1f} %"] * 5


def test_a_cut_timeline_keeps_what_began_and_how_long_it_waited_for_the_slow_tier():
    plan = {0: tuple(Action(Kind.F, 0, k, version=0) for k in range(3))}
    timeline = Timeline(plan, {0: [0, 2, 5]}, {0: [1, 4, 6]}, 6, {0: [1, 4, 6]}, {0: {1: 0.5}})
    cut = timeline.cut_at(3)
    assert cut.plan == {0: plan[0][:2]}
    assert (cut.starts, cut.ends, cut.returns, cut.makespan) == (
        {0: [0, 2]},
        {0: [1, 3]},
        {0: [1, 3]},
        3,
    )
    assert cut.stalls == {0: {1: 0.5}}
    assert timeline.cut_at(9).ends == timeline.ends


def test_the_last_stage_of_2bw_uses_two_versions_only_after_a_drain():
    """So it keeps two, which is what a preview says of every rank."""
    shape = PipelineShape(4, 6)
    first, later = (make_plan("2bw", shape, start, 5) for start in (0, 5))
    assert [peak_live(plan[3], 6).versions for plan in (first, later)] == [1, 2]
    at_once = [counts.versions for counts in live_counts(later[3], 6)]
    assert set(at_once[len(at_once) // 2 :]) == {1}
    assert preview(job("2bw", 6), 2, Costs(1.0, 2.0)).peak_versions == (2,) * 5
    assert preview(job("1f1b", 6), 2, Costs(1.0, 2.0)).peak_versions == (1,) * 5
