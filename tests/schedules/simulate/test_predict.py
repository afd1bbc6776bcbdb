from dataclasses import replace

import pytest

from hybridpar.config import Config, OptimConfig, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import predict_timeline, smallest_early_switch


def step_time(switch, sizes, costs):
    return predict_timeline(ScheduleOptions("2bw", early_switch=switch), sizes, costs).step_time(
        sizes.num_microbatches
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("p", "m"), [(8, 32), (4, 8), (2, 4), (3, 3)])
@pytest.mark.parametrize("reduce", [0, 2, 6, 20])
def test_the_smallest_early_switch_that_costs_no_time(p, m, reduce):
    sizes = PipelineShape(p, m)
    costs = Costs(1, 2, update=0.25, reduce=reduce, norm=0.5, blocking_norm=True)
    found = smallest_early_switch(costs, sizes, ScheduleOptions("2bw"))
    paper = step_time(None, sizes, costs)
    assert step_time(found, sizes, costs) <= 1.01 * paper
    assert 0 <= found <= m - p + 1
    for switch in range(found):
        assert step_time(switch, sizes, costs) > 1.01 * paper


def test_more_to_hide_needs_more_stale_micro_batches():
    switches = [
        smallest_early_switch(
            Costs(1, 2, reduce=r, norm=0.5), PipelineShape(4, 16), ScheduleOptions("2bw")
        )
        for r in (0, 4, 8, 12, 40)
    ]
    assert switches == sorted(switches)
    assert switches[0] <= 1
    assert switches[-1] > 2


def test_orderings_of_configurations():
    grid = ParallelConfig(pp=2, dp=1)
    assert ScheduleOptions.of(
        Config(parallel=grid, pipeline=PipelineConfig("2bw", early_switch=1))
    ) == ScheduleOptions("2bw", early_switch=1)
    assert ScheduleOptions.of(
        Config(parallel=ParallelConfig(pp=2, zero=1), pipeline=PipelineConfig("1f1b"))
    ).gather
    free = OptimConfig(clip_grad=0.0)
    assert not ScheduleOptions.of(Config(pipeline=PipelineConfig("pipedream"), optim=free)).clip
    assert ScheduleOptions.of(Config(pipeline=PipelineConfig("1f1b"), optim=free)).clip
    scaled = Config(
        pipeline=PipelineConfig("pipedream"), optim=free, train=TrainConfig(dtype="fp16")
    )
    assert ScheduleOptions.of(scaled).clip


@pytest.mark.parametrize("m", [1, 4, 6])
def test_a_step_is_the_mean_over_all_that_varies(m):
    varying = {
        Kind.F: [[0.5, 1.5, 0.25, 1.75, 1.0, 1.0, 1.5, 0.5, 0.5, 1.5, 1.0, 1.0]],
        Kind.B: [[1.0]],
    }
    timeline = predict_timeline(
        ScheduleOptions("1f1b"), PipelineShape(1, m), Costs(1, 2, variation=varying)
    )
    assert timeline.step_time(m) == pytest.approx(3 * m, rel=0.03)  # the last turn may be cut off


def test_no_norm_without_clipping():
    timeline = predict_timeline(
        ScheduleOptions("pipedream", clip=False), PipelineShape(2, 2), Costs(), 3
    )
    assert not any(
        action.kind is Kind.NORM for actions in timeline.plan.values() for action in actions
    )
    assert sum(action.kind is Kind.UPDATE for action in timeline.plan[0]) == 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_gathers_change_no_plan_that_drains(schedule):
    """So one plan is made for both, and kept."""
    sizes = PipelineShape(4, 10, 2 if schedule == "interleaved" else 1)
    for zero_bubble in (False, schedule != "gpipe"):
        for host in (0.0, 0.5):
            schedule_options = ScheduleOptions(
                schedule, zero_bubble=zero_bubble, split=zero_bubble, host=host
            )
            assert make_plan(schedule_options, sizes, 0, 3) == make_plan(
                replace(schedule_options, gather=True), sizes, 0, 3
            )
