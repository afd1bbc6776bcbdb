"""`place`: results, limits, and what cannot be placed."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from hybridpar import native
from hybridpar.errors import ConfigError
from hybridpar.placement import (
    SOLVERS,
    Options,
    make_workload,
    place,
    problems,
    read_split,
    score,
    write_assignment,
)
from hybridpar.placement import solve as solve_module
from hybridpar.placement.classes import class_graph
from hybridpar.placement.ideals import enumerate_ideals
from hybridpar.placement.solvers import exact as exact_module
from hybridpar.placement.solvers.linear import solve_linear

from .graphs import document, layered_training, random_workload

CHAIN = [(v, v + 1) for v in range(9)]


def test_a_chain_by_hand() -> None:
    """Ten nodes of 1 with transfers of 0.25 over two accelerators: 5 + 0.25 each."""
    w = make_workload(document(10, CHAIN, cost=[0.25] * 10, num_cpus=0))
    placement = place(w, "dp")
    assert placement.objective == 5.25
    assert placement.score.loads.tolist() == [5.25, 5.25]
    assert placement.score.transfers.tolist() == [0.25, 0.25]
    assert placement.contiguous
    assert placement.ordered
    assert "proven optimal" in str(placement)


def test_an_output_is_paid_once_by_each_device() -> None:
    """Node 0 feeds three others, two of them on another accelerator, one on a CPU."""
    w = make_workload(document(4, [(0, 1), (0, 2), (0, 3)], cost=[2.0, 0, 0, 0]))
    result = score(w, np.array([0, 1, 1, 2]))
    assert result.loads.tolist() == [3.0, 4.0, 10.0]  # sent once; received once; CPUs pay nothing


@pytest.mark.skipif(native.missing() is not None, reason="hybridpar._C is not built")
@pytest.mark.parametrize("training", [False, True])
def test_both_ways_fill_the_same_table(training: bool) -> None:
    for seed in range(40):
        w = random_workload(seed, training=training, most=8)
        graph = class_graph(w)
        ideals = enumerate_ideals(graph.predecessors)
        for limit in (math.inf, solve_linear(graph)[0] * (1 + 1e-9)):
            tables = [
                way(graph, ideals, limit, math.inf)
                for way in (exact_module._best_loads_native, exact_module._best_loads_numpy)
            ]
            np.testing.assert_allclose(
                *(np.where(t > limit, np.inf, t) for t in tables), rtol=1e-12
            )


@pytest.mark.parametrize("limit", [True, False])
def test_both_ways_on_a_larger_graph(limit: bool) -> None:
    w = layered_training(4, 3, 2, k=3, num_cpus=2)
    graph = class_graph(w)
    ideals = enumerate_ideals(graph.predecessors)
    known = solve_linear(graph)[0]
    found = [
        way(graph, ideals, known * (1 + 1e-9) if limit else math.inf, math.inf)[-1, -1, -1]
        for way in (exact_module.best_loads, exact_module._best_loads_numpy)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] <= known * (1 + 1e-12)


def test_dp_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    w = layered_training(3, 2, 2)
    expected = place(w, "dp").objective
    monkeypatch.setattr(exact_module.native, "missing", lambda: "not built")
    assert place(w, "dp").objective == pytest.approx(expected, rel=1e-12)


def test_subsets_are_found_as_sets_of_ideals() -> None:
    ideals = enumerate_ideals([(), (0,), (), (1, 2)])
    sets = [frozenset(np.flatnonzero(row)) for row in ideals.members]
    assert len(set(sets)) == 7
    assert sets[0] == set()
    assert sets[-1] == {0, 1, 2, 3}
    for i, large in enumerate(sets):
        assert [sets[j] for j in ideals.subsets(i)] == [
            small for small in sets[: i + 1] if small <= large
        ]
    covers = {(sets[a], int(v), sets[b]) for a, v, b in ideals.covers}
    assert covers == {
        (a, next(iter(a - b)), b) for a in sets for b in sets if b < a and len(a - b) == 1
    }


# -- limits


@pytest.mark.parametrize("compiled", [True, False])
def test_dp_out_of_time_says_so(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time until the table is filled, which then has none left."""
    w = layered_training(6, 3, 4)
    now = 0.0
    fill = solve_module.best_loads

    def late(*args: Any) -> Any:
        nonlocal now
        now = 1.1
        return fill(*args)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(solve_module, "best_loads", late)
    if not compiled:
        monkeypatch.setattr(exact_module.native, "missing", lambda: "not built")
    placement = place(w, "dp", Options(time_limit=1.0))
    assert placement.note == "the time limit was reached: this is the best split of 1 order"
    assert not placement.proven
    assert 0 < placement.bound < placement.objective
    assert 0 < placement.gap < 1
    assert "bound" in str(placement)
    assert placement.objective == place(w, "dpl").objective


def test_milp_out_of_time_gives_the_best_found_with_its_bound(only_highs_takes_time: None) -> None:
    """HiGHS would take minutes."""
    w = layered_training(4, 3, 3)
    placement = place(w, "milp", Options(time_limit=1.0))
    assert 0 < placement.seconds <= 1.0
    assert placement.note == "the time limit was reached"
    assert 0 < placement.bound < placement.objective <= place(w, "dpl").objective
    assert not problems(w, placement.devices)


def test_latency_out_of_time(only_highs_takes_time: None) -> None:
    w = make_workload(
        document(
            40,
            [(v, v + i) for v in range(36) for i in (1, 3)],
            cost=[0.3] * 40,
            k=3,
            memory=9.0,
            num_cpus=8,
        )
    )
    simple = place(w, "latency-greedy")
    placement = place(w, "latency-milp", Options(time_limit=1.0))
    assert placement.bound <= placement.objective <= simple.objective
    assert placement.score.memory[:3].max() <= 9.0
    assert placement.slots is not None
    assert "totalLatency" in placement.document()


def test_latency_of_a_chain_by_hand() -> None:
    """Two accelerators hold three of five nodes each: 5 of compute, and one output out and in."""
    w = make_workload(document(5, [(v, v + 1) for v in range(4)], cost=[0.5] * 5, memory=3.0))
    placement = place(w, "latency-milp")
    assert placement.proven
    assert placement.objective == pytest.approx(6.0)


def test_a_second_call_can_help_latency() -> None:
    """0 and 3 must share the accelerator, 1 and 2 fit no accelerator: one call cannot hold both
    ends."""
    w = make_workload(
        document(
            4,
            [(0, 1), (1, 2), (2, 3)],
            k=1,
            memory=2.0,
            supportedOnFpga=[True, False, False, True],
            colorClass=[1, 2, 3, 1],
        )
    )
    assert place(w, "latency-milp", Options(slots=1)).objective == pytest.approx(40.0)
    assert place(w, "latency-milp", Options(slots=2)).objective == pytest.approx(22.0)


# -- what cannot be


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "expert"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0.5}, "maxSizePerFPGA = 0.5"),
        ({"memory": 4.0}, "maxSizePerFPGA = 4.0"),
        ({"supportedOnFpga": [True] * 9 + [False]}, "no accelerator can run node 9"),
    ],
)
def test_an_operator_that_fits_nowhere_is_one_clear_error(
    solver: str, change: dict, message: str
) -> None:
    w = make_workload(document(10, CHAIN, num_cpus=0, **change))
    with pytest.raises(ConfigError) as caught:
        place(w, solver, Options(time_limit=10))
    text = str(caught.value)
    assert "try" in text
    assert message in text or solver == "one-accelerator"


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("solver", ["dp", "dpl", "milp", "milp-contiguous", "local-search"])
def test_memory_that_only_some_placement_keeps(solver: str) -> None:
    """3 + 3 + 2 bytes into two accelerators of 5 and 3: sizes sum up, order forbids."""
    w = make_workload(document(3, [(0, 1), (1, 2)], num_cpus=0, memory=5.0, size=[3.0, 3.0, 2.0]))
    placement = place(w, solver)
    assert placement.score.memory.max() <= 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0.0}, "time_limit = 0.0"),
        ({"time_limit": math.nan}, "time_limit = nan"),
        ({"restarts": -1}, "restarts = -1"),
        ({"slots": 0}, "slots = 0"),
        ({"max_ideals": True}, "max_ideals = True"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(make_workload(document(2, [(0, 1)])), "dpl", Options(**options))


def test_unknown_solvers_are_named() -> None:
    with pytest.raises(ConfigError, match="solver = 'scotch': must be one of dp, dpl"):
        place(make_workload(document(2, [(0, 1)])), "scotch")


def test_latency_is_for_inference() -> None:
    with pytest.raises(ConfigError, match=r"nodes\[1\].isBackwardNode = True"):
        place(make_workload(document(2, [(0, 1)], isBackwardNode=[False, True])), "latency-milp")


# -- splits


def test_placements_are_written_and_read(tmp_path) -> None:
    w = random_workload(7, training=True)
    placement = place(w, "dp")
    write_assignment(placement, tmp_path / "split.json")
    devices = read_split(w, tmp_path / "split.json")
    assert score(w, devices).objective == placement.objective
    assert json.loads((tmp_path / "split.json").read_text())["proven"] is True


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"fpgas": [{"nodes": [0, 1, 77]}]}, "fpgas.0..nodes = 77: must be ids of nodes"),
        ({"fpgas": [{"nodes": [0]}, {"nodes": [0, 1]}]}, "is on two machines"),
        ({"fpgas": [{"nodes": [0]}]}, "split = 1: this node is on no machine"),
        (
            {"fpgas": [{"nodes": [0]}, {"nodes": [1]}, {"nodes": [1]}]},
            "more machines in use than the workload's 2",
        ),
        ([], "must be a JSON object"),
    ],
)
def test_splits_are_checked(split: object, message: str, tmp_path) -> None:
    (path := tmp_path / "split.json").write_text(json.dumps(split))
    with pytest.raises(ConfigError, match=message):
        read_split(make_workload(document(2, [(0, 1)])), path)


def test_an_expert_that_breaks_rules_is_told_which() -> None:
    w = make_workload(document(3, [(0, 1), (1, 2)], memory=1.5))
    with pytest.raises(ConfigError, match="is more than its 1"):
        place(w, "expert", Options(split=np.array([0, 0, 1])))
    with pytest.raises(ConfigError, match="does not exist"):
        place(w, "expert", Options(split=np.array([0, 1, 5])))
    with pytest.raises(ConfigError, match="must be given"):
        place(w, "expert")
