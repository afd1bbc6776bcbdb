"""Every solver against all placements of small graphs: shared colours, orphans, tight memory,
unsupported nodes."""

from __future__ import annotations

import numpy as np
import pytest

from hybridpar.errors import ConfigError
from hybridpar.placement import Options, Workload, latency, make_workload, place, problems
from hybridpar.placement.classes import class_graph
from hybridpar.placement.solvers.bound import work_bound
from hybridpar.placement.solvers.cover import cover_bound
from hybridpar.placement.solvers.highs import Highs
from hybridpar.placement.solvers.latency_bound import cut_bound, path_bound
from hybridpar.placement.solvers.latency_gates import gate_bound

from .graphs import (
    best_latency,
    best_pipeline,
    best_placement,
    branched_inference,
    document,
    random_workload,
)

SIZES = {False: 5, True: 7}  # of inference and training graphs

pytestmark = pytest.mark.usefixtures("highs")


def objective(w: Workload, solver: str, **options: object) -> float:
    """Infinite where the solver says that nothing fits."""
    try:
        placement = place(w, solver, Options(**options))  # type: ignore[arg-type]
    except ConfigError:
        return np.inf
    assert not problems(w, placement.devices)
    assert placement.proven
    assert placement.bound <= placement.objective
    return placement.objective


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
def test_dp_finds_the_best_pipeline(training: bool, highs: Highs) -> None:
    for seed in range(80):
        w = random_workload(seed, training=training, most=SIZES[training])
        best = best_pipeline(w)
        found = objective(w, "dp")
        assert found == pytest.approx(best, rel=1e-9), seed
        if np.isfinite(best):
            assert work_bound(class_graph(w)) <= best * (1 + 1e-9), seed
            free = class_graph(w, pipeline=False)
            least = best_placement(w, False)
            assert work_bound(free) <= least * (1 + 1e-9), seed
            if seed < 30:
                assert (
                    work_bound(free)
                    <= cover_bound(free, found, np.inf, highs)
                    <= least * (1 + 1e-9)
                ), seed


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_milp_finds_the_best_placement(training: bool, contiguous: bool) -> None:
    for seed in range(1000, 1025):
        w = random_workload(seed, training=training, most=SIZES[training])
        found = objective(w, "milp-contiguous" if contiguous else "milp", restarts=seed % 2)
        assert found == pytest.approx(best_placement(w, contiguous), rel=1e-5, abs=1e-9), seed


@pytest.mark.parametrize("slots", [1, 2])
def test_latency_milp_finds_the_best_placement(slots: int) -> None:
    for seed in range(2000, 2016):
        w = random_workload(seed, training=False, most=4 if slots == 2 else 5)
        found = objective(w, "latency-milp", slots=slots)
        assert found == pytest.approx(best_latency(w, slots), rel=1e-5, abs=1e-9), seed


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("slots", [1, 2])
def test_no_placement_is_below_the_bounds_of_latency(slots: int, highs: Highs) -> None:
    """They are most often what the best placement takes, where a path has ways around parts of
    it."""
    made = [
        random_workload(seed, training=False, most=4 if slots == 2 else 5)
        for seed in range(2000, 2020)
    ]
    met = 0
    made += [branched_inference(seed, 7 - slots) for seed in range(12)]
    if slots == 1:  # what moves would be counted twice, or where it need not, but for one rule each
        made += [branched_inference(seed, 7) for seed in (43, 1043, 4302)]
    for i, w in enumerate(made):
        best = best_latency(w, slots)
        if np.isfinite(best):
            colours = class_graph(w, pipeline=False, merge_leaves=False)
            one = path_bound(colours, np.inf)
            other = cut_bound(colours, slots, np.inf)
            assert max(one, other) <= best * (1 + 1e-9), i
            assert gate_bound(w, slots, 1.5 * best, np.inf, highs)[0] <= best * (1 + 1e-6), (
                i
            )  # HiGHS's tolerance
            met += i >= 20 and other == pytest.approx(best, rel=1e-9)
    assert met >= 6


def test_branches_between_gates_share_the_memory(highs: Highs) -> None:
    """0 to 1, 2 and 3, which feed 4, on accelerators of two nodes: a path sees none of the branches
    beside it."""
    w = make_workload(
        document(
            5,
            [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)],
            memory=2,
            k=3,
            cost=[1.0] * 5,
            cpuLatency=[30.0] * 5,
        )
    )
    bound, (found,) = gate_bound(w, 1, 100.0, np.inf, highs)
    assert cut_bound(class_graph(w, pipeline=False, merge_leaves=False), 1, np.inf) == 5
    assert (
        bound == pytest.approx(best_latency(w, 1), rel=1e-6) == latency(w, found, np.zeros(5)) == 12
    )


def test_colours_on_cpus_need_not_be_one_call() -> None:
    """0 and 2 share a colour and fit no accelerator; 1, between them, may leave the CPUs all the
    same."""
    w = make_workload(
        document(3, [(0, 1), (1, 2)], colorClass=[7, 8, 7], supportedOnFpga=[False, True, False])
    )
    assert objective(w, "latency-milp") == best_latency(w, 1) == 21


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("solver", ["dpl", "pipedream", "greedy", "local-search"])
def test_heuristics_are_valid_and_not_below_the_best(solver: str) -> None:
    fits = 0
    for seed in range(3000, 3040):
        w = random_workload(seed, training=seed % 2 == 0, most=6)
        try:
            placement = place(w, solver, Options(restarts=3))
        except ConfigError:
            continue
        fits += 1
        assert not problems(w, placement.devices)
        best = best_placement(w, False) if solver == "local-search" else best_pipeline(w)
        assert placement.bound <= best * (1 + 1e-9) <= placement.objective * (1 + 2e-9)
        if solver != "local-search":
            assert placement.ordered
            assert placement.contiguous
    assert fits > 15
