"""Costs found in recorded actions: those that the actions were made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from train.timelines import recorded

from hybridpar.runtime.recording import Event, Usage
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.reporting.measure import _cores as cores_of
from hybridpar.train.reporting.measure import measure
from hybridpar.train.reporting.trace import Host, RankEvents

SIZES = PipelineShape(3, 4)
CALLS = {
    Kind.SEND_F: (0.02, 0.03, 0.0),
    Kind.SEND_B: (0.0, 0.03, 0.02),
    Kind.RECV_F: (0.0, 0.01, 0.01),
    Kind.RECV_B: (0.01, 0.01, 0.0),
    Kind.REDUCE: (0.01, 0.02, 0.03),
    Kind.NORM: (0.2, 0.1, 0.1),
}
COSTS = Costs(
    (1.0, 1.5, 1.25),
    (2.0, 3.0, 2.5),
    (0.5, 0.25, 0.75),
    CALLS,
    reduce=(0.5, 0.6, 0.5),
    norm=0.4,
    latency=(0.3, 0.2),
)


def measured_costs(ranks: list[RankEvents], *, tied: bool = False) -> Costs:
    measured = measure(ranks, SIZES, tied=tied)
    assert measured is not None
    return measured.costs


def close(costs: Costs) -> dict[str, object]:
    """The numbers of the costs, comparable within rounding."""
    numbers = {
        name: pytest.approx(getattr(costs, name))
        for name in (
            "forward",
            "backward",
            "update",
            "reduce",
            "norm",
            "gather",
            "latency",
            "transfer",
            "transfer_work",
        )
    }
    return numbers | {kind.value: pytest.approx(cost) for kind, cost in costs.calls.items()}


def numbers(costs: Costs) -> dict[str, object]:
    names = (
        "forward",
        "backward",
        "update",
        "reduce",
        "norm",
        "gather",
        "latency",
        "transfer",
        "transfer_work",
    )
    return {name: getattr(costs, name) for name in names} | {
        kind.value: cost for kind, cost in costs.calls.items()
    }


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "2bw", "pipedream"])
def test_the_costs_that_actions_were_made_with_are_found_again(schedule: str) -> None:
    found = measured_costs(recorded(schedule, SIZES, COSTS, 8))
    assert numbers(found) == close(replace(COSTS, gather=(0.0,) * 3))
    step, own = (
        predict_timeline(ScheduleOptions(schedule), SIZES, costs).step_time(4)
        for costs in (found, COSTS)
    )
    assert step == pytest.approx(own)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw", "pipedream"])
def test_parts_of_backwards_are_found_and_add_up_to_them(schedule: str) -> None:
    """The first stage's backwards stay whole: of them it is the share of the others'."""
    first, *others = expand(COSTS.backward, 3)
    costs = replace(COSTS, backward_input=(first * 2.5 / sum(others), 1.0, 1.5))
    found = measured_costs(recorded(schedule, SIZES, costs, 8, split=True))
    assert numbers(found) == close(replace(COSTS, gather=(0.0,) * 3))
    assert found.backward_input == pytest.approx(costs.backward_input)
    assert measured_costs(recorded(schedule, SIZES, COSTS, 8)).backward_input is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
def test_costs_of_stages_in_parts_are_those_of_whole_ones(schedule: str) -> None:
    found = measured_costs(recorded(schedule, SIZES, COSTS, 8, parts=2))
    assert numbers(found) == close(replace(COSTS, gather=(0.0,) * 3))


def test_costs_of_chunks_are_found_stage_by_stage_and_those_of_ranks_rank_by_rank() -> None:
    """And on the link that closes the ring, those of its own."""
    sizes = PipelineShape(2, 4, 2)
    costs = Costs(
        (1.0, 1.5, 1.25, 2.0),
        (2.0, 3.0, 2.5, 4.0),
        (0.5, 0.25),
        {Kind.SEND_F: (0.02, 0.03), Kind.NORM: (0.2, 0.1)},
        norm=0.4,
        latency=(0.3, 0.7),
    )
    found = measure(recorded("interleaved", sizes, costs, 8), sizes, tied=False)
    assert found is not None
    for name in ("forward", "backward", "update", "latency"):
        assert getattr(found.costs, name) == pytest.approx(getattr(costs, name)), name
    assert found.costs.calls[Kind.SEND_F] == pytest.approx((0.02, 0.03))
    assert found.costs.calls[Kind.RECV_F] == (0.0, 0.0)
    assert found.step_time == pytest.approx(
        predict_timeline(ScheduleOptions("interleaved"), sizes, found.costs).step_time(4)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_reductions_that_meet_count_from_the_last_to_come(schedule: str) -> None:
    tied = replace(COSTS, reduce=0.5, gather=(0.6, 0.7, 0.8), tied=True)
    found = measured_costs(recorded(schedule, SIZES, tied, 8), tied=True)
    assert found.reduce == pytest.approx((0.5,) * 3)
    assert found.gather == pytest.approx((0.6, 0.7, 0.8))
    assert found.tied


def test_a_batch_that_was_held_up_counts_neither_for_costs_nor_for_the_step_time() -> None:
    ranks = recorded("1f1b", SIZES, COSTS, 10)
    held_up = next(e for e in ranks[1].events if e.action == Action(Kind.F, 1, 9, 2))
    late = []
    for rank in ranks:
        events = []
        for e in rank.events:
            delay = 100.0 * (e.start > held_up.start)
            more = 100.0 * (e is held_up)
            waits = tuple((since + delay, until + delay) for since, until in e.waits)
            events.append(
                replace(
                    e,
                    start=e.start + delay,
                    end=e.end + delay + more,
                    own=e.own + more,
                    waits=waits,
                    over=None if e.over is None else e.over + delay,
                )
            )
        late.append(replace(rank, events=tuple(events)))
    usual = measure(ranks, SIZES, tied=False)
    found = measure(late, SIZES, tied=False)
    assert usual is not None
    assert found is not None
    assert found.step_time == pytest.approx(usual.step_time, rel=1e-3)
    assert found.costs.forward == pytest.approx(COSTS.forward)


def test_all_micro_batches_of_a_batch_count() -> None:
    """The first backward of a batch also empties the buffer; the median micro-batch would not
    know."""
    ranks = [
        replace(
            r,
            events=tuple(
                replace(e, own=e.own + 1)
                if e.action.kind is Kind.B and e.action.microbatch % 4 == 0
                else e
                for e in r.events
            ),
        )
        for r in recorded("1f1b", SIZES, COSTS, 8)
    ]
    assert measured_costs(ranks).backward == pytest.approx((2.25, 3.25, 2.75))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
def test_times_that_vary_are_found_in_the_order_of_micro_batches(schedule: str) -> None:
    varying = {
        Kind.F: ((0.5, 1.0, 1.5, 1.0),) * 3,
        Kind.B: ((0.75, 1.25, 1.0, 1.0), (1.0,) * 4, (1.5, 0.5, 0.5, 1.5)),
    }
    costs = replace(COSTS, variation=varying)
    found = measured_costs(recorded(schedule, SIZES, costs, 12))
    assert numbers(found) == close(replace(COSTS, gather=(0.0,) * 3))
    for kind, rows in varying.items():
        for row, factors in zip(rows, found.variation[kind], strict=True):
            batches = len(factors) // 4
            assert batches >= 3
            assert factors == pytest.approx(row * batches)
    step, own, steady = (
        predict_timeline(ScheduleOptions(schedule), SIZES, c).step_time(4)
        for c in (found, costs, COSTS)
    )
    assert step == pytest.approx(own)
    assert own > 1.01 * steady  # they wait for each other


def test_gaps_belong_to_the_action_that_follows() -> None:
    ranks = [
        replace(r, events=tuple(replace(e, gap=0.125) for e in r.events))
        for r in recorded("1f1b", SIZES, COSTS, 8)
    ]
    found = measured_costs(ranks)
    assert found.forward == pytest.approx((1.125, 1.625, 1.375))
    assert found.calls[Kind.SEND_F] == pytest.approx((0.145, 0.155, 0.0))


def test_cores_are_shared_by_all_ranks_of_a_machine_and_what_others_took_is_gone() -> None:
    here = Host("here", "cpu", 8, threads=2)
    ranks = recorded("1f1b", SIZES, COSTS, 8, host=here)
    assert measured_costs(ranks).cores == pytest.approx(4.0)  # 8 cores, 2 for each rank
    busy = [replace(r, usage=Usage(seconds=10, process=8, beside=0.4, machine=34)) for r in ranks]
    found = measured_costs(busy)
    assert found.cores == pytest.approx(3.5)  # others: 34 - 3 * 8 over 10 seconds
    assert found.transfer_work == pytest.approx(
        3 * 0.4 / (8 * 4 * 4)
    )  # 8 batches of 4, both ways over 2 links
    two_machines = [*ranks[:2], replace(ranks[2], host=replace(here, name="there"))]
    assert measured_costs(two_machines).cores == pytest.approx(3 * (2 + 4) / 2)
    assert measured_costs(recorded("1f1b", SIZES, COSTS, 8)).cores is None  # on GPUs


def test_cores_are_those_that_ranks_got_while_all_were_wanted() -> None:
    #   rank 0   |-- F0, half the time with a core --|---- F1 ----|
    #   rank 1   ............ waits .................|--- F0, 3/4 of the time --|   alone from 4 on
    here = Host("here", "cpu", 2)
    usage = Usage(seconds=10, beside=0.25, machine=20)
    first = [
        Event(Action(Kind.F, 0, 0), 0, 2, own=1),
        Event(Action(Kind.F, 0, 1), 2, 4, own=1.75, gap=0.25),
    ]
    second = [Event(Action(Kind.F, 1, 0), 0, 6, ((0, 2),), own=3)]
    ranks = [
        RankEvents(stage, f"rank {stage}", (0, 0), stage, tuple(events), here, usage)
        for stage, events in enumerate((first, second))
    ]
    assert cores_of(ranks, 2) == pytest.approx(1 + 3 / 4 + 2 * 0.025)
    assert cores_of(ranks[:1], 1) == pytest.approx(
        1 * 0.1
    )  # one alone says nothing; others took all that there was
    several = [
        replace(r, pipeline=(i, 0), stage=s, rank=2 * i + s)
        for i in range(2)
        for s, r in enumerate(ranks)
    ]
    assert cores_of(several, 2) == pytest.approx(2.0 / 2)  # two pipelines share them


@pytest.mark.thorough
def test_the_parts_of_a_step_add_up() -> None:
    measured = measure(recorded("1f1b", SIZES, COSTS, 10), SIZES, tied=False)
    assert measured is not None
    step = measured.step_time
    assert step == pytest.approx(
        predict_timeline(ScheduleOptions("1f1b"), SIZES, COSTS).step_time(4)
    )
    for stage, parts in enumerate(measured.parts):
        assert parts.compute == pytest.approx(4 * (COSTS.forward[stage] + COSTS.backward[stage]))
        assert parts.optimizer == pytest.approx(COSTS.update[stage] + CALLS[Kind.NORM][stage])
        whole = parts.compute + parts.optimizer + parts.calls + parts.waiting
        assert whole == pytest.approx(
            step, rel=2e-3
        )  # the very first batch finds no receive to post before it
        assert parts.no_core == pytest.approx(0, abs=1e-9)
        assert measured.idle[stage] == pytest.approx(parts.waiting / whole)


def test_the_wait_for_a_slow_host_is_told_apart() -> None:
    """1f1b waits for all of it: from NORM's end, but for the calls, to the first forward that needs
    the weights."""
    costs = replace(COSTS, host=(7.0, 6.0, 5.0), update=(0.0,) * 3)
    measured = measure(recorded("1f1b", SIZES, costs, 10), SIZES, tied=False)
    assert measured is not None
    assert measured.costs.host == pytest.approx(costs.host)
    assert [parts.host for parts in measured.parts] == pytest.approx(costs.host)
    parts = measured.parts[0]
    whole = parts.compute + parts.optimizer + parts.calls + parts.waiting + parts.host
    assert whole == pytest.approx(measured.step_time, rel=2e-3)  # as above
    assert measured.idle[0] == pytest.approx(parts.waiting / whole)


def test_own_times_a_little_below_zero_give_no_negative_part() -> None:
    """Two clocks: a thread's, and that of how long it was kept waiting for a core."""
    ranks = recorded("1f1b", SIZES, COSTS, 10)
    events = [
        replace(e, own=-4e-4) if e.action.kind in (Kind.NORM, Kind.UPDATE) else e
        for e in ranks[0].events
    ]
    measured = measure([replace(ranks[0], events=events), *ranks[1:]], SIZES, tied=False)
    assert measured is not None
    assert measured.parts[0].optimizer == 0.0


def test_two_batches_are_too_few() -> None:
    assert measure(recorded("1f1b", SIZES, COSTS, 2), SIZES, tied=False) is None
