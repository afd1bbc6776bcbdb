"""Pairs of devices: all of what two devices hold is dealt out in the best way, and the rest is left
alone."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from hybridpar.placement import Workload, is_contiguous, make_workload, problems, score
from hybridpar.placement.classes import class_graph
from hybridpar.placement.solvers import highs as highs_process
from hybridpar.placement.solvers.highs import Highs
from hybridpar.placement.solvers.milp import _model
from hybridpar.placement.solvers.pairs import ENOUGH, improve_pairs
from hybridpar.placement.workload import Ints, workload_document

from .graphs import assignments, best_placement, layered_training, random_workload


def improved(
    w: Workload, start: Ints, highs: Highs, contiguous: bool = False, seconds: float = 1200.0
) -> Ints:
    """A device for each node."""
    graph = class_graph(w, pipeline=False, merge_leaves=False)
    whole = _model(graph, contiguous, score(w, start).objective)
    device = improve_pairs(graph, whole, graph.of_classes(start), highs, time.monotonic() + seconds)
    return graph.devices(device)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("k", "num_cpus"), [(2, 0), (1, 1)])
def test_finds_the_best_of_two_devices(
    k: int, num_cpus: int, contiguous: bool, highs: Highs
) -> None:
    tried = 0
    for seed in range(30):
        document = workload_document(random_workload(seed, training=seed % 2 == 0, most=6))
        w = make_workload(document | {"maxFPGAs": k, "maxCPUs": num_cpus})
        starts = [
            x
            for x in assignments(w, 2)
            if not problems(w, x) and (not contiguous or is_contiguous(w, x))
        ]
        if starts:
            worst = max(starts, key=lambda x: score(w, x).objective)
            found = improved(w, worst, highs, contiguous)
            assert not problems(w, found)
            assert not contiguous or is_contiguous(w, found)
            best = best_placement(w, contiguous)
            assert score(w, found).objective <= best * (1 + 2 * ENOUGH) + 1e-9, seed
            tried += 1
    assert tried > 10


@pytest.mark.thorough
def test_two_of_many_move_at_a_time(highs: Highs) -> None:
    w = layered_training(3, 3, 3, k=4, num_cpus=0)
    start = np.zeros(w.num_nodes, np.int64)
    found = improved(w, start, highs)
    assert not problems(w, found)
    assert score(w, found).objective < 0.4 * score(w, start).objective
    assert (improved(w, start, highs, seconds=0.0) == start).all()


@pytest.mark.thorough
def test_a_process_that_starts_slowly_costs_no_pair_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS starts for longer than one pair may take."""
    script = tmp_path / "late.py"
    script.write_text(
        "import runpy, time\n"
        "time.sleep(1.0)\n"
        f"runpy.run_path({str(highs_process._SCRIPT)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(highs_process, "_SCRIPT", script)
    w = layered_training(3, 3, 3, k=4, num_cpus=0)
    start = np.zeros(w.num_nodes, np.int64)
    with Highs() as late:
        found = improved(w, start, late, seconds=18.0)  # of which a pair may take 0.9
    assert score(w, found).objective < score(w, start).objective
