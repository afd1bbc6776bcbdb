"""Interleaved 1F1B: its order, its bubble, and that no transport can make it wait in a circle."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from inspect import cleandoc
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.models.balance import balanced_split, even_out
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.draw.perfetto import trace_entries
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.orders import interleaved
from hybridpar.schedules.passes.lowering import forward_actions, make_plan
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    PipelineShape,
    Schedule,
    find_schedule,
    make_schedule,
)
from hybridpar.schedules.simulate.send_window import min_send_window
from hybridpar.schedules.simulate.simulator import Costs, simulate

NAME = "interleaved"
SIZES = [
    PipelineShape(p, m, v)
    for p in range(2, 9)
    for v in (2, 3, 4)
    for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2})
]
ANY = st.builds(PipelineShape, st.integers(2, 8), st.integers(1, 24), st.integers(2, 4))


def test_staircase() -> None:
    drawn = draw(make_plan(NAME, PipelineShape(2, 4, 2)))
    assert "F3b B3b" in drawn
    assert drawn in cleandoc((interleaved.__doc__ or "").replace("\n    ", "\n"))


def test_order_is_megatrons_where_ranks_divide_the_micro_batches() -> None:
    """Narayanan et al. 2021, figure 4: four ranks, two chunks, eight micro-batches."""
    assert [len(r) for r in interleaved.rounds(8, 4)] == [4, 4]
    assert [interleaved.runs_ahead(2)(PipelineShape(4, 8, 2), rank) for rank in range(4)] == [
        10,
        8,
        6,
        4,
    ]
    steps = [
        (kind, stage, k)
        for kind, stage, k in interleaved.order(PipelineShape(4, 8, 2), 3, 4, 0, 1)
        if kind is Kind.F
    ]
    assert [(stage, k) for _, stage, k in steps] == [
        (s, 4 * r + k) for r in (0, 1) for s in (3, 7) for k in range(4)
    ]


@pytest.mark.parametrize(
    ("m", "p", "expected"),
    [(8, 4, [4, 4]), (7, 4, [7]), (11, 4, [6, 5]), (3, 4, [3]), (9, 2, [3, 2, 2, 2])],
)
def test_rounds_hold_at_least_as_many_as_there_are_ranks(
    m: int, p: int, expected: list[int]
) -> None:
    found = interleaved.rounds(m, p)
    assert [len(r) for r in found] == expected
    assert [k for r in found for k in r] == list(range(m))


@pytest.mark.thorough(keep=30)
@pytest.mark.parametrize(
    "sizes", SIZES, ids=lambda s: f"{s.num_ranks}x{s.virtual_stages}-{s.num_microbatches}"
)
def test_every_plan_is_right(sizes: PipelineShape) -> None:
    """The order, the links, memory, and no deadlock where the transfers of a rank on an axis
    queue."""
    report = check(make_plan(NAME, sizes, 0, 2), sizes, NAME)
    bounds = [SCHEDULES[NAME].max_live_activations(sizes, rank) for rank in range(sizes.num_ranks)]
    assert [live.activations for live in report.peaks] == bounds
    if sizes.num_ranks <= 4:
        check(
            make_plan(
                replace(find_schedule(NAME).with_options(clip=False, gather=True), receive_ahead=0),
                sizes,
                3,
                2,
            ),
            sizes,
            NAME,
        )
    simulate(
        {
            rank: tuple(forward_actions(sizes, rank, sizes.num_microbatches))
            for rank in range(sizes.num_ranks)
        },
        Costs(serial_links=True),
    )


@given(ANY, st.floats(0.1, 10), st.floats(0.1, 10))
def test_bubble(sizes: PipelineShape, forward: float, backward: float) -> None:
    """(p-1)/(m v) of the ideal time, also where p does not divide m (with p = m or more)."""
    p = sizes.num_ranks
    m = sizes.num_microbatches
    v = sizes.virtual_stages
    timeline = simulate(make_plan(NAME, sizes), Costs(forward / v, backward / v))
    ideal = m * (forward + backward)
    if m >= p:
        assert timeline.makespan == pytest.approx(ideal * (1 + (p - 1) / (m * v)))
        for rank in range(p):
            assert timeline.busy(rank) == pytest.approx(ideal)
    else:
        once = simulate(make_plan("1f1b", PipelineShape(p, m)), Costs(forward, backward))
        assert ideal < timeline.makespan <= once.makespan * (1 + 1e-9)


@st.composite
def endless(draw: st.DrawFn) -> tuple[Schedule, PipelineShape]:
    """2bw with several stages on each rank, and sizes it can run on."""
    schedule = make_schedule(
        ScheduleOptions("2bw", virtual_stages=2, warmup=draw(st.sampled_from(["depth", "latency"])))
    )
    p = draw(st.integers(2, 7))
    v = draw(st.integers(2, 4))
    ahead = schedule.warmup(PipelineShape(p, 1, v), 0) - (v - 1)
    return schedule, PipelineShape(p, draw(st.integers(ahead, 3 * p + 3)), v)


@given(
    endless(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"gather": True}, {"clip": False}, {"host": 0.5}]),
)
def test_2bw_of_several_stages_on_each_rank(
    made: tuple[Schedule, PipelineShape], whole: bool, split: bool, options
) -> None:  # type: ignore[no-untyped-def]
    """Two versions are enough from as many micro-batches on as without chunks, on whatever
    transport."""
    schedule, sizes = made
    report = check(
        make_plan(find_schedule(schedule).with_options(split=split, **options), sizes, 0, 3),
        sizes,
        schedule,
    )
    for rank, live in enumerate(report.peaks):
        assert live.versions == 2
        assert live.gradients <= 2
        assert live.activations <= schedule.max_live_activations(sizes, rank)


@pytest.mark.parametrize(
    ("p", "m", "gather"),
    [
        (9, 9, True),
        (10, 10, True),
        (11, 10, False),
        (11, 14, True),
        (12, 12, True),
        (16, 15, False),
    ],
)
def test_2bw_of_several_stages_in_deep_pipelines(p: int, m: int, gather: bool) -> None:
    """Few orders of receives fit: just enough micro-batches, and transfers of a rank queue."""
    schedule = make_schedule(ScheduleOptions("2bw", virtual_stages=2))
    sizes = PipelineShape(p, m, 2)
    check(
        make_plan(find_schedule(schedule).with_options(gather=gather), sizes, 0, 3), sizes, schedule
    )


@given(endless(), st.floats(0.1, 10), st.floats(1, 5))
def test_2bw_of_several_stages_has_no_bubble(
    made: tuple[Schedule, PipelineShape], forward: float, times: float
) -> None:
    """From m = p on, whatever m is: rounds may differ. With p micro-batches of a whole rank where p
    divides m.

    Of m = p, as the next test says, if a backward takes 1.5 times as long as a forward.
    """
    schedule, sizes = made
    backward = times * forward
    p = sizes.num_ranks
    m = sizes.num_microbatches
    v = sizes.virtual_stages
    if m > p or (m == p and times >= 1.5):
        took = simulate(
            make_plan(schedule, sizes, 0, 8), Costs(forward / v, backward / v)
        ).step_time(m)
        assert took == pytest.approx(m * (forward + backward))
    if m % p == 0 and schedule.warmup(sizes, 0) < p * v:
        assert schedule.max_live_activations(sizes, 0) == p * v


@pytest.mark.parametrize(
    ("sizes", "times", "bubble"),
    [
        (PipelineShape(5, 5, 2), 1.0, 0.0),
        (PipelineShape(6, 6, 2), 1.0, 0.5),
        (PipelineShape(6, 6, 2), 1.25, 0.25),
        (PipelineShape(6, 6, 2), 1.5, 0.0),
        (PipelineShape(6, 6, 4), 1.0, 0.25),
        (PipelineShape(6, 7, 2), 1.0, 0.0),
        (PipelineShape(12, 12, 2), 1.0, 1.5),
        (PipelineShape(12, 12, 2), 2.0, 0.0),
        (PipelineShape(12, 15, 2), 1.0, 0.0),
    ],
    ids=str,
)
def test_2bw_of_several_stages_has_a_bubble_with_short_backwards(
    sizes: PipelineShape, times: float, bubble: float
) -> None:
    """In deep pipelines with hardly more micro-batches than ranks; in forwards of a whole rank,
    every batch."""
    m = sizes.num_microbatches
    v = sizes.virtual_stages
    plan = make_plan(make_schedule(ScheduleOptions("2bw", virtual_stages=2)), sizes, 0, 8)
    assert simulate(plan, Costs(1 / v, times / v)).step_time(m) - m * (1 + times) == pytest.approx(
        bubble
    )


@pytest.mark.parametrize(("warmup", "hidden"), [("depth", 0.1), ("latency", 0.25)])
def test_2bw_of_several_stages_hides_some_of_a_links_latency(warmup: str, hidden: float) -> None:
    """The overlapped share of a stage's forward and backward is smaller than with one stage on each
    rank, as a ring posts receives late."""
    schedule = make_schedule(ScheduleOptions("2bw", virtual_stages=2, warmup=warmup))
    sizes = PipelineShape(4, 12, 2)
    plan = make_plan(find_schedule(schedule).with_options(split=True), sizes, 0, 8)
    for share, free in ((hidden, True), (hidden + 0.15, False)):
        took = simulate(plan, Costs(0.5, 1.0, latency=share * 1.5)).step_time(12)
        assert (took == pytest.approx(36)) is free, share


RESNET50 = [118, 231, 218, 218, 372, 218, 218, 218, 372, 218, 218, 218, 218, 218, 372, 218, 218, 2]
"""Millions of multiply-adds of its blocks, of an image of 224 x 224 pixels."""


@pytest.mark.parametrize(
    ("chunks", "split", "period"),
    [(1, (5, 4, 5, 4), 1.1335), (2, (3, 2, 2, 2, 2, 2, 2, 3), 1.0065)],
)
def test_2bw_of_several_stages_balances_uneven_blocks(
    chunks: int, split: tuple[int, ...], period: float
) -> None:
    """On four ranks: the step over that of a quarter of the work, for the split that the model's
    would be."""
    assert even_out(tuple(RESNET50), balanced_split(tuple(RESNET50), 4 * chunks), 4) == split
    ends = [0, *accumulate(RESNET50)]
    forward = [
        float(ends[stop] - ends[stop - size])
        for size, stop in zip(split, accumulate(split), strict=True)
    ]
    schedule = make_schedule(
        ScheduleOptions("2bw", virtual_stages=chunks - 1 and chunks, warmup="latency")
    )
    sizes = PipelineShape(4, 8, chunks)
    plan = make_plan(schedule, sizes, 0, 8)
    took = simulate(plan, Costs(forward, [2 * each for each in forward])).step_time(8)
    assert took / (8 * 3 * sum(RESNET50) / 4) == pytest.approx(period, abs=1e-3)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("m", "warmup"), [(400, "depth"), (19, "depth"), (38, "latency"), (401, "latency")]
)
def test_large_runs_of_2bw_are_proven_by_smaller_ones(m: int, warmup: str) -> None:
    (report,) = JobPlan(
        from_mapping(
            {
                "model": {"num_layers": 62},
                "parallel": {"pp": 20, "dp": 1},
                "pipeline": {
                    "schedule": "2bw",
                    "virtual_stages": 3,
                    "num_microbatches": m,
                    "warmup": warmup,
                },
            }
        )
    ).prove()
    assert max(live.versions for live in report.peaks) == 2
    assert report.shape.num_ranks == 12


@given(ANY)
def test_waiting_for_old_sends_is_no_deadlock(sizes: PipelineShape) -> None:
    """The executor waits for a send once so many later ones have started: its receive is then
    posted."""
    plan = make_plan(NAME, sizes, 0, 2)
    done = dict.fromkeys(plan, 0)
    posted: set[Action] = set()
    sent: set[Action] = set()
    unfinished: dict[int, deque[Action]] = {rank: deque() for rank in plan}
    meets = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
    receives = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
    first = {Kind.F: 0, Kind.B: sizes.num_stages - 1}
    last = {Kind.F: -1, Kind.B: 1}
    updates = [0] * sizes.num_ranks

    def can_go_on(rank: int, action: Action) -> bool:
        if action.kind in meets and action.stage != first[action.kind]:
            return (
                Action(meets[action.kind], action.stage + last[action.kind], action.microbatch)
                in sent
            )
        if action.kind in receives and len(unfinished[rank]) >= min_send_window(sizes.num_ranks):
            receive, step = receives[unfinished[rank][0].kind]
            return (
                Action(receive, unfinished[rank][0].stage + step, unfinished[rank][0].microbatch)
                in posted
            )
        return action.kind is not Kind.UPDATE or min(updates) > action.microbatch

    moved = True
    while moved:
        moved = False
        for rank, actions in plan.items():
            while done[rank] < len(actions) and can_go_on(rank, action := actions[done[rank]]):
                if action.kind in receives:
                    sent.add(action)
                    unfinished[rank].append(action)
                    if len(unfinished[rank]) > min_send_window(sizes.num_ranks):
                        unfinished[rank].popleft()
                elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                    posted.add(action)
                elif action.kind is Kind.NORM:
                    updates[rank] += 1
                done[rank] += 1
                moved = True
    assert done == {rank: len(actions) for rank, actions in plan.items()}


def test_a_receive_too_late_in_a_queue_is_found() -> None:
    """All ranks of the ring send first: each waits for the next one to receive."""
    sizes = PipelineShape(2, 2, 2)
    plan = make_plan(NAME, sizes)
    actions = [a for a in plan[0] if a != Action(Kind.RECV_F, 2, 0)]
    actions.insert(actions.index(Action(Kind.SEND_F, 0, 1)) + 1, Action(Kind.RECV_F, 2, 0))
    with pytest.raises(PlanError, match="deadlock"):
        check(plan | {0: tuple(actions)}, sizes, NAME)
    check(plan | {0: tuple(actions)}, sizes, NAME, serial_links=False)


def test_a_message_for_another_chunk_is_found() -> None:
    sizes = PipelineShape(3, 6, 2)
    plan = make_plan(NAME, sizes)
    one, other = (plan[1].index(Action(Kind.RECV_F, stage, k)) for stage, k in ((1, 2), (4, 0)))
    actions = list(plan[1])
    actions[one], actions[other] = actions[other], actions[one]
    with pytest.raises(PlanError, match=r"would be matched with|which it needs"):
        check(plan | {1: tuple(actions)}, sizes, NAME)


def test_links_close_the_ring() -> None:
    """Link 1 of two leads back to the first rank: a transfer there delays the second chunk."""
    sizes = PipelineShape(2, 2, 2)
    plan = make_plan(NAME, sizes)
    free = simulate(plan, Costs(1, 2))
    slow = simulate(plan, Costs(1, 2, transfer=[0, 5]))
    back = plan[0].index(Action(Kind.F, 2, 0, 0))
    assert slow.starts[0][back] == free.starts[0][back] + 5


def test_costs_are_those_of_stages_and_of_ranks() -> None:
    sizes = PipelineShape(2, 2, 2)
    timeline = simulate(make_plan(NAME, sizes), Costs([1, 2, 3, 4], [2, 4, 6, 8], update=[10, 20]))
    assert [timeline.busy(rank) for rank in (0, 1)] == [
        2 * (1 + 3 + 2 + 6) + 10,
        2 * (2 + 4 + 4 + 8) + 20,
    ]


def test_pictures() -> None:
    plan = make_plan(NAME, PipelineShape(2, 4, 2))
    svg = draw_svg(plan)
    assert svg.count(">2b</text>") == 2 * 2, "forward and backward, on both ranks"
    assert ">rank 1</text>" in svg
    assert "stage 1<" not in svg
    entries = list(trace_entries(simulate(plan), {rank: (rank, f"rank {rank}") for rank in (0, 1)}))
    arrows = [e for e in entries if e["ph"] in "sf"]
    sends = [
        a for actions in plan.values() for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)
    ]
    assert len(arrows) == 2 * len(sends) == 2 * 2 * 3 * 4
    assert {e["pid"] for e in arrows} == {0, 1}


@pytest.mark.parametrize(
    ("make", "field", "works"),
    [
        (lambda: PipelineShape(1, 4, 2), "parallel.pp", "1f1b"),
        (lambda: PipelineShape(2, 4, 0), "pipeline.virtual_stages", "1"),
        (
            lambda: make_schedule(ScheduleOptions("1f1b", virtual_stages=2)),
            "pipeline.virtual_stages",
            "0",
        ),
        (
            lambda: make_schedule(ScheduleOptions(NAME, virtual_stages=1)),
            "pipeline.virtual_stages",
            "0",
        ),
        (
            lambda: make_schedule(ScheduleOptions(NAME, warmup="latency")),
            "pipeline.warmup",
            "depth",
        ),
        (
            lambda: SCHEDULES["pipedream"].check_shape(PipelineShape(2, 4, 2)),
            "pipeline.virtual_stages",
            "0",
        ),
        (
            lambda: make_schedule(ScheduleOptions("2bw", virtual_stages=2, warmup="bandwidth")),
            "pipeline.warmup",
            "depth",
        ),
        (
            lambda: make_schedule(ScheduleOptions("2bw", virtual_stages=2, gradient_buffers=1)),
            "pipeline.gradient_buffers",
            "0",
        ),
        (
            lambda: make_schedule(
                ScheduleOptions("2bw", virtual_stages=2, early_switch=1)
            ).check_shape(PipelineShape(2, 4, 2)),
            "pipeline.early_switch",
            "off",
        ),
        (
            lambda: make_schedule(ScheduleOptions("2bw", virtual_stages=2)).check_shape(
                PipelineShape(4, 2, 2)
            ),
            "pipeline.num_microbatches",
            "3",
        ),
        (
            lambda: make_schedule(
                ScheduleOptions("2bw", virtual_stages=2, warmup="latency")
            ).check_shape(PipelineShape(4, 4, 2)),
            "pipeline.num_microbatches",
            "6",
        ),
    ],
)
def test_refused(make, field, works) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        make()
    (problem,) = error.value.problems
    assert problem.field == field
    assert works in problem.suggestion
