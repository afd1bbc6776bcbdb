"""W's in the gaps of an order: the formulas of the zero-bubble schedules, their memory, and orders
that are right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.orders.test_zero_bubble import COSTS, costs_of, schedule_for

from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.orders.custom_order import format_order
from hybridpar.schedules.orders.fill import Room, fill
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import CheckReport, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, find_schedule, make_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate


def filled(schedule: Schedule, sizes: PipelineShape, costs: Costs, most: float = 0) -> Schedule:
    """The schedule as one's own, filled in the room of its fullest rank, or of `most` micro-batches
    on each stage."""
    p = sizes.num_ranks
    orders = [
        [(a.kind, a.stage, a.microbatch) for a in schedule.compute_actions(sizes, rank, 0, 1)]
        for rank in range(p)
    ]
    most = most or max(schedule.max_live_activations(sizes, rank) for rank in range(p))
    steps = fill(
        orders, sizes, costs, Room([1] * sizes.num_stages, [most] * p), swaps=not sizes.is_ring
    )
    return make_schedule(
        ScheduleOptions(
            "own",
            stage_layout=sizes.stage_layout,
            virtual_stages=0 if sizes.is_v or sizes.virtual_stages == 1 else sizes.virtual_stages,
            order=tuple(format_order(line, sizes, rank) for rank, line in enumerate(steps)),
        )
    )


def makespan(schedule: Schedule, sizes: PipelineShape, costs: Costs) -> float:
    return simulate(
        make_plan(find_schedule(schedule).with_options(split=True), sizes), costs
    ).makespan


def proven(schedule: Schedule, sizes: PipelineShape) -> CheckReport:
    return check(
        make_plan(find_schedule(schedule).with_options(split=True), sizes, 0, 2), sizes, schedule
    )


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 3, 1), (4, 8, 1), (4, 7, 2), (3, 9, 3)])
def test_formula(p: int, m: int, v: int, costs: tuple[float, float, float]) -> None:
    """(p-1)(F+I-W)/v at the same memory (1f1b's first rank's, where p divides m): what ZB-H1 has by
    its rule."""
    f, i, w = costs
    schedule = schedule_for(v)
    sizes, each = PipelineShape(p, m, v), costs_of(f, i, w, v)
    found = filled(schedule, sizes, each)
    assert makespan(found, sizes, each) <= m * (f + i + w) + (p - 1) * (f + i - w) / v + 1e-9
    assert max(
        live.activations for live in proven(found, sizes).peaks
    ) <= schedule.max_live_activations(sizes, 0)


def test_more_room_shortens_the_drain() -> None:
    """From ZB-H1's to ZB-H2's, one micro-batch at a time."""
    sizes = PipelineShape(4, 12)
    costs = costs_of(1, 1, 1)
    longer = make_schedule(ScheduleOptions("1f1b", warmup="latency", zero_bubble=True))
    h1 = makespan(make_schedule(ScheduleOptions("1f1b", zero_bubble=True)), sizes, costs)
    times = [makespan(filled(longer, sizes, costs, most), sizes, costs) for most in (7, 6, 5, 4)]
    assert times == sorted(times)
    assert times[0] == makespan(longer, sizes, costs)
    assert times[-1] <= h1


def test_measured_costs_beat_a_rule_for_equal_ones() -> None:
    """ZB-V's order is made for F = I = W; where a stage is slower, or a link is, another one is
    faster."""
    sizes, schedule = (
        PipelineShape(4, 8, 2, "v"),
        make_schedule(ScheduleOptions("1f1b", stage_layout="v")),
    )
    for costs in (
        costs_of(1, 1.5, 0.5, 2),
        costs_of(1, 1, 1, 2, 0.4),
        Costs([1.0] * 7 + [1.6], 2.0),
    ):
        found = filled(schedule, sizes, costs)
        assert makespan(found, sizes, costs) < makespan(schedule, sizes, costs)
        assert max(live.activations for live in proven(found, sizes).peaks) <= 2 * sizes.num_ranks


@given(
    st.integers(2, 5),
    st.integers(1, 11),
    st.sampled_from(["1f1b", "loop", "full", "half", "min"]),
    st.lists(st.floats(0.1, 3), min_size=4, max_size=4),
)
def test_every_order_is_right(p: int, m: int, kind: str, times: list[float]) -> None:
    f, i, w, latency = times
    if kind in ("1f1b", "loop"):
        sizes = PipelineShape(p, m, 1 + (kind == "loop"))
        schedule = make_schedule(
            ScheduleOptions("1f1b" if kind == "1f1b" else "interleaved", zero_bubble=True)
        )
    else:
        sizes, schedule = (
            PipelineShape(p, m, 2, "v"),
            make_schedule(ScheduleOptions("1f1b", stage_layout="v", activations=kind)),
        )
    report = proven(
        filled(schedule, sizes, costs_of(f, i, w, sizes.virtual_stages, latency)), sizes
    )
    most = max(schedule.max_live_activations(sizes, rank) for rank in range(p))
    assert max(live.activations for live in report.peaks) <= most


def test_picture() -> None:
    sizes = PipelineShape(2, 3)
    costs = Costs(2, 3, backward_input=2)
    found = filled(make_schedule(ScheduleOptions("1f1b")), sizes, costs)
    assert draw(
        simulate(make_plan(find_schedule(found).with_options(split=True), sizes), costs)
    ) == "\n".join(
        (
            "stage 0  F0--- F1---       B0------ F2--- B1------    B2------*",
            "stage 1        F0--- I0--- F1--- I1--- W0 F2--- I2--- W1 W2   *",
        )
    )
