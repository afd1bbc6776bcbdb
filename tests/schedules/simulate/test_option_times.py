"""Costs of a schedule's options, simulated, and against a simulation written apart."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.simulate.test_simulator import relative_step
from schedules.test_options import options_of_2bw

from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import WARMUPS, PipelineShape, find_schedule, make_schedule
from hybridpar.schedules.simulate.simulator import Costs, simulate


def independent_starts(p, m, num_batches, run_ahead, switch, forward, backward, latency, update):
    """When each forward starts, by (stage, micro-batch): the dependencies of early-switch 2BW
    written down once more. Without a norm: W(v) is there `update` after the stage's last backward
    of batch v - 1."""
    total = m * num_batches
    orders = []
    for r in range(p):
        warmup = min(run_ahead * (p - 1 - r), total)
        order = [("F", k) for k in range(warmup)]
        for k in range(total - warmup):
            order += [("F", warmup + k), ("B", k)]
        orders.append(order + [("B", k) for k in range(total - warmup, total)])
    at = [0] * p
    clock = [0.0] * p
    ended = {}
    started = {}
    ready = {}
    while any(at[r] < len(orders[r]) for r in range(p)):
        progress = False
        for r in range(p):
            while at[r] < len(orders[r]):
                kind, k = orders[r][at[r]]
                batch, i = divmod(k, m)
                neighbour = r - 1 if kind == "F" else r + 1
                needs = [0.0 if not 0 <= neighbour < p else ended.get((kind, k, neighbour))]
                if kind == "F":
                    version = max(batch - 1 if i < p - 1 + switch else batch, 0)
                    needs.append(ready.get((version, r)) if version else 0.0)
                if None in needs:
                    break
                arrived = needs[0] + (latency if 0 <= neighbour < p else 0)
                start = max(clock[r], arrived, *needs[1:])
                clock[r] = ended[kind, k, r] = start + (forward if kind == "F" else backward)
                if kind == "F":
                    started[r, k] = start
                elif i == m - 1:
                    ready[batch + 1, r] = clock[r] + update
                at[r] += 1
                progress = True
        assert progress, "deadlock"
    return started


@given(
    options_of_2bw(6, 14),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(0, 30),
)
def test_agrees_with_an_independent_simulation(setting, forward, backward, latency, reduce):
    options, sizes = setting
    p = sizes.num_stages
    m = sizes.num_microbatches
    latency = (
        min(latency, forward, backward) / 2
    )  # a receive that is posted one action ahead is early enough for that
    schedule = make_schedule(
        ScheduleOptions("2bw", warmup=options["warmup"], early_switch=options["early_switch"])
    )
    plan = make_plan(find_schedule(schedule).with_options(clip=False), sizes, 0, 4)
    timeline = simulate(plan, Costs(forward, backward, latency=latency, reduce=reduce))
    starts = {
        (rank, action.microbatch): start
        for rank in plan
        for action, start in zip(plan[rank], timeline.starts[rank], strict=True)
        if action.kind is Kind.F
    }
    switch = m - p + 1 if options["early_switch"] is None else options["early_switch"]
    run_ahead = WARMUPS[options["warmup"]]
    assert starts == independent_starts(
        p, m, 4, run_ahead, switch, forward, backward, latency, reduce
    )


CPU = {
    "blocking_norm": True,
    "tied": True,
}  # the worst case: NORM blocks, and its REDUCE meets the other end


@pytest.mark.parametrize("where", [{}, CPU])
@pytest.mark.parametrize("m", [16, 32, 64])
def test_early_switch_by_one_costs_nothing(m, where):
    schedule = make_schedule(ScheduleOptions("2bw", early_switch=1))
    assert relative_step(schedule, 8, m, reduce=1, norm=0.5, **where) == 1
    assert schedule.mean_delay(PipelineShape(8, m), 0) == 8 / m


@pytest.mark.parametrize("m", [32, 64])
def test_early_switch_by_nothing_waits_for_the_reduction(m):
    schedule = make_schedule(ScheduleOptions("2bw", early_switch=0))
    assert relative_step(schedule, 8, m, reduce=1.5) == pytest.approx(1 + 1.5 / (3 * m))
    assert schedule.mean_delay(PipelineShape(8, m), 0) == 7 / m


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("reduce", [1.5, 3, 6])
def test_a_later_switch_hides_a_longer_reduction(reduce):
    steps = [
        relative_step(
            make_schedule(ScheduleOptions("2bw", early_switch=switch)), 8, 32, reduce=reduce
        )
        for switch in range(5)
    ]
    assert all(later <= earlier for earlier, later in pairwise(steps))
    assert steps[0] == pytest.approx(1 + reduce / 96)
    hidden = next(switch for switch in range(5) if switch * 3 >= reduce)
    assert steps[hidden] == 1


def test_one_pair_is_hidden_where_the_pipeline_is_just_full():
    assert relative_step(make_schedule(ScheduleOptions("2bw")), 8, 8, reduce=3) == 1
    assert relative_step(make_schedule(ScheduleOptions("2bw")), 8, 8, reduce=6) == pytest.approx(
        1.125
    )


@pytest.mark.parametrize(
    ("p", "m", "pairs"), [(1, 4, 3), (1, 16, 15), (2, 8, 5), (4, 16, 11), (8, 16, 6), (8, 32, 22)]
)
def test_norm_leaves_the_slack_to_the_reduction(p, m, pairs):
    assert (
        relative_step(
            make_schedule(ScheduleOptions("2bw")),
            p,
            m,
            reduce=3 * pairs,
            norm=0.5,
            blocking_norm=True,
        )
        == 1
    )


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("latency", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("early_switch", [None, 8])
def test_a_longer_warmup_hides_the_latency(latency, early_switch):
    for_latency = make_schedule(ScheduleOptions("2bw", warmup="latency", early_switch=early_switch))
    for_depth = make_schedule(ScheduleOptions("2bw", early_switch=early_switch))
    costs = {"latency": latency, "reduce": 0.5}
    assert (
        relative_step(for_latency, 8, 32, **costs)
        == relative_step(for_latency, 8, 32, **costs, **CPU)
        == 1
    )
    assert relative_step(for_depth, 8, 32, **costs) > 1 + 0.5 * latency


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("warmup", "costs"),
    [
        ("latency", {"latency": 1.5}),
        ("latency", {"transfer": 1.25, "latency": 0.25}),
        ("bandwidth", {"latency": 2}),
        ("bandwidth", {"transfer": 2.5, "latency": 0.5}),
    ],
)
def test_longer_warmups_hide_transfers_of_half_a_pair_and_of_a_whole_one(warmup, costs):
    """The most they can hide, and transfers longer than a forward: receives are posted early
    enough."""
    assert relative_step(make_schedule(ScheduleOptions("2bw", warmup=warmup)), 8, 64, **costs) == 1
    shorter = next(name for name, factor in WARMUPS.items() if factor == WARMUPS[warmup] - 1)
    assert (
        relative_step(make_schedule(ScheduleOptions("2bw", warmup=shorter)), 8, 64, **costs) > 1.1
    )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_half_micro_batches_hide_what_whole_ones_cannot_in_fewer_samples(p):
    """A link of 0.7 W each way: 2p - 1 halves are fewer samples than the p that the ordinary
    warm-up has in flight."""
    depth, latency = (
        make_schedule(ScheduleOptions("2bw", warmup=warmup)) for warmup in ("depth", "latency")
    )
    whole, halves = (
        simulate(
            make_plan(
                find_schedule(schedule).with_options(split=True), PipelineShape(p, m), num_batches=8
            ),
            Costs(4 * p / m, 8 * p / m, latency=2.8 / 4),
        ).step_time(m)
        for schedule, m in ((depth, p * 4), (latency, p * 8))
    )
    assert (whole > 1.05 * halves, halves) == (True, pytest.approx(p * 4 * 3))
    assert latency.max_live_activations(
        PipelineShape(p, 8 * p), 0
    ) < 2 * depth.max_live_activations(PipelineShape(p, 4 * p), 0)


def test_a_longer_warmup_hides_latency_for_1f1b_too():
    depth, latency = (
        make_schedule(ScheduleOptions("1f1b", warmup=warmup)) for warmup in ("depth", "latency")
    )
    # one round trip a batch is left of one for every warm-up
    assert relative_step(latency, 8, 32, latency=0.5) == pytest.approx((39 * 3 + 2 * 7 * 0.5) / 96)
    assert (
        relative_step(depth, 8, 32, latency=0.5) > relative_step(latency, 8, 32, latency=0.5) + 0.2
    )


def test_one_gradient_buffer_waits_once_a_batch():
    """Less than a flush, which also fills the pipeline anew; all stages wait for stage 0 to end the
    batch."""
    one, two, flush = (
        relative_step(schedule, 8, 32, reduce=1, norm=0.5)
        for schedule in (
            make_schedule(ScheduleOptions("2bw", gradient_buffers=1)),
            make_schedule(ScheduleOptions("2bw")),
            make_schedule(ScheduleOptions("1f1b")),
        )
    )
    assert two == 1
    assert one == pytest.approx(
        1 + (7 * 2 + 0.5) / 96
    )  # a backward runs up the pipeline; a forward hides the REDUCE
    assert flush == pytest.approx(1 + (7 * 3 + 1.5) / 96)


def test_an_update_takes_its_own_time_and_no_more():
    """No place for UPDATE is better: no stage of a balanced pipeline has a gap for it."""
    for options in ({}, {"early_switch": 2}, {"warmup": "latency"}):
        for gather in (False, True):
            schedule = make_schedule(ScheduleOptions("2bw", **options))
            assert relative_step(
                schedule, 4, 16, reduce=1, update=0.75, gather=gather
            ) == pytest.approx(1 + 0.75 / 48)
