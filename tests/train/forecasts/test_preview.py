"""Differences between a run and its preview, and the costs that explain them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from train.timelines import recorded

from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig
from hybridpar.job import JobPlan
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.forecasts.preview import differences, stage_costs
from hybridpar.train.reporting.costs_file import RunCosts, run_costs
from hybridpar.train.reporting.trace import Host

CONFIG = Config(
    model=ModelConfig(num_layers=6, vocab_size=1000),
    parallel=ParallelConfig(pp=2, dp=1),
    pipeline=PipelineConfig("1f1b", 4),
)
COUNTED = stage_costs(JobPlan(CONFIG))


def measured(costs: Costs) -> RunCosts:
    run = run_costs(
        JobPlan(CONFIG),
        recorded("1f1b", PipelineShape(2, 4), costs, 10, host=Host("here", "cpu", 2)),
    )
    assert run is not None
    return run


def as_counted(**other: object) -> Costs:
    """In seconds, a hundredth of the counted units; but for what is other."""
    scaled = Costs([0.01 * x for x in COUNTED.forward], [0.01 * x for x in COUNTED.backward])  # type: ignore[union-attr]
    return replace(scaled, **other)  # type: ignore[arg-type]


def test_results_as_counted_are_not_reported() -> None:
    assert differences(JobPlan(CONFIG), measured(as_counted())) == []
    assert differences(JobPlan(CONFIG), measured(as_counted(update=0.001, latency=0.0005))) == []


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (
            as_counted(forward=(0.02, 0.005), backward=(0.04, 0.01)),
            "forward and backward take other times than counted",
        ),
        (as_counted(latency=0.02), "transfers and reductions"),
        (as_counted(update=0.05), "updates and communication calls"),
    ],
)
def test_the_cost_that_makes_the_difference_comes_first(costs: Costs, why: str) -> None:
    run = measured(costs)
    (line,) = differences(JobPlan(CONFIG), run)
    assert line.startswith(
        f"executed.svg and plan.svg differ: a step took {1e3 * run.measured.step_time:.0f} ms, "
    )
    assert f"Why: {why} (" in line


def test_shared_cores_are_a_reason() -> None:
    run = measured(as_counted())
    run = replace(
        run,
        measured=replace(
            run.measured,
            costs=replace(run.measured.costs, cores=1.0),
            step_time=3 * run.measured.step_time,
        ),
    )
    (line,) = differences(JobPlan(CONFIG), run)
    assert "Why: cores are shared (+" in line
    assert "; other programs, or what no cost explains (+" in line
