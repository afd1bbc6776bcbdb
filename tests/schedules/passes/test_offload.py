"""Activations that wait in the slow tier: what the pass promises, that check finds what is wrong,
and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import text_of

from hybridpar.schedules.action import Action, parse_actions
from hybridpar.schedules.draw.perfetto import trace_entries
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, OFFLOAD_KINDS, Kind
from hybridpar.schedules.passes.lowering import lower, make_plan
from hybridpar.schedules.passes.offload import add_offload, most_away
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape, find_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import free_to_leave, predict_timeline
from hybridpar.schedules.simulate.simulator import simulate


def most_here(actions: list[Action]) -> int:
    """The most micro-batches in memory while one is computed with, that one included."""
    here = 0
    most = 0
    for action in actions:
        if action.kind in COMPUTE:
            most = max(most, here + (action.kind is Kind.F))
        here += (
            ACTION_SPECS[action.kind].holds
            + (action.kind is Kind.RELOAD)
            - (action.kind is Kind.EVICT)
        )
    return most


def test_who_leaves_when() -> None:
    """The drawing of offload.py: two of four are away, and the first stage of 1f1b waits twice a
    batch."""
    actions = [
        a
        for a in lower(ScheduleOptions("1f1b", offload=9), PipelineShape(4, 6), 0, 0, 1)
        if a.kind in COMPUTE.union(OFFLOAD_KINDS)
    ]
    assert text_of(actions).replace("@0v0", "").replace("@0", "") == (
        "F0 OFFLOAD0 F1 EVICT0 OFFLOAD1 F2 EVICT1 OFFLOAD2 F3 EVICT2 OFFLOAD3 RELOAD0 B0 EVICT3 "
        "RELOAD1 F4 OFFLOAD4 B1 "
        "EVICT4 RELOAD2 F5 OFFLOAD5 B2 EVICT5 RELOAD3 RELOAD4 B3 RELOAD5 B4 B5"
    )


@pytest.mark.parametrize("name", ["1f1b", "2bw", "pipedream", "gpipe"])
@pytest.mark.parametrize("split", [False, True])
def test_so_many_are_away_at_once(name: str, split: bool) -> None:
    sizes = PipelineShape(6, 9)
    for rank in range(6):
        in_flight = SCHEDULES[name].max_live_activations(sizes, rank)
        for away in range(9):
            here = most_here(
                list(
                    lower(
                        find_schedule(name).with_options(offload=away, split=split),
                        sizes,
                        rank,
                        0,
                        3,
                    )
                )
            )
            if in_flight == 3:  # its first forwards are too near their backwards
                assert here == 3
            else:
                assert here == in_flight - min(away, most_away(SCHEDULES[name], sizes, rank))


@given(st.data())
def test_every_plan_is_right_and_changes_nothing_else(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = 2 if name == "interleaved" else 1
    p = data.draw(st.integers(chunks, 7))
    m = data.draw(st.integers(1, 20))
    sizes = PipelineShape(
        p, max(m, p) if chunks > 1 or SCHEDULES[name].needs_full_pipeline else m, chunks
    )
    away = data.draw(st.integers(1, 9))
    split = data.draw(st.booleans())
    parts = data.draw(st.integers(1, 2))
    plan = make_plan(
        find_schedule(name).with_options(offload=away, split=split), sizes, 1, 3, parts=parts
    )
    check(plan, sizes, name)
    assert {
        rank: tuple(a for a in actions if a.kind not in OFFLOAD_KINDS)
        for rank, actions in plan.items()
    } == make_plan(find_schedule(name).with_options(split=split), sizes, 1, 3, parts=parts)
    for rank, actions in plan.items():
        before = most_here(
            list(lower(find_schedule(name).with_options(split=split), sizes, rank, 1, 3))
        )
        assert most_here([a for a in actions if a.part == 0]) <= before
        assert before > 2 or not any(a.kind is Kind.OFFLOAD for a in actions)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.OFFLOAD, "OFFLOAD0@0 is missing"),
        (Kind.EVICT, "EVICT0@0 is missing"),
        (Kind.RELOAD, "RELOAD0@0 is missing"),
    ],
)
def test_a_move_that_is_missing(kind: Kind, message: str) -> None:
    sizes = PipelineShape(4, 4)
    plan = make_plan(ScheduleOptions("1f1b", offload=2), PipelineShape(4, 4))
    wrong = {**plan, 0: tuple(a for a in plan[0] if a.kind is not kind)}
    with pytest.raises(PlanError) as caught:
        check(wrong, sizes, "1f1b")
    assert caught.value.reason == message


def test_a_move_of_what_is_not_there() -> None:
    sizes = PipelineShape(4, 4)
    plan = make_plan(ScheduleOptions("1f1b", offload=2), PipelineShape(4, 4))
    for text, message in (
        ("OFFLOAD9@0", "OFFLOAD9@0 does not belong in this plan"),
        ("OFFLOAD0@0", "OFFLOAD0@0 appears twice"),
    ):
        with pytest.raises(PlanError, match=message):
            check({**plan, 0: (*plan[0], *parse_actions(text))}, sizes, "1f1b")


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (Kind.OFFLOAD, Kind.F),
        (Kind.EVICT, Kind.OFFLOAD),
        (Kind.RELOAD, Kind.EVICT),
        (Kind.B, Kind.RELOAD),
    ],
)
def test_a_move_that_comes_too_early(early: Kind, late: Kind) -> None:
    plan = make_plan(ScheduleOptions("1f1b", offload=2), PipelineShape(4, 4))
    actions = list(plan[0])
    steps = {action.kind: step for step, action in enumerate(actions) if not action.microbatch}
    actions.insert(steps[late], actions.pop(steps[early]))
    with pytest.raises(PlanError, match=rf"^{early}0@0(v0)? comes before "):
        check({**plan, 0: tuple(actions)}, PipelineShape(4, 4), "1f1b")


def test_nothing_to_move() -> None:
    actions = list(lower("1f1b", PipelineShape(2, 5), 0, 0, 2))
    assert list(add_offload(actions, 3, 2)) == list(add_offload(actions, 0, 9)) == actions


@pytest.mark.parametrize(
    ("offload", "reload", "takes"), [(0, 0, 18), (1, 1, 20), (2, 1, 25), (4, 1, 36)]
)
def test_costs_of_offload(offload: float, reload: float, takes: float) -> None:
    """A rank alone, gpipe with six micro-batches, a forward 1, a backward 2: it waits where the
    last one must be out before the first comes back, and wherever a copy takes longer than what it
    goes on beside."""
    timeline = simulate(
        make_plan(ScheduleOptions("gpipe", offload=4), PipelineShape(1, 6)),
        Costs(1, 2, offload=offload, reload=reload),
    )
    assert timeline.makespan == takes
    assert any(timeline.item_waits(0)) == (takes > 18)


@pytest.mark.parametrize("takes", [0.0, 0.1, 0.5, 1.0, 2.0, 100.0])
def test_most_micro_batches_that_cost_no_time(takes: float) -> None:
    """One more on the rank that it was counted on last takes longer; none where a copy takes for
    ever."""
    costs, schedule_options = Costs(1, 2, offload=takes, reload=takes), ScheduleOptions("gpipe")

    def step(sizes: PipelineShape, away: tuple[int, ...]) -> float:
        return predict_timeline(replace(schedule_options, offload=away), sizes, costs).step_time(
            sizes.num_microbatches
        )

    alone = PipelineShape(1, 12)
    (number,) = free_to_leave(costs, alone, schedule_options)
    assert number == max(n for n in range(11) if step(alone, (n,)) <= 1.01 * step(alone, (0,)))
    sizes = PipelineShape(3, 8)
    found = free_to_leave(costs, sizes, schedule_options)
    assert step(sizes, found) <= 1.01 * step(sizes, (0, 0, 0))
    assert {0.0: found == (6, 6, 6), 100.0: found == (0, 0, 0)}.get(takes, True)


RESIDENT = Costs((1.0, 1.1, 0.9), (2.0, 2.1, 1.9), update=0.2)


def by_trial_and_error(
    slower: float, takes: float, sizes: PipelineShape, most: tuple[int, ...]
) -> tuple[int, ...]:
    """The answer of `free_to_leave`, by simulating every number of one rank after the other. A rank
    of which any leave computes by a factor `slower`."""

    def step(away: tuple[int, ...]) -> float:
        forward, backward = (
            [slower * one if away[rank] else one for rank, one in enumerate(costs)]
            for costs in (FORWARD, BACKWARD)
        )
        costs = Costs(forward, backward, update=0.2, offload=takes, reload=takes)
        return simulate(
            make_plan(ScheduleOptions("gpipe", offload=away), sizes, 0, 12), costs
        ).step_time(sizes.num_microbatches)

    limit = 1.02 * step((0, 0, 0))
    if step(most) <= limit:
        return most
    chosen = (0, 0, 0)
    for rank in range(3):
        tried = [(*chosen[:rank], number, *chosen[rank + 1 :]) for number in range(most[rank] + 1)]
        chosen = max(one for one in tried if step(one) <= limit)
    return chosen


FORWARD = (1.0, 1.1, 0.7)
BACKWARD = (2.0, 2.1, 1.4)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("at_most", [None, (3, 3, 3)])
@pytest.mark.parametrize("takes", [0.1, 0.8, 1.5])
@pytest.mark.parametrize("slower", [1.0, 1.015, 1.1, 1.5])
def test_time_lost_by_leaving_is_a_cost(
    slower: float, takes: float, at_most: tuple[int, ...] | None
) -> None:
    """CUDA graphs, say. The last of these three ranks has time to spare, and may be slower at no
    cost."""
    sizes = PipelineShape(3, 8)
    schedule_options = ScheduleOptions("gpipe")
    resident = Costs(FORWARD, BACKWARD, update=0.2)
    costs = Costs(
        [slower * one for one in FORWARD],
        [slower * one for one in BACKWARD],
        update=0.2,
        offload=takes,
        reload=takes,
    )
    found = free_to_leave(costs, sizes, schedule_options, resident=resident, at_most=at_most)
    assert found == by_trial_and_error(slower, takes, sizes, at_most or (6, 6, 6))
    if takes == 0.1 and slower != 1.015:
        most = at_most or (6, 6, 6)
        assert found == {1.0: most, 1.1: (0, 0, most[2]), 1.5: (0, 0, 0)}[slower]


def test_costs_of_some_ranks() -> None:
    """Rows by stage, of which a rank has two here; rows that both have in common and concurrent
    work stays."""
    one = Costs(
        (1, 1, 1, 1),
        2,
        update=1.0,
        calls={Kind.NORM: 1.0},
        offload=5.0,
        variation={Kind.F: [(1.0,)] * 4},
    )
    other = Costs(
        3,
        (4, 5, 6, 7),
        update=(8.0, 9.0),
        calls={Kind.NORM: 2.0},
        variation={Kind.B: [(0.5, 1.5)] * 4},
        backward_input=(3, 3, 3, 3),
    )
    mixed = one.with_ranks_of(other, [False, True], [0, 1, 1, 0])
    assert mixed.forward == (1, 3, 3, 1)
    assert mixed.backward == (2, 5, 6, 2)
    assert mixed.backward_input == (1, 3, 3, 1)
    assert mixed.update == (1.0, 9.0)
    assert mixed.calls == {Kind.NORM: (1.0, 2.0)}
    assert mixed.offload == 5.0
    assert mixed.variation == {
        Kind.F: ((1.0,),) * 4,
        Kind.B: ((1.0,), (0.5, 1.5), (0.5, 1.5), (1.0,)),
    }


def test_copies_that_take_the_ranks_own_time_are_not_free() -> None:
    costs = Costs(1, 2, calls={Kind.OFFLOAD: 0.5, Kind.RELOAD: 0.5})
    assert free_to_leave(costs, PipelineShape(1, 12), ScheduleOptions("gpipe")) == (0,)


def test_each_rank_has_its_own_number() -> None:
    sizes = PipelineShape(4, 6)
    away = (2, 0, 0, 0)
    for rank, actions in make_plan(ScheduleOptions("gpipe", offload=away), sizes).items():
        assert actions == tuple(
            lower(ScheduleOptions("gpipe", offload=away[rank]), sizes, rank, 0, 1)
        )
        assert any(a.kind is Kind.OFFLOAD for a in actions) == (away[rank] > 0)


def test_it_is_drawn() -> None:
    timeline = simulate(
        make_plan(ScheduleOptions("gpipe", offload=4), PipelineShape(1, 6)),
        Costs(1, 2, offload=0.5, reload=3.0),
    )
    picture = draw_svg(timeline)
    for text in (
        "OFFLOAD0@0: offload of micro-batch 0 on its way, 1 to 1.5",
        "activations reloaded, offloaded",
        "waits for the slow tier",
    ):
        assert text in picture
    assert {"offload", "reload"} <= {
        entry["args"]["name"]
        for entry in trace_entries(timeline, {0: (0, "rank")})
        if entry["name"] == "thread_name"
    }
