"""Graphs of all kinds, by every solver, from the command line: a valid placement or one clear
error, always in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridpar.cli import main
from hybridpar.errors import ConfigError
from hybridpar.placement import SOLVERS, Options, make_workload, place, problems, score
from hybridpar.placement import solve as solve_module
from hybridpar.placement.classes import class_graph
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.solvers import linear as linear_module
from hybridpar.placement.solvers import local_search as search_module
from hybridpar.placement.solvers.linear import solve_linear

from .graphs import document, layered_training, random_workload

pytestmark = pytest.mark.usefixtures("highs")

SLACK = 2e-6
CHAIN = [(v, v + 1) for v in range(7)]
EIGHT = {"cost": [0.5] * 8, "memory": 6.0}
FAMILY: dict[str, dict[str, Any]] = {
    "one node": document(1, [], k=1, num_cpus=0),
    "one node, on a CPU": document(1, [], supportedOnFpga=[False]),
    "two nodes": document(2, [(0, 1)], cost=[0.5, 0.0]),
    "only backward": document(8, CHAIN, isBackwardNode=[True] * 8),
    "no time": document(8, CHAIN, accelerator=[0.0] * 8, num_cpus=0),
    "no size": document(8, CHAIN, size=[0.0] * 8, memory=1e-30),
    "tiny": document(
        8, CHAIN, accelerator=[1e-29] * 8, cost=[1e-30] * 8, size=[1e-30] * 8, memory=1e-29
    ),
    "huge": document(
        8, CHAIN, accelerator=[1e29] * 8, cost=[1e30] * 8, size=[1e30] * 8, memory=1e30
    ),
    "all magnitudes": document(
        8,
        CHAIN,
        accelerator=[1e-20, 1e20, 0, 1, 1e-5, 1e10, 3, 7],
        cost=[0, 1e15, 1e-15, 1, 2, 3, 4, 5],
        cpuLatency=[1e25, 0, 1e-20, 5, 5, 5, 1e-30, 1e30],
    ),
    "more devices than nodes": document(8, CHAIN, k=1_000, num_cpus=1_000),
    "in parts": document(8, [(0, 1), (2, 3), (4, 5)], **EIGHT),
    "no edges": document(8, [], k=3, **EIGHT),
    "edges twice": document(8, CHAIN + CHAIN, **EIGHT),
    "one colour": document(8, CHAIN, colorClass=[3] * 8, **EIGHT),
    "colours that cross": document(8, CHAIN, colorClass=[0, 1, 2, 3, 3, 2, 1, 0], k=3, **EIGHT),
    "colours of what CPUs run": document(
        8,
        CHAIN,
        colorClass=[v % 4 for v in range(8)],
        supportedOnFpga=[v != 5 for v in range(8)],
        **EIGHT,
    ),
    "too little memory": document(8, CHAIN, num_cpus=0, memory=3.0),
    "just enough memory": document(
        8, CHAIN, num_cpus=0, memory=5.0, size=[3.0, 1, 2, 1, 1, 0, 1, 1]
    ),
}


def from_command_line(
    path: Path, solver: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any] | None:
    """Output of `hybridpar place`; None if it has said in one line why there is nothing."""
    code = main(["place", str(path), "--solver", solver, "--time-limit", "20", "--json"])
    out, err = capsys.readouterr()
    if code:
        assert "; try " in err, err
        assert json.loads(out)["ok"] is False
        return None
    return json.loads(out)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", FAMILY)
def test_every_solver(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "graph.json").write_text(json.dumps(FAMILY[name]))
    w = make_workload(FAMILY[name])
    best: dict[str, float] = {}
    for solver in SOLVERS:
        if solver == "expert" or (found := from_command_line(path, solver, capsys)) is None:
            continue
        machines = [*found["fpgas"], *found["cpus"]]
        at = {node: d for d, machine in enumerate(machines) for node in machine["nodes"]}
        devices = np.array([at[node] for node in w.ids])
        assert not problems(w, devices), solver
        assert found["bound"] <= found["objective"]
        assert found["proven"] or solver not in ("dp", "milp", "milp-contiguous", "latency-milp")
        if not solver.startswith("latency"):
            assert score(w, devices).objective == found["objective"]
            best[solver] = found["objective"]
    for wider, narrower in (
        ("milp", "milp-contiguous"),
        ("milp-contiguous", "dp"),
        ("dp", "dpl"),
        ("dp", "greedy"),
        ("dp", "pipedream"),
        ("milp", "local-search"),
        ("milp", "one-accelerator"),
    ):
        if narrower in best:
            assert best[wider] <= best[narrower] * (1 + SLACK)
    assert best or name == "too little memory"


# -- the linear program's windows


@pytest.mark.parametrize("training", [False, True])
def test_guesses_of_the_load_change_nothing(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them every part of the order is looked at."""
    graphs = [class_graph(random_workload(seed, training=training, most=12)) for seed in range(60)]
    graphs.append(class_graph(layered_training(6, 3, 4, k=5, num_cpus=2)))
    values = [solve_linear(graph)[0] for graph in graphs]
    monkeypatch.setattr(linear_module, "GUESSES", ())
    for value, graph in zip(values, graphs, strict=True):
        expected, device = solve_linear(graph)
        assert value == pytest.approx(expected, rel=1e-12)
        if np.isfinite(expected):
            assert score(graph.workload, graph.devices(device)).objective == pytest.approx(
                expected, rel=1e-12
            )


def test_large_instances_are_packed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = layered_training(4, 3, 3, k=3)
    greedy = place(w, "greedy").objective

    def never(*_: object) -> None:
        raise OutOfTime

    with monkeypatch.context() as patch:
        for name in ("solve_linear", "solve_orders"):
            patch.setattr(solve_module, name, never)
        for solver in ("dpl", "dp", "pipedream"):
            placement = place(w, solver)
            assert placement.note == "the time limit was reached: this is packed greedily, in order"
            assert placement.objective == greedy or solver == "pipedream"
    with monkeypatch.context() as patch:
        patch.setattr(linear_module, "MAX_TABLE", 100)
        with pytest.raises(
            ConfigError, match="maxCPUs = 1: the dynamic program's table for 40 classes"
        ):
            place(w, "dpl")
        assert place(w, "milp", Options(time_limit=2.0)).objective <= greedy
    monkeypatch.setattr(solve_module, "MAX_TABLE", 100)
    assert (
        "ideals and so many devices is too large: this is the best split of 21 orders"
        in place(w, "dp").note
    )
    monkeypatch.setattr(
        solve_module,
        "MAX_NUMBERS",
        search_module.LocalSearch.size(class_graph(w, pipeline=False)) - 1,
    )
    with pytest.raises(ConfigError, match="the graph is too large for it on so many devices"):
        place(w, "local-search")
