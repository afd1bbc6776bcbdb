from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Action, Kind, parse_actions
from hybridpar.schedules.draw.draw_text import draw_steps
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.proof.liveness import Live
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    PipelineShape,
    find_schedule,
    make_schedule,
)


@st.composite
def settings_of_plans(draw, max_stages=16, max_microbatches=64):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = draw(st.integers(1, max_stages))
    m = draw(st.integers(1, max_microbatches))
    return name, PipelineShape(p, max(m, p - 1) if SCHEDULES[name].needs_full_pipeline else m)


@given(
    settings_of_plans(),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([None, 0, 1, 3]),
    st.booleans(),
)
def test_every_plan_is_right(setting, first_batch, clip, ahead, split):
    name, sizes = setting
    schedule = SCHEDULES[name]
    lowered = find_schedule(name).with_options(clip=clip, split=split)
    if ahead is not None:
        lowered = replace(lowered, receive_ahead=ahead)
    plan = make_plan(lowered, sizes, first_batch, 3)
    report = check(plan, sizes, name, serial_links=ahead in (None, 0))
    assert (report.first_batch, report.num_batches) == (first_batch, 3)
    long_enough = 3 * sizes.num_microbatches > sizes.num_stages
    for rank, peak in enumerate(report.peaks):
        at_once = (
            rank == 0 and schedule.slack(sizes) == 0
        )  # a batch's update comes before the next one's backward
        assert peak.gradients == (1 if at_once else schedule.num_gradient_buffers)
        if long_enough:  # the bound is reached, not just kept
            assert peak.activations == schedule.max_live_activations(sizes, rank)
        assert peak.versions <= schedule.max_live_versions(sizes, rank)


def test_report():
    report = check(make_plan("2bw", PipelineShape(2, 4), 3, 2), PipelineShape(2, 4), "2bw")
    assert report.peaks == (Live(2, 2, 2), Live(1, 2, 2))
    assert str(report) == (
        "2bw, 2 stages, 4 micro-batches, batches 3 to 4: 76 actions are right; at most 2 "
        "activations, "
        "2 weight versions, 2 gradients"
    )


# One random fault in a right plan. Each returns the faulty list, or None where the fault cannot be
# made.


def drop(actions, i, data):
    return [*actions[:i], *actions[i + 1 :]]


def duplicate(actions, i, data):
    j = data.draw(st.integers(0, len(actions)))
    return [*actions[:j], actions[i], *actions[j:]]


def change_version(actions, i, data):
    version = actions[i].version + data.draw(st.sampled_from([-2, -1, 1, 2]))
    return [*actions[:i], replace(actions[i], version=version), *actions[i + 1 :]]


def change_stage(actions, i, data):
    stage = actions[i].stage + data.draw(st.sampled_from([-1, 1]))
    return [*actions[:i], replace(actions[i], stage=stage), *actions[i + 1 :]]


def change_microbatch(actions, i, data):
    microbatch = actions[i].microbatch + data.draw(st.sampled_from([-1, 1]))
    return [*actions[:i], replace(actions[i], microbatch=microbatch), *actions[i + 1 :]]


NEEDS = {  # what must come before, of the same micro-batch or batch
    Kind.F: Kind.RECV_F,
    Kind.SEND_F: Kind.F,
    Kind.B: Kind.F,
    Kind.SEND_B: Kind.B,
    Kind.NORM: Kind.REDUCE,
    Kind.UPDATE: Kind.NORM,
    Kind.I: Kind.F,
    Kind.W: Kind.I,
}


def swap_dependent(actions, i, data):
    wanted = NEEDS.get(actions[i].kind), actions[i].microbatch
    for j in range(i):
        if (actions[j].kind, actions[j].microbatch) == wanted:
            swapped = list(actions)
            swapped[i], swapped[j] = actions[j], actions[i]
            return swapped
    return None


def swap_on_link(actions, i, data):
    """Two transfers of one link, out of order."""
    kinds = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE, Kind.NORM)
    for j in range(i + 1, len(actions)):
        if actions[i].kind in kinds and actions[j].kind is actions[i].kind:
            swapped = list(actions)
            swapped[i], swapped[j] = actions[j], actions[i]
            return swapped
    return None


FAULTS = [
    drop,
    duplicate,
    change_version,
    change_stage,
    change_microbatch,
    swap_dependent,
    swap_on_link,
]


@st.composite
def schedules_and_sizes(draw):
    name, sizes = draw(settings_of_plans(6, 8))
    if name != "2bw":
        return SCHEDULES[name], sizes
    p = sizes.num_stages
    m = sizes.num_microbatches
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "early_switch": st.integers(0, m - p + 1),
                "gradient_buffers": st.just(1),
                "sync_steps": st.integers(1, 2),
            },
        )
    )
    return make_schedule(ScheduleOptions(name, **options)), sizes


@pytest.mark.parametrize("fault", FAULTS)
@given(
    setting=schedules_and_sizes(), skipped=st.integers(0, 2), split=st.booleans(), data=st.data()
)
def test_any_fault_is_found(fault, setting, skipped, split, data):
    schedule, sizes = setting
    first_batch = schedule.options.sync_steps + skipped
    plan = make_plan(find_schedule(schedule).with_options(split=split), sizes, first_batch, 3)
    rank = data.draw(st.integers(0, sizes.num_stages - 1))
    i = data.draw(st.integers(0, len(plan[rank]) - 1))
    faulty = fault(plan[rank], i, data)
    assume(faulty is not None)
    with pytest.raises(PlanError) as error:
        check(plan | {rank: faulty}, sizes, schedule, range(first_batch, first_batch + 3))
    assert error.value.cells
    assert ">" in str(error.value)


def edited(name, sizes, rank, old, new, num_batches=3):
    """A plan in which rank `rank` does `new` where it did `old`."""
    plan = make_plan(name, sizes, 0, num_batches)
    old = parse_actions(old)
    new = parse_actions(new)
    for i in range(len(plan[rank])):
        if plan[rank][i : i + len(old)] == old:
            return plan | {rank: (*plan[rank][:i], *new, *plan[rank][i + len(old) :])}
    raise AssertionError(f"{old} not found")


def fault_of(plan, sizes, name):
    with pytest.raises(PlanError) as error:
        check(plan, sizes, name)
    return error.value.reason


def test_an_update_too_late_for_its_forward():
    plan = edited("2bw", PipelineShape(1, 2), 0, "UPDATE0@0 F4@0v1", "F4@0v1 UPDATE0@0")
    assert (
        fault_of(plan, PipelineShape(1, 2), "2bw")
        == "F4@0v1 comes before UPDATE0@0, which it needs"
    )


def test_gradients_of_weights_too_late_for_their_reduction():
    sizes = PipelineShape(1, 1)
    late = parse_actions("F0@0v0 I0@0v0 REDUCE0@0 W0@0v0 NORM0@0 UPDATE0@0")
    assert fault_of({0: late}, sizes, "1f1b") == "REDUCE0@0 comes before W0@0v0, which it needs"
    early = parse_actions("F0@0v0 W0@0v0 I0@0v0 REDUCE0@0 NORM0@0 UPDATE0@0")
    assert fault_of({0: early}, sizes, "1f1b") == "W0@0v0 comes before I0@0v0, which it needs"
    both = parse_actions("F0@0v0 I0@0v0 W0@0v0 B0@0v0 REDUCE0@0 NORM0@0 UPDATE0@0")
    assert fault_of({0: both}, sizes, "1f1b") == "B0@0v0 does not belong in this plan"


def test_too_many_versions():
    """On stage 0, W(1) is made while a micro-batch on W(0) is in flight."""
    one = replace(SCHEDULES["2bw"], max_live_versions=lambda sizes, stage: 1)
    reason = fault_of(make_plan("2bw", PipelineShape(2, 2), 0, 3), PipelineShape(2, 2), one)
    assert reason == (
        "rank 0 holds Live(activations=1, versions=2, gradients=1) after UPDATE0@0, but schedule "
        "2bw allows "
        "Live(activations=2, versions=1, gradients=2)"
    )


def test_an_update_may_come_early():
    sizes, (norm, update) = PipelineShape(2, 4), parse_actions("NORM0@0 UPDATE0@0")
    plan = make_plan("2bw", sizes, 0, 3)
    early = [action for action in plan[0] if action != update]
    early.insert(early.index(norm) + 1, update)
    assert tuple(early) != plan[0]
    assert check(plan | {0: early}, sizes, "2bw").peaks[0] == Live(2, 2, 2)


def test_too_many_activations():
    plan = edited("1f1b", PipelineShape(1, 2), 0, "B0@0v0 F1@0v0", "F1@0v0 B0@0v0", 1)
    assert "rank 0 holds Live(activations=2" in fault_of(plan, PipelineShape(1, 2), "1f1b")
    assert check(plan, PipelineShape(1, 2), "gpipe").peaks == (Live(2, 1, 1),)


def test_too_many_gradients():
    """Backwards of batch 1 before batch 0 is updated, where there is one gradient buffer."""
    plan = {
        0: parse_actions(
            "F0@0v0 B0@0v0 REDUCE0@0 NORM0@0 F1@0v0 B1@0v0 REDUCE1@0 UPDATE0@0 NORM1@0 UPDATE1@0"
        )
    }
    assert check(plan, PipelineShape(1, 1), "2bw").peaks == (Live(1, 2, 2),)
    one = replace(SCHEDULES["2bw"], num_gradient_buffers=1)
    assert "gradients=2) after B1@0v0" in fault_of(plan, PipelineShape(1, 1), one)


def test_deadlock():
    """Every list is right by itself: rank 1 wants both forwards first, rank 0 a gradient before the
    second."""
    sizes = PipelineShape(2, 2)
    plan = make_plan("naive", sizes) | {1: make_plan("gpipe", sizes)[1]}
    reason = fault_of(plan, sizes, "gpipe")
    assert "deadlock: rank 0" in reason
    assert "B0@0v0 waits for transfer 0 from rank 1 (0 sent, 1 receives posted)" in reason
    assert "F1@1v0 waits for transfer 1 from rank 0" in reason


def test_deadlock_of_a_shared_queue():
    """Stage 1 posts RECV_F1 before SEND_F0, and one queue serves both; naive has no F1 before F0 is
    through."""
    sizes = PipelineShape(3, 2)
    plan = make_plan(replace(find_schedule("naive"), receive_ahead=2), sizes)
    assert check(plan, sizes, "naive", serial_links=False)
    assert "deadlock: rank 0" in fault_of(plan, sizes, "naive")


def test_deadlock_at_a_collective():
    """Rank 1 waits for the norm before forward 1, rank 0 issues it after backward 1, for which it
    needs rank 1."""
    sizes = PipelineShape(2, 1)
    schedule = replace(SCHEDULES["pipedream"], num_gradient_buffers=2)
    before = "REDUCE0@0 NORM0@0 UPDATE0@0 B1@0v0"
    after = "REDUCE0@0 B1@0v0 NORM0@0 UPDATE0@0"
    plan = edited(schedule, sizes, 0, before, after, 2)
    reason = fault_of(plan, sizes, schedule)
    assert "rank 0 at step 8: B1@0v0 waits for transfer 1 from rank 1" in reason
    assert "UPDATE0@1 waits for NORM0, which ranks [0] have not reached" in reason


def test_wrong_ranks_and_sizes():
    plan = make_plan("1f1b", PipelineShape(2, 2))
    assert "has ranks [0, 1], but parallel.pp = 3" in fault_of(plan, PipelineShape(3, 2), "1f1b")
    with pytest.raises(ConfigError):
        check(plan, PipelineShape(3, 1), "2bw")
    with pytest.raises(PlanError, match="F4@0v2 is missing"):
        check(make_plan("1f1b", PipelineShape(2, 2), 0, 2), PipelineShape(2, 2), "1f1b", range(3))


def test_message_draws_the_place():
    plan = edited("1f1b", PipelineShape(3, 2), 1, "F1@1v0 SEND_F1@1", "F1@1v0", 1)
    with pytest.raises(PlanError) as error:
        check(plan, PipelineShape(3, 2), "1f1b")
    assert (
        str(error.value)
        == """\
SEND_F1@1 is missing

rank 0, step 0:  F0@0v0     SEND_F0@0  RECV_B0@0  F1@0v0     SEND_F1@0  RECV_B1@0  B0@0v0     B1@0v0     REDUCE0@0
rank 1, step 0:  RECV_F0@1 >RECV_F1@1< F0@1v0     SEND_F0@1  RECV_B0@1  F1@1v0     RECV_B1@1  B0@1v0     SEND_B0@1
rank 2, step 0:  RECV_F0@2  F0@2v0     RECV_F1@2  B0@2v0     SEND_B0@2  F1@2v0     B1@2v0     SEND_B1@2  REDUCE0@2"""
    )


def test_drawing_is_windowed():
    plan = make_plan("2bw", PipelineShape(64, 64), 0, 2)
    lines = draw_steps(plan, [(30, 100), (33, 20)]).splitlines()
    assert len(lines) == 8
    assert max(map(len, lines)) < 150
    assert sum(">" in line for line in lines) == 2
    assert draw_steps({}) == "(an empty plan)"


def test_actions_of_no_schedule():
    plan = make_plan("1f1b", PipelineShape(1, 1))
    extra = (*plan[0], Action(Kind.W, 0, 0, 0))
    assert (
        fault_of({0: extra}, PipelineShape(1, 1), "1f1b") == "W0@0v0 does not belong in this plan"
    )
