from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import text_of

from hybridpar.schedules.action import COMPUTE, Action, Kind, parse_actions
from hybridpar.schedules.passes.lowering import forward_actions, make_plan
from hybridpar.schedules.proof.liveness import Live, peak_live
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, find_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import Simulation, StuckError, simulate


def relative_step(name, p, m, num_batches=12, gather=False, **costs):
    """Steady-state step time, over the m (f + b) of a pipeline that is never idle; f = 1, b = 2."""
    plan = make_plan(
        find_schedule(name).with_options(clip=name != "pipedream", gather=gather),
        PipelineShape(p, m),
        0,
        num_batches,
    )
    return simulate(plan, Costs(**costs)).step_time(m) / (3 * m)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_bubble_of_flushing_schedules(name, p, m, forward, backward):
    """(m + p - 1) (f + b) a batch, so idle for (p - 1) / (m + p - 1) of it (GPipe, arXiv
    1811.06965)."""
    timeline = simulate(make_plan(name, PipelineShape(p, m)), Costs(forward, backward))
    assert timeline.makespan == (m + p - 1) * (forward + backward)
    for rank in range(p):
        assert timeline.idle_share(rank) == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 5), st.integers(0, 5))
def test_2bw_is_never_idle(p, extra, forward, more):
    m = p + extra
    backward = 2 * forward + more
    timeline = simulate(make_plan("2bw", PipelineShape(p, m), 0, 6), Costs(forward, backward))
    assert timeline.step_time(m) == m * (forward + backward)
    assert timeline.makespan == (6 * m + p - 1) * (forward + backward)  # one fill and one drain


def test_naive_has_one_micro_batch_in_flight():
    timeline = simulate(make_plan("naive", PipelineShape(4, 3)), Costs(1, 2))
    assert timeline.makespan == 3 * 4 * 3
    assert timeline.idle_share(2) == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("name", "m", "costs", "expected"),
    [  # 8 stages; figures from an independent simulation, for 2bw with a norm over all stages
        ("2bw", 8, {"reduce": 3}, 1.000),
        ("2bw", 8, {"reduce": 6}, 1.125),
        ("2bw", 9, {"reduce": 6}, 1.000),
        ("2bw", 16, {"reduce": 6}, 1.000),
        ("1f1b", 8, {"reduce": 3}, 2.000),
        ("1f1b", 32, {"reduce": 3}, 1.250),
        ("2bw", 32, {"latency": 0.3}, 1.175),
        ("1f1b", 32, {"latency": 0.3}, 1.43),
        ("gpipe", 32, {"latency": 0.3}, 1.26),
        ("pipedream", 8, {}, 1.000),
        ("pipedream", 1, {}, 1.000),
        ("naive", 8, {}, 8.000),
    ],
)
def test_known_step_times(name, m, costs, expected):
    assert relative_step(name, 8, m, 12 if m > 1 else 60, **costs) == pytest.approx(
        expected, abs=5e-3
    )


@pytest.mark.parametrize("tied", [False, True])
def test_2bw_hides_everything_on_a_cpu_too(tied):
    """Even where NORM must wait for its REDUCE, and that one for the other end of the pipeline."""
    assert relative_step("2bw", 8, 16, reduce=6, norm=1, blocking_norm=True, tied=tied) == 1


def test_posting_early_hides_the_transfer():
    early, late = (
        simulate(
            make_plan(replace(find_schedule("gpipe"), receive_ahead=ahead), PipelineShape(4, 8)),
            Costs(transfer=0.5),
        ).makespan
        for ahead in (1, 0)
    )
    assert early == 11 * 3 + 2 * 3 * 0.5  # once down and once up the pipeline
    assert late > early + 2


def test_gradients_may_take_longer_on_their_way_than_activations():
    """One micro-batch through two stages: forward, over, forward and backward, back, backward."""
    plan = make_plan("1f1b", PipelineShape(2, 1))
    took = [
        simulate(plan, Costs(1, 2, transfer=0.5, transfer_back=back)).makespan
        for back in (None, [3.0], 0)
    ]
    assert took == [6 + 0.5 + 0.5, 6 + 0.5 + 3, 6 + 0.5]


def test_update_takes_the_ranks_time():
    timeline = simulate(make_plan("1f1b", PipelineShape(2, 2), 0, 4), Costs(1, 2, update=[5, 4]))
    assert timeline.step_time(2) == 3 * 3 + 5
    update = next(i for i, action in enumerate(timeline.plan[1]) if action.kind is Kind.UPDATE)
    assert (timeline.starts[1][update], timeline.ends[1][update]) == (9, 13)


def test_times_of_transfers_and_collectives():
    #   0   1   2   3   4   5   6   7   8   9
    #   F0--    send 0.5, latency 0.25              B0------REDUCE (2)  NORM (1)
    plan = make_plan("1f1b", PipelineShape(2, 1))
    timeline = simulate(
        plan, Costs(1, 2, transfer=0.5, latency=0.25, reduce=[2, 3], norm=1, tied=True)
    )
    times = {
        str(action): (timeline.starts[rank][i], timeline.ends[rank][i])
        for rank, actions in plan.items()
        for i, action in enumerate(actions)
    }
    assert times["SEND_F0@0"] == (1, 1.75)
    assert times["RECV_F0@1"] == (0, 1.75)
    assert times["F0@1v0"] == (1.75, 2.75)
    assert times["SEND_B0@1"] == (4.75, 5.5)
    assert times["B0@0v0"] == (5.5, 7.5)
    assert times["REDUCE0@1"][0] == 4.75
    assert times["REDUCE0@0"][1] == times["REDUCE0@1"][1]  # the end stages meet
    assert times["NORM0@1"] == (4.75, times["REDUCE0@0"][1] + 1)
    assert times["UPDATE0@1"][0] == times["NORM0@1"][1] == timeline.makespan


def times_of(timeline):
    """Times of each action: start, return, end."""
    return {
        str(action): times for rank in timeline.plan for action, *times in timeline.actions(rank)
    }


def test_calls_take_the_ranks_time():
    #   0   1   2   3   4   5
    #   F0--sendF1--send            the call of a send takes 0.5, the transfer starts when it is over
    #   ppppppF0--ppppF1--          posting a receive takes 0.75, and that of F1 comes before F0 starts
    plan = {
        0: parse_actions("F0@0 SEND_F0@0 F1@0 SEND_F1@0"),
        1: parse_actions("RECV_F0@1 RECV_F1@1 F0@1 F1@1"),
    }
    times = times_of(
        simulate(plan, Costs(calls={Kind.SEND_F: 0.5, Kind.RECV_F: [0, 0.75]}, transfer=0.25))
    )
    assert times["SEND_F0@0"] == [1, 1.5, 1.75]
    assert times["F1@0"] == [1.5, 2.5, 2.5]
    assert times["RECV_F1@1"] == [0.75, 1.5, 3.25]
    assert times["F0@1"] == [1.75, 2.75, 2.75]
    assert times["F1@1"] == [3.25, 4.25, 4.25]


def test_calls_count_as_busy_and_what_goes_on_beside_them_does_not():
    plan = {0: parse_actions("F0@0 SEND_F0@0"), 1: parse_actions("RECV_F0@1 F0@1")}
    timeline = simulate(plan, Costs(calls={Kind.SEND_F: 0.5}, transfer=1))
    assert timeline.busy(0) == 1.5
    assert timeline.idle_share(0) == pytest.approx(1 - 1.5 / 3.5)
    assert timeline.idle_share(0, 0.5, 2.5) == pytest.approx(0.5)
    assert timeline.idle_share(1, 2.5, 3.5) == 0


def test_the_first_forward_on_new_weights_waits_for_their_gather():
    times = times_of(
        simulate(make_plan("1f1b", PipelineShape(1, 2), 0, 2), Costs(1, 2, update=0.5, gather=3))
    )
    assert times["UPDATE0@0"] == [6, 6.5, 9.5]
    assert times["F2@0v1"] == [9.5, 10.5, 10.5]
    # 2bw: stage 0 needs W(1) only when batch 2 begins, and the older weights not at all
    slow, fast = (
        simulate(make_plan("2bw", PipelineShape(2, 8), 0, 6), Costs(1, 2, gather=g)) for g in (3, 0)
    )
    assert slow.step_time(8) == fast.step_time(8) + 3
    first = make_plan("2bw", PipelineShape(2, 8), 0, 1)
    assert (
        simulate(first, Costs(1, 2, gather=3)).returns[0] == simulate(first, Costs(1, 2)).returns[0]
    )


def test_links_have_costs_of_their_own():
    timeline = simulate(
        make_plan("1f1b", PipelineShape(3, 1)), Costs(1, 2, transfer=[0.5, 1], latency=[0, 0.25])
    )
    assert timeline.makespan == 3 * 3 + 2 * (0.5 + 1.25)


def test_varying_times_take_turns_and_repeat():
    plan = {0: parse_actions("F0@0 F1@0 F2@0 B2@0 REDUCE0@0 UPDATE0@0v1")}
    varying = {Kind.F: [[0.5, 1.5]]}
    times = times_of(simulate(plan, Costs(2, 1, update=0.25, variation=varying)))
    assert [times[f"F{i}@0"][:2] for i in range(3)] == [[0, 1], [1, 4], [4, 5]]
    assert times["UPDATE0@0"] == [6, 6.25, 6.25]
    shared = times_of(simulate(plan, Costs(2, 1, update=0.25, variation=varying, cores=1)))
    assert shared == times


def test_ranks_share_cores():
    #   one core   0   1   2   3   4   5   6
    #   rank 0     F0--F1----__                from 1 on both work, at half speed
    #   rank 1         F0----F1--
    plan = {
        0: parse_actions("F0@0 SEND_F0@0 F1@0 SEND_F1@0"),
        1: parse_actions("RECV_F0@1 F0@1 RECV_F1@1 F1@1"),
    }
    times = times_of(simulate(plan, Costs([1, 1], cores=1)))
    assert times["F1@0"] == times["F0@1"] == [1, 3, 3]
    assert times["F1@1"] == [3, 4, 4]
    # 1.5 cores: two run at 3/4 of the speed each
    assert simulate(plan, Costs(cores=1.5)).makespan == pytest.approx(1 + 4 / 3 + 1)


def test_transfers_share_cores_too():
    #   one core   0   1   2   3
    #   rank 0     F0--F1------__              1 to 2: F1 and the transfer's work of 0.5 share; then F1 and F0
    plan = {0: parse_actions("F0@0 SEND_F0@0 F1@0"), 1: parse_actions("RECV_F0@1 F0@1")}
    times = times_of(simulate(plan, Costs(1, transfer_work=0.5, latency=0.25, cores=1)))
    assert times["SEND_F0@0"] == [1, 1, 2.25]
    assert times["F1@0"] == [1, pytest.approx(2.75), pytest.approx(2.75)]  # alone from 2 to 2.25
    assert times["F0@1"] == [2.25, pytest.approx(3.5), pytest.approx(3.5)]
    alone = times_of(simulate(plan, Costs(1, transfer_work=0.5, latency=0.25)))
    assert alone["F0@1"] == [1.75, 2.75, 2.75]


SHARED = st.builds(
    Costs,
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(1, 5),
    update=st.integers(0, 3),
    calls=st.fixed_dictionaries(
        {kind: st.sampled_from([0, 0.25]) for kind in (Kind.SEND_F, Kind.RECV_B, Kind.NORM)}
    ),
    reduce=st.integers(0, 3),
    norm=st.integers(0, 2),
    gather=st.sampled_from([0, 0.5]),
    transfer=st.sampled_from([0, 0.5]),
    latency=st.sampled_from([0, 0.5]),
    tied=st.booleans(),
    blocking_norm=st.booleans(),
    cores=st.sampled_from([None, 1, 2, 3.5, 4, 100]),
    transfer_work=st.sampled_from([0, 0.5]),
)
PLANS = st.builds(
    make_plan,
    st.sampled_from(["naive", "gpipe", "1f1b", "2bw", "pipedream"]),
    st.builds(PipelineShape, st.just(4), st.integers(4, 6)),
    st.just(0),
    st.just(3),
)


def run_machine(plan, costs, reverse):
    machine = Simulation(plan, costs, {})
    if reverse:
        machine.runnable.reverse()
    machine.run()
    return [[rank.starts, rank.returns, rank.ends] for rank in machine.ranks]


@given(PLANS, SHARED)
def test_no_result_depends_on_the_order_in_which_ranks_are_taken(plan, costs):
    for mine, other in zip(
        run_machine(plan, costs, False), run_machine(plan, costs, True), strict=True
    ):
        for times, others in zip(mine, other, strict=True):
            assert times == pytest.approx(others, abs=1e-9)


@given(PLANS, SHARED)
def test_cores_bound_the_speed_and_enough_of_them_change_nothing(plan, costs):
    timeline, free = simulate(plan, costs), simulate(plan, replace(costs, cores=None))
    sends = sum(
        action.kind in (Kind.SEND_F, Kind.SEND_B) for actions in plan.values() for action in actions
    )
    work = sum(map(free.busy, plan)) + costs.transfer_work * sends
    if costs.cores:
        assert timeline.makespan >= work / costs.cores - 1e-9
    assert timeline.makespan >= free.makespan - 1e-9
    if costs.cores == 100:
        assert all(timeline.ends[r] == pytest.approx(free.ends[r]) for r in plan)


def test_one_core_is_never_idle_where_a_rank_can_always_go_on():
    for name, m in (("1f1b", 4), ("gpipe", 4), ("2bw", 4), ("naive", 4)):
        timeline = simulate(
            make_plan(name, PipelineShape(4, m), 0, 3), Costs(1, 2, update=0.5, cores=1)
        )
        assert timeline.makespan == pytest.approx(4 * 3 * (m * 3 + 0.5)), name


def test_parts_of_a_backward_take_its_time_and_send_early():
    plan = make_plan(ScheduleOptions("1f1b", split=True), PipelineShape(2, 1))
    half = times_of(simulate(plan, Costs(1, 2)))
    assert (half["I0@1v0"], half["W0@1v0"], half["B0@0v0"]) == ([2, 3, 3], [3, 4, 4], [3, 5, 5])
    measured = times_of(simulate(plan, Costs(1, [2, 3], backward_input=[0.5, 1])))
    assert (measured["I0@1v0"], measured["W0@1v0"], measured["B0@0v0"]) == (
        [2, 3, 3],
        [3, 5, 5],
        [3, 5, 5],
    )
    varying = Costs(1, 2, variation={Kind.B: [[0.5, 1.5], [1, 1]]})
    assert (
        times_of(
            simulate(make_plan(ScheduleOptions("1f1b", split=True), PipelineShape(2, 2)), varying)
        )["B1@0v0"][0]
        + 3
        == simulate(
            make_plan(ScheduleOptions("1f1b", split=True), PipelineShape(2, 2)), varying
        ).makespan
    )


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "2bw", "pipedream"]),
    st.integers(1, 6),
    st.integers(6, 9),
)
def test_split_backwards_are_never_slower(name, p, m):
    split, whole = (
        simulate(
            make_plan(find_schedule(name).with_options(split=s), PipelineShape(p, m), 0, 4),
            Costs(1, 2),
        ).makespan
        for s in (True, False)
    )
    assert split <= whole


def test_live_counts():
    plan = make_plan("2bw", PipelineShape(4, 4), 0, 4)
    assert [peak_live(plan[rank], 4) for rank in range(4)] == [
        Live(4, 2, 2),
        Live(3, 2, 2),
        Live(2, 2, 2),
        Live(1, 1, 2),  # the last stage is done with W(t-1) at UPDATE
    ]


def test_the_last_stage_needs_two_versions_after_a_drain():
    shape = PipelineShape(2, 4)
    before = make_plan("2bw", shape, 0, 3)[1]
    after = make_plan("2bw", shape, 3, 1)[1]
    texts = [str(a) for a in before if a.kind in (*COMPUTE, Kind.UPDATE)]
    assert texts.index("B7@1v0") + 1 == texts.index("UPDATE0@1"), "W(0) is done with"
    assert texts.index("UPDATE0@1") + 1 == texts.index("F8@1v1")
    assert texts[-1] == "UPDATE2@1", "an evaluation or a checkpoint needs W(3)"
    assert next(str(a) for a in after if a.kind is Kind.F) == "F12@1v2"
    assert peak_live(before, 4).versions == 1
    assert peak_live([*before, *after], 4).versions == 2


def test_evaluation_runs():
    sizes = PipelineShape(3, 1)
    plan = {stage: tuple(forward_actions(sizes, stage, 5)) for stage in range(3)}
    assert simulate(plan).makespan == 5 + 2


def test_stuck():
    plan = {0: parse_actions("F0@0 SEND_F0@0"), 1: parse_actions("RECV_F0@1 F0@1 RECV_F1@1 F1@1")}
    with pytest.raises(
        StuckError, match="rank 1, step 3: F1@1 waits for transfer 1 from rank 0"
    ) as error:
        simulate(plan)
    assert list(error.value.waiting) == [1]


def test_empty():
    assert simulate({}).makespan == 0
    assert simulate({0: ()}).idle_share(0) == 0


def test_costs_for_each_stage():
    plan = make_plan("1f1b", PipelineShape(2, 4))
    assert simulate(plan, Costs([1, 2], [2, 4])).makespan == 1 + 4 * 6 + 2
    with pytest.raises(AssertionError, match="3 costs for 2 stages"):
        simulate(plan, Costs([1, 2, 3]))


# -- the optimizer on the host


def test_a_host_and_two_copy_engines_by_hand():
    """1f1b, two parts, one micro-batch: gradients leave at 3 in 2 and 1; the host takes 4 and 2,
    the way back 2 and 1.

    to host    3-5 5-6        host    5---9 9-11        from host    9-11 11-12
    """
    plan = make_plan(ScheduleOptions("1f1b", host=1.0), PipelineShape(1, 1), 0, 2, parts=2)
    assert text_of(plan[0]).startswith(
        "F0@0v0 F0@0.1v0 B0@0.1v0 B0@0v0 REDUCE0@0 NORM0@0 HOST0@0 UPDATE0@0 F1@0v1 UPDATE0@0.1 "
        "F1@0.1v1"
    )
    costs = Costs(to_host=3.0, host=6.0, from_host=3.0, host_shares=((2.0, 1.0),))
    timeline = simulate(plan, costs)
    starts = dict(zip(map(str, plan[0]), timeline.starts[0], strict=True))
    assert (
        starts["NORM0@0"],
        starts["HOST0@0"],
        starts["F1@0v1"],
        starts["UPDATE0@0.1"],
        starts["F1@0.1v1"],
    ) == (3.0, 3.0, 11.0, 12.0, 12.0)
    host = plan[0].index(Action(Kind.HOST, 0, 0, 1))
    assert (timeline.returns[0][host], timeline.ends[0][host]) == (3.0, 12.0)
    assert timeline.busy(0, 3.0, 11.0) == 0
    slow_norm = simulate(plan, replace(costs, norm=1.5))
    slow_sum = simulate(plan, replace(costs, reduce=1.5))
    assert slow_norm.makespan == timeline.makespan, "gradients leave while the norm is on its way"
    assert slow_sum.makespan == timeline.makespan + 2 * 1.5, "but not before they are summed"


@pytest.mark.parametrize("p", [1, 2, 4])
def test_2bw_hides_a_host_that_takes_less_than_its_slack_and_1f1b_does_not(p):
    """The slack is m - p + 1 pairs of 3, of which NORM and HOST take one action; the copies take
    their first group."""
    m = 8
    parts = 4
    pairs = m - p + 1
    for name in ("2bw", "1f1b"):
        plain = simulate(make_plan(name, PipelineShape(p, m), 0, 12)).step_time(m)
        for share in (0.5, 0.8, 1.5):
            host = share * 3 * pairs
            plan = make_plan(
                find_schedule(name).with_options(host=1.0), PipelineShape(p, m), 0, 12, parts=parts
            )
            exposed = (
                simulate(plan, Costs(to_host=host / 8, host=host, from_host=host / 8)).step_time(m)
                - plain
            )
            if name == "2bw":
                assert (
                    exposed == pytest.approx(0, abs=1e-9)
                    if share < 1
                    else 0.2 * host < exposed < 0.5 * host
                )
            else:
                assert 0.7 * host < exposed < 1.25 * host
