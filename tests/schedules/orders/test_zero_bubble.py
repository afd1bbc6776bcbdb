"""Gradients of weights that fill the drain: bubbles, memory and order, against the formulas of the
papers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.lowering import delay_weight_gradients, make_plan, split_backward
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, find_schedule, make_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate

COSTS = [(1, 1, 1), (1, 1.2, 0.8), (1.08, 1.2, 1), (1, 1.5, 0.5)]
"""Times of a forward, a backward to the input, and the gradients of weights; the latter never take
longest in a layer."""


def schedule_for(chunks: int) -> Schedule:
    return make_schedule(
        ScheduleOptions("1f1b" if chunks == 1 else "interleaved", zero_bubble=True)
    )


def costs_of(f: float, i: float, w: float, v: int = 1, latency: float = 0.0) -> Costs:
    return Costs(f / v, (i + w) / v, backward_input=i / v, latency=latency)


def makespan(schedule: Schedule, sizes: PipelineShape, f: float, i: float, w: float) -> float:
    return simulate(make_plan(schedule, sizes), costs_of(f, i, w, sizes.virtual_stages)).makespan


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_bubble(p: int, costs: tuple[float, float, float]) -> None:
    """(p-1)(F+I-W)/v for any number of micro-batches from p on, at the memory of 1f1b's first rank.

    Source: ZB-H1, arXiv 2401.10241; interleaved: an order of torch's, of which this is the time in
        all 336 cases tried.
    """
    f, i, w = costs
    for m in sorted({p, p + 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p}):
        for v in (1, 2, 3, 4):
            found = makespan(schedule_for(v), PipelineShape(p, m, v), f, i, w)
            assert found == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w) / v), (m, v)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_bubble_of_a_longer_warmup(p: int) -> None:
    """ZB-H2, (p-1)(F+I-2W), none at equal costs but for the fill of the last rank, at almost twice
    the memory."""
    schedule = make_schedule(ScheduleOptions("1f1b", warmup="latency", zero_bubble=True))
    m = 4 * p
    assert makespan(schedule, PipelineShape(p, m), 1, 1, 1) == pytest.approx(3 * m + (p - 1))
    peaks = check(make_plan(schedule, PipelineShape(p, m)), PipelineShape(p, m), schedule).peaks
    assert max(live.activations for live in peaks) == 2 * p - 1


@given(
    st.builds(PipelineShape, st.integers(2, 9), st.integers(1, 27), st.integers(1, 4)),
    st.integers(0, 3),
)
def test_every_plan_is_right(sizes: PipelineShape, offload: int) -> None:
    """Also where the transfers of a rank on an axis queue, and where activations leave. No rank
    holds more than the first."""
    schedule = schedule_for(sizes.virtual_stages)
    report = check(
        make_plan(find_schedule(schedule).with_options(offload=offload), sizes, 0, 2),
        sizes,
        schedule,
    )
    peaks = [live.activations for live in report.peaks]
    assert peaks[0] == max(peaks)
    assert peaks[0] == schedule.max_live_activations(sizes, 0)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_memory_of_interleaved(p: int, v: int) -> None:
    """Activations of p micro-batches, where interleaved 1f1b needs (p-1)/v more."""
    sizes = PipelineShape(p, 4 * p, v)
    lean = schedule_for(v)
    plain = make_schedule(ScheduleOptions("interleaved"))
    assert lean.max_live_activations(sizes, 0) == p * v
    assert plain.max_live_activations(sizes, 0) == p * v + p - 1


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9))
def test_the_order_of_sums_stays(delay: int, num_batches: int, m: int) -> None:
    """And what is delayed stays in its batch, behind no more backwards than it may."""
    actions = [Action(kind, 0, k) for k in range(num_batches * m) for kind in (Kind.F, Kind.B)]
    split = list(split_backward(actions))
    delayed = list(delay_weight_gradients(split, delay, m))
    assert sorted(map(str, delayed)) == sorted(map(str, split))
    for kind in (Kind.F, Kind.I, Kind.W):
        assert [a for a in delayed if a.kind is kind] == [a for a in split if a.kind is kind]
    waiting = 0
    most = 0
    for action in delayed:
        waiting += {Kind.I: 1, Kind.W: -1}.get(action.kind, 0)
        most = max(most, waiting)
        if action.kind is Kind.F and action.microbatch % m == 0:
            assert waiting == 0
    assert most == min(delay + 1, m)


@pytest.mark.parametrize("name", ["naive", "gpipe", "2bw", "pipedream"])
def test_other_schedules_have_no_such_drain(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"pipeline\.zero_bubble = True: .*only with 1f1b and interleaved; try false",
    ):
        make_schedule(ScheduleOptions(name, zero_bubble=True))


@pytest.mark.parametrize(
    ("p", "latency", "whole", "split"),
    [(4, 0.25, 1.125, 1.0), (4, 0.5, 1.25, 1.0), (4, 1.0, 1.5, 1.25), (8, 0.5, 1.292, 1.0)],
)
def test_a_split_backward_hides_latency_under_2bw(
    p: int, latency: float, whole: float, split: float
) -> None:
    """Half of W on each link, at the ordinary warm-up: the gradient is on its way while W is
    computed."""
    sizes = PipelineShape(p, 2 * p)
    costs = Costs(1, 2, backward_input=1, latency=latency)
    for parts, expected in ((False, whole), (True, split)):
        plan = make_plan(ScheduleOptions("2bw", split=parts), sizes, 0, 12)
        ideal = 3 * sizes.num_microbatches
        assert simulate(plan, costs).step_time(sizes.num_microbatches) / ideal == pytest.approx(
            expected, abs=5e-4
        )


@pytest.mark.parametrize("p", [2, 3, 6])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.2, 0.8), (1.08, 1.2, 1)])
def test_no_order_of_as_many_micro_batches_hides_more(p: int, f: float, i: float, w: float) -> None:
    """A micro-batch takes p(F+I) + W + 2(p-1)c until the first rank is done with it. That holds n
    at once, so n periods are no less, whatever the order. 2bw takes just that with n = p; with 2p-1
    (warm-up for latency) nothing waits."""
    m = 3 * p
    whole = f + i + w
    for share in (0.4, 0.5, 0.6, 0.9):
        costs = Costs(f, i + w, backward_input=i, transfer=share * w)
        floor = (p * (f + i) + w + 2 * (p - 1) * share * w) / p
        for warmup, period in (("depth", max(whole, floor)), ("latency", whole)):
            schedule = make_schedule(ScheduleOptions("2bw", warmup=warmup))
            took = (
                simulate(
                    make_plan(
                        find_schedule(schedule).with_options(split=True), PipelineShape(p, m), 0, 8
                    ),
                    costs,
                ).step_time(m)
                / m
            )
            assert took == pytest.approx(period)
            assert schedule.max_live_activations(PipelineShape(p, m), 0) == (
                p if warmup == "depth" else 2 * p - 1
            )
