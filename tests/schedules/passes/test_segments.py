from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import drawn_sizes, text_of

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.passes.lowering import forward_actions, lower, make_plan
from hybridpar.schedules.passes.segments import Division, PartCounts
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape, find_schedule
from hybridpar.schedules.simulate.simulator import Costs, simulate


def one_rank(division, num_microbatches=2, schedule="gpipe", **options):
    schedule = find_schedule(schedule).with_options(**options)
    text = text_of(lower(schedule, PipelineShape(1, num_microbatches), 0, 0, 1, parts=division))
    return text.replace("@0", "").replace("v0", "")


def test_every_action_becomes_its_parts():
    assert one_rank(3, 1) == "F0 F0.1 F0.2 B0.2 B0.1 B0 REDUCE0 NORM0 UPDATE0 UPDATE0.1 UPDATE0.2"
    split = lower(
        ScheduleOptions("1f1b", split=True),
        PipelineShape(2, 1),
        1,
        0,
        1,
        parts=Division(2, norms=True),
    )
    assert text_of(split).replace("@1", "").replace("v0", "") == (
        "RECV_F0 F0 F0.1 I0.1 I0 SEND_B0 W0.1 W0 REDUCE0 NORM0.1 NORM0 UPDATE0 UPDATE0.1"
    )
    assert (
        one_rank(Division(2, update_parts=3), 1)
        == "F0 F0.1 B0.1 B0 REDUCE0 NORM0 UPDATE0 UPDATE0.1 UPDATE0.2"
    )


def test_part_by_part_weights_are_needed_once_a_sweep():
    assert (
        one_rank(Division(2, part_major=True))
        == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1 REDUCE0 NORM0 UPDATE0 UPDATE0.1"
    )
    assert one_rank(Division(2, part_major=True), schedule="1f1b") == one_rank(
        2, schedule="1f1b"
    ), "by turns"
    forwards = forward_actions(PipelineShape(1, 2), 0, 2, parts=Division(2, part_major=True))
    assert text_of(forwards) == "F0@0 F1@0 F0@0.1 F1@0.1"


def test_part_by_part_is_for_one_rank():
    with pytest.raises(ConfigError, match=r"parallel\.pp = 2.*try 1"):
        lower("gpipe", PipelineShape(2, 2), 0, parts=Division(2, part_major=True))
    with pytest.raises(ConfigError, match=r"parallel\.pp = 2"):
        forward_actions(PipelineShape(2, 2), 0, 2, parts=Division(2, part_major=True))


def test_transfers_are_of_the_ends():
    first, last = make_plan("1f1b", PipelineShape(2, 1), parts=2).values()
    assert text_of(first) == (
        "RECV_B0@0 F0@0v0 F0@0.1v0 SEND_F0@0 B0@0.1v0 B0@0v0 REDUCE0@0 NORM0@0 UPDATE0@0 "
        "UPDATE0@0.1"
    )
    assert text_of(last).startswith("RECV_F0@1 F0@1v0 F0@1.1v0 B0@1.1v0 B0@1v0 SEND_B0@1")


def test_stages_of_a_rank_may_differ():
    sizes = PipelineShape(2, 2, 2)
    counts = PartCounts(
        make_plan("interleaved", sizes, parts=Division({0: 1, 1: 2, 2: 3, 3: 4}))[0]
    )
    assert [counts.count(Kind.B, stage) for stage in sizes.stages_of(0)] == [1, 3]
    assert counts.count(Kind.UPDATE, 0) == 1 + 3, "through both stages of the rank"
    assert counts.count(Kind.NORM, 0) == 1
    assert (
        counts.first(Kind.W, 2),
        counts.last(Kind.W, 2),
        counts.first(Kind.F, 2),
        counts.last(Kind.F, 2),
    ) == (2, 0, 0, 2)


CASES = (
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 5),
    st.booleans(),
)


@given(*CASES, st.booleans(), st.booleans())
def test_a_divided_plan_is_right_and_holds_and_takes_what_the_whole_one_does(
    name, p, m, seed, split, norms, late
):
    sizes = drawn_sizes(name, p, m)
    whole = make_plan(find_schedule(name).with_options(split=split), sizes, 0, 3)
    division = Division(
        {s: 1 + (7 * s + seed) % 4 for s in range(sizes.num_stages)}, norms=norms, late=late
    )
    divided = make_plan(find_schedule(name).with_options(split=split), sizes, 0, 3, parts=division)
    one = check(whole, sizes, name)
    other = check(divided, sizes, name)
    assert one.peaks == other.peaks
    costs = Costs(2.0, 3.0, 1.5, reduce=0.5, norm=0.25, gather=0.5, transfer=0.25, tied=True)
    one, other = (simulate(plan, costs).makespan for plan in (whole, divided))
    # a chunk need not wait for the updates of later ones on its rank
    assert (
        other < one + 1e-9
        if late and name == "interleaved"
        else other == pytest.approx(one, rel=1e-12)
    )


@given(*CASES, st.data())
def test_a_fault_in_a_divided_plan_is_found(name, p, m, seed, split, data):
    """Any part left out, told twice, or put before the part (or action) that it needs."""
    sizes = drawn_sizes(name, p, m)
    plan = make_plan(
        find_schedule(name).with_options(split=split),
        sizes,
        0,
        2,
        parts=Division(2 + seed % 3, norms=True),
    )
    rank = data.draw(st.integers(0, sizes.num_ranks - 1))
    actions = list(plan[rank])
    step = data.draw(st.sampled_from([i for i, a in enumerate(actions) if a.part]))
    action, way = actions[step], data.draw(st.sampled_from(["left out", "twice", "too early"]))
    if way == "left out":
        del actions[step]
    elif way == "twice":
        actions.insert(step, action)
    else:
        counts = PartCounts(actions)
        falls = action.kind not in (Kind.F, Kind.UPDATE)
        before = replace(action, part=action.part + (1 if falls else -1))
        if before.part == counts.count(
            action.kind, action.stage
        ):  # the first to run: needs another kind
            kind = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I, Kind.NORM: Kind.REDUCE}[
                action.kind
            ]
            before = next(
                a
                for a in reversed(actions)
                if a.kind is kind and a.microbatch == action.microbatch and a.stage == action.stage
            )
        del actions[step]
        actions.insert(actions.index(before), action)
    with pytest.raises(PlanError):
        check(plan | {rank: tuple(actions)}, sizes, name)


@pytest.mark.parametrize("late", [False, True])
def test_a_part_of_a_version_is_there_before_it_is_computed_with(late):
    plan = make_plan("1f1b", PipelineShape(1, 1), 0, 2, parts=Division(2, late=late))[0]
    text = text_of(plan).replace("@0", "")
    assert ("UPDATE0 F1v1 UPDATE0.1 F1.1v1" if late else "UPDATE0 UPDATE0.1 F1v1 F1.1v1") in text
    update = plan.index(Action(Kind.UPDATE, 0, 0, 1, 1))
    use = plan.index(Action(Kind.F, 0, 1, 1, 1))
    moved = [*plan[:update], *plan[update + 1 : use + 1], plan[update], *plan[use + 1 :]]
    with pytest.raises(PlanError, match=r"F1@0\.1v1 comes before UPDATE0@0\.1, which it needs"):
        check({0: moved}, PipelineShape(1, 1), "1f1b")


def test_updates_that_are_late():
    """Part by part; through both stages of a rank; all together where they cannot be cut; at the
    end of the range."""

    def text(sizes, schedule, division, **options):
        actions = lower(
            find_schedule(schedule).with_options(**options), sizes, 0, 0, 2, parts=division
        )
        return text_of(
            action for action in actions if not ACTION_SPECS[action.kind].peer_offset
        ).replace("@0", "")

    major = text(PipelineShape(1, 2), "gpipe", Division(2, part_major=True, late=True))
    assert "NORM0 UPDATE0 F2v1 F3v1 UPDATE0.1 F2.1v1 F3.1v1 B2.1v1" in major
    assert major.endswith("REDUCE1 NORM1 UPDATE1 UPDATE1.1")
    chunks = text(PipelineShape(2, 2, 2), "interleaved", Division(2, late=True))
    assert (
        "UPDATE0 F2v1 UPDATE0.1 F2.1v1 F3v1 F3.1v1 UPDATE0.2 F2@2v1 UPDATE0.3 F2@2.1v1 F3@2v1"
    ) in chunks
    assert "UPDATE0 F1v1 F1.1v1" in text(
        PipelineShape(1, 1), "1f1b", Division(2, update_parts=1, late=True)
    )
    assert "F3v0 UPDATE0 " not in text(PipelineShape(1, 2), "2bw", Division(2, late=True)), (
        "not earlier than it was"
    )


@given(*CASES, st.sampled_from([0.3, 2 / 3, 1.0]), st.booleans())
def test_a_plan_with_a_host_is_right_and_each_part_waits_for_its_own(
    name, p, m, seed, split, host, gather
):
    """HOST lies between NORM and UPDATE, and what an UPDATE waits for is needed by the forward
    behind it."""
    sizes = drawn_sizes(name, p, m)
    division = Division({s: 1 + (7 * s + seed) % 4 for s in range(sizes.num_stages)})
    plan = make_plan(
        find_schedule(name).with_options(split=split, host=host, gather=gather),
        sizes,
        0,
        4,
        parts=division,
    )
    report = check(plan, sizes, name)
    assert (
        report.peaks
        == check(
            make_plan(find_schedule(name).with_options(split=split, gather=gather), sizes, 0, 4),
            sizes,
            name,
        ).peaks
    )
    for actions in plan.values():
        assert [a.microbatch for a in actions if a.kind is Kind.HOST] == [0, 1, 2, 3]
        for action, following in pairwise(actions):
            draining = gather or action.microbatch > 1  # or others wait for what the update begins
            assert (
                action.kind is not Kind.UPDATE
                or draining
                or following.kind not in (Kind.B, Kind.I, Kind.W)
            )
    at = next(i for i, action in enumerate(plan[0]) if action.kind is Kind.HOST)
    moved = [*plan[0][:at], *plan[0][at + 1 :], plan[0][at]]
    with pytest.raises(PlanError, match=r"UPDATE0@0.* comes before HOST0@0, which it needs"):
        check(plan | {0: tuple(moved)}, sizes, name)


def test_the_host_begins_a_batch_once_the_one_before_is_made():
    plan = list(lower(ScheduleOptions("2bw", host=1.0), PipelineShape(1, 2), 0, 0, 3))
    host, update = (
        plan.index(Action(kind, 0, batch, batch + 1))
        for kind, batch in ((Kind.HOST, 1), (Kind.UPDATE, 0))
    )
    plan.insert(update, plan.pop(host))
    with pytest.raises(PlanError, match=r"HOST1@0 comes before .*which it needs"):
        check({0: tuple(plan)}, PipelineShape(1, 2), "2bw")
