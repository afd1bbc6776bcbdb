from dataclasses import replace
from itertools import islice, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import text_of

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import COMPUTE, Action, Kind
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.passes import lowering as passes
from hybridpar.schedules.passes.lowering import (
    forward_actions,
    lower,
    make_plan,
    merge_backward,
    split_backward,
)
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    PipelineShape,
    find_schedule,
    make_schedule,
)
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate


def without_communication(name, p, m, stage, num_batches=3, **options):
    actions = lower(
        find_schedule(name).with_options(**options), PipelineShape(p, m), stage, 0, num_batches
    )
    kinds = COMPUTE | {Kind.REDUCE, Kind.NORM, Kind.UPDATE}
    return text_of(a for a in actions if a.kind in kinds).replace(f"@{stage}", "")


def test_one_rank_alone():
    assert text_of(lower("1f1b", PipelineShape(1, 2), 0, 0, 2)) == (
        "F0@0v0 B0@0v0 F1@0v0 B1@0v0 REDUCE0@0 NORM0@0 UPDATE0@0 "
        "F2@0v1 B2@0v1 F3@0v1 B3@0v1 REDUCE1@0 NORM1@0 UPDATE1@0"
    )


def test_double_buffered_updates():
    # UPDATE(t) right before the first forward of batch t+2; NORM(t) half way to it on stage 0,
    # later on later stages, which end batch t earlier; UPDATE1 in the drain, where F12 would have
    # been
    assert without_communication("2bw", 3, 4, 0) == (
        "F0v0 F1v0 F2v0 B0v0 F3v0 B1v0 F4v0 B2v0 F5v0 B3v0 REDUCE0 F6v0 B4v0 NORM0 F7v0 B5v0 "
        "UPDATE0 F8v1 B6v0 F9v1 "
        "B7v0 REDUCE1 F10v1 B8v1 NORM1 F11v1 B9v1 UPDATE1 B10v1 B11v1 REDUCE2 NORM2 UPDATE2"
    )
    assert without_communication("2bw", 3, 4, 2) == (
        "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE0 F4v0 B4v0 F5v0 B5v0 F6v0 NORM0 B6v0 F7v0 "
        "B7v0 REDUCE1 UPDATE0 "
        "F8v1 B8v1 F9v1 B9v1 F10v1 NORM1 B10v1 F11v1 B11v1 REDUCE2 UPDATE1 NORM2 UPDATE2"
    )


def test_an_update_that_gathers_comes_earlier():
    # slack of 4 pairs on stage 0: NORM after half of it, UPDATE after two thirds, forward-backward
    # by turns
    assert without_communication("2bw", 1, 4, 0, gather=True) == (
        "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE0 F4v0 B4v0 F5v0 B5v0 NORM0 F6v0 UPDATE0 "
        "B6v0 F7v0 B7v0 REDUCE1 "
        "F8v1 B8v1 F9v1 B9v1 NORM1 F10v1 UPDATE1 B10v1 F11v1 B11v1 REDUCE2 NORM2 UPDATE2"
    )


def test_feedback_is_settled_before_the_next_batch_is_reduced():
    # on the last stage alone that changes anything: UPDATE0 would come behind REDUCE1
    assert without_communication("2bw", 3, 4, 2, 2, feedback=True) == (
        "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE0 F4v0 B4v0 F5v0 B5v0 F6v0 NORM0 B6v0 F7v0 "
        "UPDATE0 B7v0 REDUCE1 "
        "NORM1 UPDATE1"
    )
    for p, m, split, (name, options) in product(
        (1, 2, 4),
        (1, 4, 5),
        (False, True),
        (
            ("2bw", {}),
            ("2bw", {"warmup": "bandwidth"}),
            ("2bw", {"early_switch": 0}),
            ("pipedream", {}),
        ),
    ):
        schedule = make_schedule(ScheduleOptions(name, **options))
        sizes = PipelineShape(p, m)
        if m < schedule.warmup(sizes, 0):
            continue
        for host, settles in ((0.0, Kind.UPDATE), (1.0, Kind.HOST)):
            plan = make_plan(
                find_schedule(schedule).with_options(feedback=True, split=split, host=host),
                sizes,
                0,
                4,
            )
            check(plan, sizes, schedule)
            for actions in plan.values():
                settled = [i for i, action in enumerate(actions) if action.kind is settles]
                lasts = [
                    i
                    for i, a in enumerate(actions)
                    if a.kind in (Kind.B, Kind.I) and (a.microbatch + 1) % m == 0
                ]
                assert len(settled) == len(lasts) == 4
                assert all(early < last for early, last in zip(settled, lasts[1:], strict=False))


def test_one_gradient_buffer():
    # UPDATE(t) right before the first backward of batch t+1, on every stage
    schedule = make_schedule(ScheduleOptions("2bw", gradient_buffers=1))
    assert without_communication(schedule, 3, 4, 0, 2) == (
        "F0v0 F1v0 F2v0 B0v0 F3v0 B1v0 F4v0 B2v0 F5v0 B3v0 REDUCE0 F6v0 NORM0 UPDATE0 B4v0 F7v0 "
        "B5v0 B6v0 B7v0 REDUCE1 "
        "NORM1 UPDATE1"
    )
    assert without_communication(schedule, 3, 4, 2, 2) == (
        "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE0 F4v0 NORM0 UPDATE0 B4v0 F5v0 B5v0 F6v0 "
        "B6v0 F7v0 B7v0 REDUCE1 "
        "NORM1 UPDATE1"
    )


def test_early_switch():
    # p-1+L = 3 of 5 micro-batches use the older weights, and UPDATE(t) comes right before the first
    # that does not
    schedule = make_schedule(ScheduleOptions("2bw", early_switch=1))
    assert without_communication(schedule, 3, 5, 0, 2) == (
        "F0v0 F1v0 F2v0 B0v0 F3v0 B1v0 F4v0 B2v0 F5v0 B3v0 F6v0 B4v0 REDUCE0 F7v0 NORM0 B5v0 "
        "UPDATE0 F8v1 B6v0 F9v1 "
        "B7v0 B8v1 B9v1 REDUCE1 NORM1 UPDATE1"
    )


def test_pipedream_updates_at_once():
    assert without_communication("pipedream", 3, 1, 0, clip=False) == (
        "F0v0 F1v0 F2v0 B0v0 REDUCE0 UPDATE0 B1v0 REDUCE1 UPDATE1 B2v0 REDUCE2 UPDATE2"
    )
    assert without_communication("pipedream", 2, 2, 1, 2, clip=False) == (
        "F0v0 B0v0 F1v0 B1v0 REDUCE0 UPDATE0 F2v1 B2v1 F3v1 B3v1 REDUCE1 UPDATE1"
    )


def test_receives_are_posted_before_the_preceding_compute_action():
    # 1f1b, p=2, m=3:    F0 F1 B0 F2 B1 B2 and F0 B0 F1 B1 F2 B2
    first, last = make_plan(
        replace(find_schedule("1f1b"), receive_ahead=1), PipelineShape(2, 3)
    ).values()
    end = " REDUCE0@{0} NORM0@{0} UPDATE0@{0}"
    assert text_of(first) == (
        "F0@0v0 SEND_F0@0 RECV_B0@0 F1@0v0 SEND_F1@0 B0@0v0 RECV_B1@0 F2@0v0 SEND_F2@0 RECV_B2@0 "
        "B1@0v0 B2@0v0"
    ) + end.format(0)
    assert text_of(last) == (
        "RECV_F0@1 F0@1v0 RECV_F1@1 B0@1v0 SEND_B0@1 F1@1v0 RECV_F2@1 B1@1v0 SEND_B1@1 F2@1v0 "
        "B2@1v0 SEND_B2@1"
    ) + end.format(1)


def test_receives_posted_late():
    first, _ = make_plan(
        replace(find_schedule("1f1b"), receive_ahead=0), PipelineShape(2, 2)
    ).values()
    assert text_of(first).startswith(
        "F0@0v0 SEND_F0@0 F1@0v0 SEND_F1@0 RECV_B0@0 B0@0v0 RECV_B1@0 B1@0v0 REDUCE0@0"
    )


def test_a_split_backward_sends_before_the_gradients_of_weights():
    first, last = make_plan(ScheduleOptions("1f1b", split=True), PipelineShape(2, 2)).values()
    assert text_of(last) == (
        "RECV_F0@1 F0@1v0 RECV_F1@1 I0@1v0 SEND_B0@1 W0@1v0 F1@1v0 I1@1v0 SEND_B1@1 W1@1v0 "
        "REDUCE0@1 NORM0@1 UPDATE0@1"
    )
    assert text_of(first).endswith("B0@0v0 B1@0v0 REDUCE0@0 NORM0@0 UPDATE0@0")


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(2, 8),
    st.integers(1, 16),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_split_backward_changes_nothing_else(name, p, m, clip, gather, ahead):
    """Without W, and with B for I, it is the plan as it was, so what holds of its links does; but
    on the first stage, whose backwards stay whole, receives come before one and not after it."""
    sizes = PipelineShape(p, max(m, p - 1), 3 if name == "interleaved" else 1)
    whole, split = (
        make_plan(
            replace(
                find_schedule(name).with_options(clip=clip, gather=gather, split=split),
                receive_ahead=ahead,
            ),
            sizes,
            1,
            3,
        )
        for split in (False, True)
    )
    for rank, actions in split.items():
        without = tuple(
            replace(a, kind=Kind.B) if a.kind is Kind.I else a
            for a in actions
            if a.kind is not Kind.W
        )
        if rank:
            assert without == whole[rank]
        for moves in (False, True):
            assert [a for a in without if bool(ACTION_SPECS[a.kind].peer_offset) == moves] == [
                a for a in whole[rank] if bool(ACTION_SPECS[a.kind].peer_offset) == moves
            ]
        computed = [a for a in actions if a.kind in COMPUTE]
        for one, other in pairwise(computed):
            if one.kind is Kind.I:
                assert other == replace(one, kind=Kind.W), "nothing is computed in between"
        for action in actions:
            if action.kind in (Kind.B, Kind.I):
                assert (action.kind is Kind.B) == (action.stage == 0), (
                    "what sends no gradient is whole"
                )


@given(st.lists(st.sampled_from([Kind.F, Kind.B]), min_size=1, max_size=12), st.data())
def test_actions_that_stay_together_are_merged(kinds, data):
    """Splitting undone on a stage that sends no gradient, but where something has come in between,
    or another's W."""
    actions = [Action(kind, 0, k, 0) for k, kind in enumerate(kinds)]
    sizes = PipelineShape(2, 12)
    split = list(split_backward(actions))
    assert list(merge_backward(split, sizes)) == actions
    sending = [replace(action, stage=1) for action in split]
    assert list(merge_backward(sending, sizes)) == sending
    for at in [i for i, action in enumerate(split) if action.kind is Kind.W]:
        w = split[at]
        other = data.draw(
            st.sampled_from(
                [Action(Kind.F, 0, 99, 0), replace(w, stage=1), replace(w, microbatch=98)]
            )
        )
        merged = list(merge_backward([*split[:at], other, *split[at:]], sizes))
        assert {split[at - 1], other, w} <= set(merged)
        assert len(merged) == len(actions) + 2


@pytest.mark.parametrize("latency", [0.25, 0.75, 1.5])
def test_merging_costs_no_time_where_links_are_long(latency, monkeypatch):
    """Word of a receive travels as long as a message, so one that is posted behind a whole backward
    is late."""
    sizes = PipelineShape(2, 4)
    costs = Costs(latency=latency)
    merged = simulate(make_plan(ScheduleOptions("2bw", split=True), sizes, 0, 12), costs).step_time(
        4
    )
    monkeypatch.setattr(passes, "merge_backward", lambda actions, sizes: actions)
    assert merged == simulate(
        make_plan(ScheduleOptions("2bw", split=True), sizes, 0, 12), costs
    ).step_time(4)
    assert merged == pytest.approx(
        12 * max(1, (5 + 2 * latency) / 6)
    )  # W / 2 hides a link's latency


def test_evaluation():
    sizes = PipelineShape(3, 4)
    assert text_of(forward_actions(sizes, 0, 2)) == "F0@0 SEND_F0@0 F1@0 SEND_F1@0"
    assert text_of(forward_actions(sizes, 1, 2, version=5)) == (
        "RECV_F0@1 RECV_F1@1 F0@1v5 SEND_F0@1 F1@1v5 SEND_F1@1"
    )
    assert text_of(forward_actions(sizes, 2, 2)) == "RECV_F0@2 RECV_F1@2 F0@2 F1@2"


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 16),
    st.integers(1, 32),
    st.booleans(),
    st.integers(0, 3),
)
def test_without_end(name, p, m, clip, ahead):
    """An endless plan is a finite one as far as that has not begun to drain; it is lazy; NORMs wait
    one at a time."""
    if SCHEDULES[name].needs_full_pipeline:
        m = max(m, p - 1)
    stage = p // 2
    sizes = PipelineShape(p, m)
    # pipelines deeper than the range never reach their steady state
    finite = list(
        lower(
            replace(find_schedule(name).with_options(clip=clip), receive_ahead=ahead),
            sizes,
            stage,
            2,
            3 + -(-p // m),
        )
    )
    updates = [i for i, action in enumerate(finite) if action.kind is Kind.UPDATE]
    steady = updates[0] + 1
    assert (
        list(
            islice(
                lower(
                    replace(find_schedule(name).with_options(clip=clip), receive_ahead=ahead),
                    sizes,
                    stage,
                    2,
                ),
                steady,
            )
        )
        == finite[:steady]
    )
    pending = 0
    for action in finite:
        pending += (action.kind is Kind.NORM) - (action.kind is Kind.UPDATE and clip)
        assert 0 <= pending <= 1
    assert clip == any(action.kind is Kind.NORM for action in finite)


def test_errors_come_at_once():
    with pytest.raises(ConfigError, match="num_microbatches = 2"):
        lower("2bw", PipelineShape(4, 2), 0)
    with pytest.raises(ConfigError, match="schedule"):
        lower("zigzag", PipelineShape(4, 2), 0)
