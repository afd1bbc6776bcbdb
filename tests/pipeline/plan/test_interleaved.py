"""Interleaved 1F1B: its order, its bubble, and that no transport can make it wait in a circle."""

from __future__ import annotations

from collections import deque
from inspect import cleandoc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.pipeline.plan import interleaved
from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.plan.check import PlanError, check
from hybridpar.pipeline.plan.draw import draw
from hybridpar.pipeline.plan.passes import forward_actions, make_plan
from hybridpar.pipeline.plan.perfetto import trace_entries
from hybridpar.pipeline.plan.schedules import SCHEDULES, Sizes, make_schedule
from hybridpar.pipeline.plan.simulate import Costs, simulate
from hybridpar.pipeline.plan.svg import draw_svg
from hybridpar.pipeline.run.executor import max_unfinished_sends

NAME = "interleaved"
SIZES = [Sizes(p, m, v) for p in range(2, 9) for v in (2, 3, 4)
         for m in sorted({1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2})]
ANY = st.builds(Sizes, st.integers(2, 8), st.integers(1, 24), st.integers(2, 4))


def test_staircase() -> None:
    drawn = draw(make_plan(NAME, Sizes(2, 4, 2)))
    assert drawn == cleandoc("""
        rank 0  F0- F1- F0b F1b F2-     B0b---- F3- B1b---- F2b B0----- F3b B1-----     B2b----     B3b---- B2----- B3-----*
        rank 1      F0- F1- F0b B0b---- F1b B1b---- F2- B0----- F3- B1----- F2b B2b---- F3b B3b---- B2----- B3-----        *
    """)  # noqa: E501
    assert drawn in cleandoc((interleaved.__doc__ or "").replace("\n    ", "\n"))


def test_order_is_megatrons_where_ranks_divide_the_micro_batches() -> None:
    """Narayanan et al. 2021, figure 4: four ranks, two chunks, eight micro-batches."""
    assert [len(r) for r in interleaved.rounds(8, 4)] == [4, 4]
    assert [interleaved.warmup(Sizes(4, 8, 2), rank) for rank in range(4)] == [10, 8, 6, 4]
    steps = [(kind, stage, k) for kind, stage, k in interleaved.batch_order(Sizes(4, 8, 2), 3, 4) if kind is Kind.F]
    assert [(stage, k) for _, stage, k in steps] == [(s, 4 * r + k) for r in (0, 1) for s in (3, 7) for k in range(4)]


@pytest.mark.parametrize(("m", "p", "expected"), [
    (8, 4, [4, 4]), (7, 4, [7]), (11, 4, [6, 5]), (3, 4, [3]), (9, 2, [3, 2, 2, 2])])
def test_rounds_hold_at_least_as_many_as_there_are_ranks(m: int, p: int, expected: list[int]) -> None:
    found = interleaved.rounds(m, p)
    assert [len(r) for r in found] == expected
    assert [k for r in found for k in r] == list(range(m))


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{s.num_ranks}x{s.chunks}-{s.num_microbatches}")
def test_every_plan_is_right(sizes: Sizes) -> None:
    """The order, the links, memory, and no deadlock where the transfers of a rank on an axis queue."""
    report = check(make_plan(NAME, sizes, 0, 2), sizes, NAME)
    bounds = [SCHEDULES[NAME].max_live_activations(sizes, rank) for rank in range(sizes.num_ranks)]
    assert [live.activations for live in report.peaks] == bounds
    if sizes.num_ranks <= 4:
        check(make_plan(NAME, sizes, 3, 2, clip=False, gather=True, ahead=0), sizes, NAME)
    simulate({rank: tuple(forward_actions(sizes, rank, sizes.num_microbatches)) for rank in range(sizes.num_ranks)},
             Costs(serial_links=True))


@given(ANY, st.floats(0.1, 10), st.floats(0.1, 10))
def test_bubble(sizes: Sizes, forward: float, backward: float) -> None:
    """(p-1)/(m v) of the ideal time, also where p does not divide m (with p = m or more)."""
    p, m, v = sizes.num_ranks, sizes.num_microbatches, sizes.chunks
    timeline = simulate(make_plan(NAME, sizes), Costs(forward / v, backward / v))
    ideal = m * (forward + backward)
    if m >= p:
        assert timeline.makespan == pytest.approx(ideal * (1 + (p - 1) / (m * v)))
        for rank in range(p):
            assert timeline.busy(rank) == pytest.approx(ideal)
    else:
        once = simulate(make_plan("1f1b", Sizes(p, m)), Costs(forward, backward))
        assert ideal < timeline.makespan <= once.makespan * (1 + 1e-9)


def test_against_1f1b_in_the_steady_state() -> None:
    """With a step's time: bubbles of 3/8 and of 3/16 of the work."""
    once = simulate(make_plan("1f1b", Sizes(4, 8), 0, 4)).step_time(8)
    twice = simulate(make_plan(NAME, Sizes(4, 8, 2), 0, 4), Costs(0.5, 1.0)).step_time(8)
    assert (once, twice) == (24 + 9, 24 + 4.5)


@given(ANY)
def test_waiting_for_old_sends_is_no_deadlock(sizes: Sizes) -> None:
    """The executor waits for a send once so many later ones have started: its receive is then posted."""
    plan = make_plan(NAME, sizes, 0, 2)
    done = dict.fromkeys(plan, 0)
    posted: set[Action] = set()
    sent: set[Action] = set()
    unfinished: dict[int, deque[Action]] = {rank: deque() for rank in plan}
    meets = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
    receives = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
    first, last = {Kind.F: 0, Kind.B: sizes.num_stages - 1}, {Kind.F: -1, Kind.B: 1}
    updates = [0] * sizes.num_ranks

    def can_go_on(rank: int, action: Action) -> bool:
        if action.kind in meets and action.stage != first[action.kind]:
            return Action(meets[action.kind], action.stage + last[action.kind], action.microbatch) in sent
        if action.kind in receives and len(unfinished[rank]) >= max_unfinished_sends(sizes.num_ranks):
            receive, step = receives[unfinished[rank][0].kind]
            return Action(receive, unfinished[rank][0].stage + step, unfinished[rank][0].microbatch) in posted
        return action.kind is not Kind.UPDATE or min(updates) > action.microbatch

    moved = True
    while moved:
        moved = False
        for rank, actions in plan.items():
            while done[rank] < len(actions) and can_go_on(rank, action := actions[done[rank]]):
                if action.kind in receives:
                    sent.add(action)
                    unfinished[rank].append(action)
                    if len(unfinished[rank]) > max_unfinished_sends(sizes.num_ranks):
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
    sizes = Sizes(2, 2, 2)
    plan = make_plan(NAME, sizes)
    actions = [a for a in plan[0] if a != Action(Kind.RECV_F, 2, 0)]
    actions.insert(actions.index(Action(Kind.SEND_F, 0, 1)) + 1, Action(Kind.RECV_F, 2, 0))
    with pytest.raises(PlanError, match="deadlock"):
        check(plan | {0: tuple(actions)}, sizes, NAME)
    check(plan | {0: tuple(actions)}, sizes, NAME, serial_links=False)


def test_a_message_for_another_chunk_is_found() -> None:
    sizes = Sizes(3, 6, 2)
    plan = make_plan(NAME, sizes)
    one, other = (plan[1].index(Action(Kind.RECV_F, stage, k)) for stage, k in ((1, 2), (4, 0)))
    actions = list(plan[1])
    actions[one], actions[other] = actions[other], actions[one]
    with pytest.raises(PlanError, match=r"would meet|which it needs"):
        check(plan | {1: tuple(actions)}, sizes, NAME)


def test_links_close_the_ring() -> None:
    """Link 1 of two leads back to the first rank: a transfer there delays the second chunk."""
    sizes = Sizes(2, 2, 2)
    plan = make_plan(NAME, sizes)
    free = simulate(plan, Costs(1, 2))
    slow = simulate(plan, Costs(1, 2, transfer=[0, 5]))
    back = plan[0].index(Action(Kind.F, 2, 0, 0))
    assert slow.starts[0][back] == free.starts[0][back] + 5


def test_costs_are_those_of_stages_and_of_ranks() -> None:
    sizes = Sizes(2, 2, 2)
    timeline = simulate(make_plan(NAME, sizes), Costs([1, 2, 3, 4], [2, 4, 6, 8], update=[10, 20]))
    assert [timeline.busy(rank) for rank in (0, 1)] == [2 * (1 + 3 + 2 + 6) + 10, 2 * (2 + 4 + 4 + 8) + 20]


def test_pictures() -> None:
    plan = make_plan(NAME, Sizes(2, 4, 2))
    svg = draw_svg(plan)
    assert svg.count(">2b</text>") == 2 * 2, "forward and backward, on both ranks"
    assert ">rank 1</text>" in svg
    assert "stage 1<" not in svg
    entries = list(trace_entries(simulate(plan), {rank: (rank, f"rank {rank}") for rank in (0, 1)}))
    arrows = [e for e in entries if e["ph"] in "sf"]
    sends = [a for actions in plan.values() for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)]
    assert len(arrows) == 2 * len(sends) == 2 * 2 * 3 * 4
    assert {e["pid"] for e in arrows} == {0, 1}


@pytest.mark.parametrize(("make", "field", "works"), [
    (lambda: Sizes(1, 4, 2), "parallel.pp", "1f1b"),
    (lambda: Sizes(2, 4, 0), "pipeline.chunks", "1"),
    (lambda: make_schedule("1f1b", chunks=2), "pipeline.chunks", "0"),
    (lambda: make_schedule(NAME, chunks=1), "pipeline.chunks", "0"),
    (lambda: make_schedule(NAME, warmup="latency"), "pipeline.warmup", "depth"),
    (lambda: SCHEDULES["2bw"].check_sizes(Sizes(2, 4, 2)), "pipeline.chunks", "0"),
])
def test_refused(make, field, works) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        make()
    (problem,) = error.value.problems
    assert problem.field == field
    assert works in problem.suggestion
