"""Schedules of one's own: what they say is what is planned, proven, predicted and trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner import made

from hybridpar.config import Config, from_mapping, load_toml, to_toml
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.planner.searching.candidates import Request, candidates
from hybridpar.schedules.action import Kind
from hybridpar.schedules.orders.custom_order import format_order
from hybridpar.schedules.passes.lowering import lower, make_plan
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    PipelineShape,
    find_schedule,
    make_schedule,
    schedule_of,
)
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.validate import problems
from hybridpar.verify.run import verify

ZB_H1 = ("F0 F1 I0 F2 I1 W0 I2 W1 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2")
"""On two ranks with three micro-batches."""


def make(order: tuple[str, ...], m: int, **sections: dict[str, Any]) -> Config:
    base = {
        "parallel": {"pp": len(order), "dp": 1},
        "pipeline": {
            "schedule": "own",
            "order": order,
            "num_microbatches": m,
            "split_backward": "I" in order[0],
        },
        "model": {
            "num_layers": 3,
            "hidden_size": 16,
            "num_heads": 2,
            "seq_length": 8,
            "vocab_size": 40,
        },
        "train": {"micro_batch_size": 2, "num_steps": 9},
    }
    return from_mapping(sections, from_mapping(base))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_the_order_of_a_schedule_is_that_schedule(name: str) -> None:
    p = 3
    m = 5
    sizes = PipelineShape(p, m)
    order = [
        " ".join(
            f"{action.kind.value}{action.microbatch}"
            for action in make_schedule(ScheduleOptions(name)).compute_actions(sizes, rank, 0, 1)
        )
        for rank in range(p)
    ]
    own = make_schedule(ScheduleOptions("own", order=order))
    for rank in range(p):
        assert [*lower(own, sizes, rank, 0, 3)] == [*lower(name, sizes, rank, 0, 3)]
        assert own.max_live_activations(sizes, rank) == make_schedule(
            ScheduleOptions(name)
        ).max_live_activations(sizes, rank)
        assert own.warmup(sizes, rank) == min(
            make_schedule(ScheduleOptions(name)).warmup(sizes, rank), m - 1
        )


def test_it_is_proven_simulated_and_kept_in_the_configuration(tmp_path: Any) -> None:
    config = make(ZB_H1, 3)
    JobPlan(config).prove()
    assert not problems(config, 2)
    (tmp_path / "own.toml").write_text(to_toml(config))
    assert load_toml(tmp_path / "own.toml") == config
    sizes, costs = PipelineShape.of(config), Costs([1.0] * 2, [2.0] * 2)
    plan = make_plan(find_schedule(schedule_of(config)).with_options(split=True), sizes, 0, 2)
    assert str(check(plan, sizes, schedule_of(config)))
    compute = [str(a).partition("@")[0] for a in plan[1] if a.kind in (Kind.F, Kind.I, Kind.W)][:9]
    assert compute == ZB_H1[1].split()
    own, split = (
        simulate(
            make_plan(find_schedule(schedule).with_options(split=True), sizes, 0, 1), costs
        ).makespan
        for schedule in (schedule_of(config), "1f1b")
    )
    assert own < split, "W fills the drain"
    assert make_schedule(ScheduleOptions.of(config)).order == schedule_of(config).order


@pytest.mark.parametrize(
    ("order", "m", "text"),
    [
        (("F0 B0",), 2, r"of rank 0 must have F1 and either B1 or both I1 and W1"),
        (("F0 B0 F1 B1 B1",), 2, "must have F1 and either B1"),
        (("F0 I0 F1 B1",), 2, "must have F0 and either B0"),
        (("B0 F0 F1 B1",), 2, "must run F0 before its backward"),
        (("F0 F1 W0 I0 B1",), 2, "I0 before W0"),
        (("F0 B0 F1 B1 F2 B2",), 2, "has micro-batch 2, but pipeline.num_microbatches is 2"),
        (("F1 F0 B0 B1",), 2, "must have its F in the order of micro-batches"),
        (("F0 F1 B1 B0",), 2, "must have its B and I in the order"),
        (("F0 F1 I0 I1 W1 W0",), 2, "must have its B and W in the order"),
        (("F0 X0",), 1, "'X0'.*of rank 0 must be F, B, I or W"),
        (
            ("F0 B0 F0b B0b",),
            1,
            r"has F0b, but the rank holds 1 stage of the model \(pipeline.virtual_stages\)",
        ),
        (("F0 B0", "F0 B0"), 1, None),
    ],
)
def test_orders_that_cannot_run_are_named(order: tuple[str, ...], m: int, text: str | None) -> None:
    sizes = PipelineShape(len(order), m)
    if text is None:
        make_schedule(ScheduleOptions("own", order=order)).check_shape(sizes)
        with pytest.raises(
            ConfigError, match=r"must have 3 entries, one for each rank of parallel.pp"
        ):
            make_schedule(ScheduleOptions("own", order=order)).check_shape(
                replace(sizes, num_ranks=3)
            )
        return
    with pytest.raises(ConfigError, match=rf"pipeline\.order = .*{text}"):
        make_schedule(ScheduleOptions("own", order=order)).check_shape(sizes)


def test_letters_name_the_stages_of_a_rank() -> None:
    """An order computes what it says, in a loop and on a V, and it must have all of it."""
    lines = ("F0 F1 F0b B0b F1b B1b B0 B1", "F0 F0b F1 B0b F1b B0 B1b B1")
    for placement, chunks in (("v", 0), ("loop", 2)):
        sizes = PipelineShape(2, 2, 2, placement)
        schedule = make_schedule(
            ScheduleOptions("own", order=lines, virtual_stages=chunks, stage_layout=placement)
        )
        for rank, line in enumerate(lines):
            steps = [
                (a.kind, a.stage, a.microbatch) for a in schedule.compute_actions(sizes, rank, 0, 1)
            ]
            assert steps[2][1] == sizes.stages_of(rank)["b" in line.split()[2]]
            assert format_order(steps, sizes, rank) == line
            assert schedule.max_live_activations(sizes, rank) == 3
    with pytest.raises(
        ConfigError, match=r"of rank 0 must have F0b and either B0b or both I0b and W0b"
    ):
        make_schedule(
            ScheduleOptions("own", order=("F0 B0", "F0 B0"), virtual_stages=2)
        ).check_shape(PipelineShape(2, 1, 2))


def test_orders_that_wait_for_each_other_are_found_before_a_run() -> None:
    from hybridpar.schedules.proof.check import PlanError

    with pytest.raises(PlanError, match=r"(?i)deadlock|waits"):
        JobPlan(make(("F0 B0 F1 B1", "F0 F1 B0 B1"), 2)).prove()


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline\.order = .*must name what each rank computes.*F0 F1 B0 B1"
    ):
        make_schedule(ScheduleOptions("own"))
    with pytest.raises(
        ConfigError, match=r"pipeline\.order.*not supported with schedule 1f1b, only with own"
    ):
        make_schedule(ScheduleOptions("1f1b", order=("F0 B0",)))
    config = make(ZB_H1, 3, pipeline={"split_backward": False})
    assert any(p.field == "pipeline.split_backward" for p in conflicts(config))


def test_a_planner_takes_other_schedules() -> None:
    config = made.config(pp=2, m=3)
    config = replace(
        config, pipeline=replace(config.pipeline, schedule="own", order=ZB_H1, split_backward=True)
    )
    found = {
        c.config.pipeline.schedule
        for c in candidates(config, made.machine(config, 2), Request(keep={"pp": 2}))
    }
    assert "1f1b" in found
    assert "own" not in found


@pytest.mark.ranks
def test_it_is_the_same_training() -> None:
    report = verify(make(ZB_H1, 3), {"pp": 2, "dp": 2}, 3)
    assert report.ok, report.first_divergence
