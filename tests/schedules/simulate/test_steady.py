"""Steady states that are found are those that a long plan settles into."""

import random
from dataclasses import replace

import pytest

from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule
from hybridpar.schedules.simulate import predict
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import predict_step_time, predict_timeline
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.schedules.simulate.steady import fewer, time_of_more

WALKED = 5
"""Batches of a plan of which the last two are taken to be steady."""


def walked(schedule_options, sizes, costs):
    plan = make_plan(schedule_options, sizes, 0, WALKED)
    starts = simulate(plan, costs).batch_starts(sizes.num_microbatches)
    return (starts[-1] - starts[-3]) / 2


def random_case(rng):
    p = rng.randint(1, 4)
    v = rng.choice((1, 1, 2)) if p > 1 else 1
    sizes = PipelineShape(p, rng.randint(1, 44) if v == 1 else p * rng.randint(1, 14), v)
    schedule = "interleaved" if v > 1 else rng.choice(("1f1b", "1f1b", "1f1b", "naive", "gpipe"))
    links = p if v > 1 else p - 1

    def some(number, low, high, likely=0.7):
        return (
            [rng.uniform(low, high) for _ in range(number)]
            if rng.random() < likely
            else 0.5 * (low + high)
        )

    if v == 2 and rng.random() < 0.4:
        schedule = "1f1b"
        sizes = PipelineShape(p, rng.randint(p, 3 * p), 2, "v")
        links = p - 1
    split = rng.random() < 0.4 or sizes.is_v
    schedule_options = ScheduleOptions(
        schedule,
        clip=rng.random() < 0.7,
        gather=rng.random() < 0.3,
        split=split,
        zero_bubble=split
        and not sizes.is_v
        and schedule in ("1f1b", "interleaved")
        and rng.random() < 0.7,
        warmup="latency"
        if schedule == "1f1b" and not sizes.is_v and rng.random() < 0.3
        else "depth",
        stage_layout=sizes.stage_layout,
        activations=rng.choice(("full", "half", "min")) if sizes.is_v else "full",
    )
    calls = (
        {kind: 0.1 * rng.random() for kind in (Kind.SEND_F, Kind.RECV_B, Kind.NORM)}
        if rng.random() < 0.5
        else {}
    )
    return (
        schedule_options,
        sizes,
        Costs(
            some(p * v, 0.5, 1.5),
            some(p * v, 1, 3),
            some(p, 0, 1),
            calls,
            reduce=some(p, 0, 3),
            norm=rng.random(),
            gather=some(p, 0, 1) if schedule_options.gather else 0.0,
            transfer=some(links, 0, 1),
            latency=some(links, 0, 1),
            tied=not sizes.is_v and rng.random() < 0.3,
            blocking_norm=rng.random() < 0.5,
            serial_links=rng.random() < 0.5,
            cores=rng.uniform(1, p) if rng.random() < 0.2 else None,
            transfer_work=some(links, 0, 0.3, 0.2),
        ),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_a_walk(seed, monkeypatch):
    found = []

    def noted(*args):
        found.append(time_of_more(*args))
        return found[-1]

    monkeypatch.setattr(predict, "time_of_more", noted)
    rng = random.Random(seed)
    for _ in range(50):
        schedule_options, sizes, costs = random_case(rng)
        assert predict_step_time(schedule_options, sizes, costs) == pytest.approx(
            walked(schedule_options, sizes, costs), rel=1e-9
        ), (schedule_options, sizes, costs)
    assert sum(each is not None for each in found) >= 5, "few micro-batches stand for many"


def test_idle_shares_are_those_of_a_walk():
    sizes = PipelineShape(3, 7)
    costs = Costs([1, 2, 1], 2, [0.1, 0.5, 0.3], reduce=0.4, norm=0.2, transfer=0.3)
    found = predict_timeline(ScheduleOptions("1f1b"), sizes, costs)
    assert len(found.batch_starts(7)) == 2
    step, idle = found.steady_step(7)
    long = simulate(make_plan("1f1b", sizes, 0, 8), costs)
    assert long.drained(7)
    since, until = long.batch_starts(7)[3:5]
    assert step == pytest.approx(until - since, rel=1e-12)
    assert idle == pytest.approx(
        [long.idle_share(rank, since, until) for rank in range(3)], rel=1e-9
    )


@pytest.mark.parametrize("sizes", [PipelineShape(2, 48, 2), PipelineShape(3, 48, 3)])
def test_whole_and_split_backwards_of_a_rank_count_alike(sizes):
    """A zero bubble leaves those of the first stage whole; as few micro-batches as without it show
    the rest."""
    schedule_options = ScheduleOptions("interleaved", split=True, zero_bubble=True)
    costs = Costs(1, 2, transfer=0.1, norm=0.1)
    few = next(fewer(make_schedule(schedule_options), sizes))
    small = replace(sizes, num_microbatches=few)
    plan = make_plan(schedule_options, small, 0, 1)
    assert {a.kind for a in plan[0]} >= {Kind.B, Kind.I, Kind.W}
    each = time_of_more(simulate(plan, costs), make_schedule(schedule_options), small)
    assert each == pytest.approx(3 * sizes.virtual_stages, rel=1e-9)


def test_a_thousand_micro_batches_are_few_to_simulate(monkeypatch):
    made = []
    monkeypatch.setattr(
        predict,
        "make_plan",
        lambda schedule, sizes, *args: (
            made.append(sizes.num_microbatches),
            make_plan(schedule, sizes, *args),
        )[1],
    )
    assert predict_step_time(
        ScheduleOptions("1f1b"), PipelineShape(8, 1001), Costs(1, 2)
    ) == pytest.approx((1001 + 7) * 3, rel=1e-12)
    assert max(made) < 40
