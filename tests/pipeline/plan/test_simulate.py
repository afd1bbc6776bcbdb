import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.pipeline.plan.action import Kind, parse_actions
from hybridpar.pipeline.plan.liveness import Live
from hybridpar.pipeline.plan.passes import forward_actions, make_plan
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.pipeline.plan.simulate import Costs, StuckError, simulate


def relative_step(name, p, m, num_batches=12, **costs):
    """Steady-state step time, over the m (f + b) of a pipeline that is never idle; f = 1, b = 2."""
    plan = make_plan(name, Sizes(p, m), 0, num_batches, clip=name != "pipedream")
    return simulate(plan, Costs(**costs)).step_time(m) / (3 * m)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 16), st.integers(1, 64), st.integers(1, 5), st.integers(1, 5)
)
def test_bubble_of_flushing_schedules(name, p, m, forward, backward):
    """(m + p - 1) (f + b) a batch, so idle for (p - 1) / (m + p - 1) of it (GPipe, arXiv 1811.06965)."""
    timeline = simulate(make_plan(name, Sizes(p, m)), Costs(forward, backward))
    assert timeline.makespan == (m + p - 1) * (forward + backward)
    for rank in range(p):
        assert timeline.idle_share(rank) == pytest.approx((p - 1) / (m + p - 1))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(0, 20), st.integers(1, 5), st.integers(0, 5))
def test_2bw_is_never_idle(p, extra, forward, more):
    m, backward = p + extra, 2 * forward + more
    timeline = simulate(make_plan("2bw", Sizes(p, m), 0, 6), Costs(forward, backward))
    assert timeline.step_time(m) == m * (forward + backward)
    assert timeline.makespan == (6 * m + p - 1) * (forward + backward)  # one fill and one drain


def test_naive_has_one_micro_batch_in_flight():
    timeline = simulate(make_plan("naive", Sizes(4, 3)), Costs(1, 2))
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
    assert relative_step(name, 8, m, 12 if m > 1 else 60, **costs) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_2bw_hides_everything_on_a_cpu_too(tied):
    """Even where NORM must wait for its REDUCE, and that one for the other end of the pipeline."""
    assert relative_step("2bw", 8, 16, reduce=6, norm=1, blocking_norm=True, tied=tied) == 1


def test_posting_early_hides_the_transfer():
    early, late = (
        simulate(make_plan("gpipe", Sizes(4, 8), ahead=ahead), Costs(transfer=0.5)).makespan for ahead in (1, 0)
    )
    assert early == 11 * 3 + 2 * 3 * 0.5  # once down and once up the pipeline
    assert late > early + 2


def test_update_takes_the_ranks_time():
    timeline = simulate(make_plan("1f1b", Sizes(2, 2), 0, 4), Costs(1, 2, update=[5, 4]))
    assert timeline.step_time(2) == 3 * 3 + 5
    update = next(i for i, action in enumerate(timeline.plan[1]) if action.kind is Kind.UPDATE)
    assert (timeline.starts[1][update], timeline.ends[1][update]) == (9, 13)


def test_times_of_transfers_and_collectives():
    #   0   1   2   3   4   5   6   7   8   9
    #   F0--    send 0.5, latency 0.25              B0------REDUCE (2)  NORM (1)
    plan = make_plan("1f1b", Sizes(2, 1))
    timeline = simulate(plan, Costs(1, 2, transfer=0.5, latency=0.25, reduce=[2, 3], norm=1, tied=True))
    times = {
        str(action): (timeline.starts[rank][i], timeline.ends[rank][i])
        for rank, actions in plan.items() for i, action in enumerate(actions)
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


def test_live_counts():
    timeline = simulate(make_plan("2bw", Sizes(4, 4), 0, 4))
    assert [timeline.peak_live(rank, 4) for rank in range(4)] == [
        Live(4, 2, 2), Live(3, 2, 2), Live(2, 2, 2), Live(1, 1, 2),  # the last stage is done with W(t-1) at UPDATE
    ]


def test_evaluation_runs():
    sizes = Sizes(3, 1)
    plan = {stage: tuple(forward_actions(sizes, stage, 5)) for stage in range(3)}
    assert simulate(plan).makespan == 5 + 2


def test_stuck():
    plan = {0: parse_actions("F0@0 SEND_F0@0"), 1: parse_actions("RECV_F0@1 F0@1 RECV_F1@1 F1@1")}
    with pytest.raises(StuckError, match="rank 1, step 3: F1@1 waits for transfer 1 from rank 0") as error:
        simulate(plan)
    assert list(error.value.waiting) == [1]


def test_empty():
    assert simulate({}).makespan == 0
    assert simulate({0: ()}).idle_share(0) == 0


def test_costs_for_each_stage():
    plan = make_plan("1f1b", Sizes(2, 4))
    assert simulate(plan, Costs([1, 2], [2, 4])).makespan == 1 + 4 * 6 + 2
    with pytest.raises(AssertionError, match="3 costs for 2 stages"):
        simulate(plan, Costs([1, 2, 3]))
