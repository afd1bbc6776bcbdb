"""The paper's other objectives: transfers beside computing, and forward and backward apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridpar.errors import ConfigError
from hybridpar.placement import Options, Workload, make_workload, place, score
from hybridpar.placement.classes import backward_costs, class_graph
from hybridpar.placement.placement_report import as_json, compare, lines

from .graphs import best_pipeline, best_placement, document, random_workload

pytestmark = pytest.mark.usefixtures("highs")
SIZES = {"overlapped": 6, "gpipe": 7}


def two_layers() -> Workload:
    """Forwards 0, 1 and backwards 2, 3 of two layers; 0 sends 4 to 1 and to 3, 2 sends 1 to 3."""
    return make_workload(
        document(
            4,
            [(0, 1), (1, 2), (2, 3), (0, 3)],
            accelerator=[2.0, 3.0, 7.0, 5.0],
            cost=[4.0, 9.0, 1.0, 0.0],
            k=2,
            num_cpus=0,
            isBackwardNode=[False, False, True, True],
            colorClass=[0, 1, 1, 0],
        )
    )


def test_scores_by_hand() -> None:
    """Layer 0 on device 0, layer 1 on device 1. Forward: 2 + 4 and 3 + 4; backward: 5 + 1, 7 + 1."""
    w = two_layers()
    apart = np.array([0, 1, 1, 0])
    serial = score(w, apart)
    assert serial.loads.tolist() == [2 + 5 + 4 + 1, 3 + 7 + 4 + 1]
    assert serial.objective == 15
    beside = score(replace(w, objective="overlapped"), apart)
    assert (beside.loads.tolist(), beside.objective) == ([7, 10], 10)
    assert beside.transfers.tolist() == [5, 5]
    assert score(replace(w, objective="gpipe"), apart).objective == (3 + 4) + (7 + 1)
    together = np.zeros(4, np.int64)
    assert score(replace(w, objective="gpipe"), together).objective == 5 + 12
    assert score(replace(w, objective="overlapped"), together).objective == 17


def test_the_best_forward_and_backward_may_be_on_different_devices() -> None:
    """Work 1 + 9 and 9 + 1: one device each has a load of 10, and 9 + 9 apart; together it is 20,
    and 10 + 10."""
    w = make_workload(
        document(
            4,
            [(0, 1), (1, 2), (2, 3)],
            accelerator=[1.0, 9.0, 1.0, 9.0],
            k=2,
            num_cpus=0,
            isBackwardNode=[False, False, True, True],
            colorClass=[0, 1, 1, 0],
        )
    )
    assert place(w, "milp").objective == 10
    found = place(w, "milp", Options(objective="gpipe"))
    assert (found.objective, found.proven) == (18, True)
    assert as_json(found, compare(found))["minimized"] == "gpipe"
    assert "largest forward plus largest backward load 18" in "\n".join(lines(found, []))


@pytest.mark.parametrize("objective", SIZES)
def test_milp_finds_the_best_placement(objective: str) -> None:
    for seed in range(1000, 1012):
        w = random_workload(seed, training=True, most=SIZES[objective])
        w = replace(w, objective=objective)
        for contiguous in (False, True):
            best = best_placement(w, contiguous)
            solver = "milp-contiguous" if contiguous else "milp"
            try:
                found = place(w, solver)
            except ConfigError:
                assert best == np.inf, seed
                continue
            assert found.objective == pytest.approx(best, rel=1e-5, abs=1e-9), seed
            assert found.bound <= best * (1 + 1e-6), seed


def test_dp_finds_the_best_pipeline_with_transfers_beside() -> None:
    differ = 0
    for seed in range(40):
        w = random_workload(seed, training=seed % 2 == 0, most=6)
        beside = replace(w, objective="overlapped")
        best = best_pipeline(beside)
        if np.isinf(best):
            continue
        found = place(w, "dp", Options(objective="overlapped"))
        assert (found.objective, found.proven) == (pytest.approx(best, rel=1e-9), True), seed
        split = place(w, "dpl", Options(objective="overlapped"))
        assert split.objective >= best * (1 - 1e-9)
        differ += best < best_pipeline(w) * (1 - 1e-9)
    assert differ > 5


def test_costs_of_passes_add_up_to_all() -> None:
    w = random_workload(7, training=True)
    graph = class_graph(w)
    parts = backward_costs(graph)
    wholes = (
        np.where(np.isinf(graph.accelerator_time), np.inf, graph.accelerator_time),
        graph.cpu_time,
    )
    for part, whole in zip(parts, (*wholes, graph.net_cost), strict=True):
        assert (part <= whole + 1e-12).all()
    assert parts[1].sum() == pytest.approx(w.cpu_time[w.backward].sum())


@pytest.mark.parametrize("solver", ["dp", "local-search", "latency-milp"])
def test_solvers_that_cannot_minimise_it_say_so(solver: str) -> None:
    with pytest.raises(ConfigError, match=r"objective = 'gpipe': the solver .* serial"):
        place(two_layers(), solver, Options(objective="gpipe"))


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"objective = 'latency': must be one of serial, overlapped"
    ):
        place(two_layers(), "dpl", Options(objective="latency"))
