"""Time limits on large graphs, by a clock on which every step of every solver takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

from hybridpar.placement import Options, Workload, make_workload, place, problems, score
from hybridpar.placement import solve as solve_module
from hybridpar.placement.classes import class_graph
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.solvers import latency_milp, latency_search
from hybridpar.placement.solvers import linear as linear_module
from hybridpar.placement.solvers.highs import OUT_OF_TIME, Answer, Program
from hybridpar.placement.solvers.highs.process import GRACE
from hybridpar.placement.solvers.linear import Segments
from hybridpar.placement.solvers.local_search import LocalSearch
from hybridpar.placement.solvers.milp import solve_max_load
from hybridpar.placement.solvers.program import ProgramBuilder

from .graphs import document, layered_training

STEP = 0.1
"""Seconds of a step: one class more in a dynamic program, one local move, one set of rows, one
latency."""
ALLOWED = 20
"""Steps after the limit: to score what was found. A dynamic program over this graph has a
thousand."""


class SlowClock:
    """In place of `time.monotonic`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.patch = patch
        patch.setattr(time, "monotonic", lambda: self.now)
        for holder, name in (
            (Segments, "extend"),
            (LocalSearch, "_moves"),
            (ProgramBuilder, "at_most"),
            (latency_search, "latency"),
            (latency_milp, "latency"),
        ):
            self.replace(holder, name, self.slow)
        self.replace(linear_module, "_trace", self.free)
        for module in (solve_module, latency_milp):
            patch.setattr(module, "Highs", lambda: nullcontext(self))

    def replace(
        self, holder: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.patch.setattr(holder, name, by(getattr(holder, name)))

    def slow(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.now += STEP
            return step(*args)

        return run

    def free(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """A graph like a trace's, whose steps are few but for graphs as narrow as this one."""

        def run(*args: Any) -> Any:
            now = self.now
            try:
                return what(*args)
            finally:
                self.now = now

        return run

    def wait_until_ready(self, deadline: float) -> bool:
        """HiGHS, which has started."""
        return True

    def solve(self, program: Program, deadline: float) -> Answer:
        """HiGHS, which finds nothing."""
        self.now = max(self.now, deadline + GRACE)
        return Answer(np.empty(0), -np.inf, note=OUT_OF_TIME)


@cache
def two_thousand_nodes(training: bool) -> Workload:
    w = layered_training(50, 4, 5, k=8)
    if training:
        return w
    edges = [(u, v) for u, v in w.edges.tolist() if not w.backward[v]]
    return make_workload(
        document(len(w.ids) // 2, edges, cost=w.transfer_time.tolist(), k=8, memory=80.0)
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("limit", [0.01, 50.0, 500.0])
@pytest.mark.parametrize(
    "solver",
    ["dp", "dpl", "milp", "milp-contiguous", "local-search", "latency-milp", "latency-greedy"],
)
def test_two_thousand_nodes_in_time(
    solver: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = two_thousand_nodes(not solver.startswith("latency"))
    clock = SlowClock(monkeypatch)
    placement = place(w, solver, Options(time_limit=limit, max_ideals=1_000))
    assert clock.now <= limit + max(solve_module.ONE_MORE, GRACE) + ALLOWED * STEP
    assert placement.seconds <= clock.now
    assert not problems(w, placement.devices)
    assert 0 < placement.bound < placement.objective
    assert not placement.proven
    if limit < 1:
        assert OUT_OF_TIME in placement.note or solver in ("dp", "latency-greedy")


def test_an_answer_after_the_limit_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS holds too much on a device by less than it can see, and is late: there is no time to
    forbid that."""
    w = make_workload(document(8, [(v, v + 1) for v in range(7)], num_cpus=0, memory=5.0))
    clock = SlowClock(monkeypatch)

    def all_on_one(program: Program, deadline: float) -> Answer:
        clock.now = deadline + GRACE
        values = np.zeros(len(program.cost))
        values[:16:2] = 1.0  # the first of two devices
        return Answer(values, 0.0, note=OUT_OF_TIME)

    monkeypatch.setattr(clock, "solve", all_on_one)
    graph = class_graph(w, pipeline=False)
    solution = solve_max_load(graph, clock, np.empty(0, np.int64), contiguous=True, deadline=50.0)  # type: ignore[arg-type]
    assert (len(solution.device), solution.proven, solution.note) == (0, False, OUT_OF_TIME)


def test_the_split_of_one_order_is_kept_where_no_time_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exact program runs out of time, and so does every order after the first: its split is the
    answer."""
    w = layered_training(10, 3, 3, k=4)

    def late(*_: object) -> None:
        raise OutOfTime

    for name in ("best_loads", "solve_orders"):
        monkeypatch.setattr(solve_module, name, late)
    value, _ = solve_module.solve_linear(class_graph(w), np.inf)
    placement = place(w, "dp")
    assert OUT_OF_TIME in placement.note
    assert placement.score.objective == pytest.approx(value)
    assert value < place(w, "greedy").score.objective
    start = solve_module._pipeline(w, np.inf, np.inf)
    assert start is not None
    assert np.array_equal(start, placement.devices)


@pytest.mark.parametrize("more", [-0.5, 3.0])
def test_dp_is_never_worse_than_dpl_in_the_same_time(
    more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split of one order takes about all of the time: nine tenths of it are not enough."""
    w = layered_training(46, 4, 5, k=8)
    with monkeypatch.context() as patch:
        clock = SlowClock(patch)
        place(w, "dpl", Options(time_limit=1e6))
    limit = clock.now + more
    answers = {}
    for solver in ("dpl", "dp"):
        with monkeypatch.context() as patch:
            SlowClock(patch)
            answers[solver] = place(w, solver, Options(time_limit=limit))
    assert "greedily" not in answers["dpl"].note
    assert answers["dp"].objective <= answers["dpl"].objective
    assert answers["dp"].objective < place(w, "greedy").objective
    assert solve_module.LONG * limit < clock.now


def test_the_best_of_all_known_placements_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy placement that is better than the splits of all orders takes their place."""
    w = layered_training(10, 3, 3, k=4)
    best = place(w, "dp").devices
    graph = class_graph(w)
    monkeypatch.setattr(solve_module, "packed_evenly", lambda graph: graph.of_classes(best))

    def late(*_: object) -> None:
        raise OutOfTime

    def poor(graph: Any, *_: object) -> Any:
        device = np.zeros(graph.num_classes, np.int64)
        return score(w, graph.devices(device)).objective, device

    monkeypatch.setattr(solve_module, "best_loads", late)
    monkeypatch.setattr(solve_module, "solve_linear", poor)
    monkeypatch.setattr(solve_module, "solve_orders", lambda *_: (*poor(graph), 3))
    placement = place(w, "dp")
    assert np.array_equal(placement.devices, best)
    assert "3 orders" in placement.note
