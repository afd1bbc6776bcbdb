"""The report of a placement: chunks, order, comparison."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybridpar.placement import (
    Options,
    Workload,
    chunks,
    is_contiguous,
    is_ordered,
    make_workload,
    place,
)
from hybridpar.placement.placement_report import as_json, compare, lines
from hybridpar.placement.scoring import in_order

from .graphs import assignments, document, layered_training, random_workload

CHAIN = make_workload(document(3, [(0, 1), (1, 2)], accelerator=[1.0, 2.0, 1.0], num_cpus=0))


def paths(w: Workload) -> list[list[int]]:
    """All paths of forward nodes."""
    edges = [(u, v) for u, v in w.edges.tolist() if not w.backward[v]]
    found = [[v] for v in range(w.num_nodes) if not w.backward[v]]
    for path in found:  # grows while it is walked
        found += [[*path, v] for u, v in edges if u == path[-1]]
    return found


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_chunks_are_the_most_visits_of_a_path(seed: int, training: bool) -> None:
    w = random_workload(seed, training=training, most=6)
    total = w.num_accelerators + w.num_cpus
    for devices in assignments(w, total)[:200]:
        expected = [0] * total
        for path in paths(w):
            visits = [d for i, d in enumerate(devices[path]) if not i or devices[path[i - 1]] != d]
            for d in set(visits):
                expected[d] = max(expected[d], visits.count(d))
        only_backward = set(devices[w.backward].tolist()) - set(devices[~w.backward].tolist())
        assert chunks(w, devices).tolist() == [
            1 if d in only_backward else n for d, n in enumerate(expected)
        ]
        assert is_contiguous(w, devices) == (max(expected) <= 1)


def test_devices_in_order() -> None:
    assert in_order(CHAIN, np.array([1, 0, 0])) == [1, 0]
    assert in_order(CHAIN, np.array([1, 0, 1])) == []
    assert not is_ordered(CHAIN, np.array([1, 0, 1]))


def test_a_placement_in_chunks_says_so() -> None:
    best = place(CHAIN, "milp")
    told = "\n".join(lines(best, compare(best)))
    assert "largest load 2, proven" in told
    assert "not contiguous: the devices would hold" in told
    assert "runs chunks of whole blocks that go round the devices" in told
    assert "the best contiguous one here, dpl's: 3 (+50.00%)" in told
    assert "one-accelerator  4            (+100.00%)" in told
    assert sorted(as_json(best, compare(best))["chunks"]) == [1, 2]


def test_a_pipeline_says_so_and_baselines_that_cannot_say_why() -> None:
    w = make_workload(
        document(3, [(0, 1), (1, 2)], accelerator=[1.0, 2.0, 1.0], num_cpus=0, memory=2.5)
    )
    best = place(w, "dp")
    told = "\n".join(lines(best, compare(best)))
    assert "largest load 3, proven" in told
    assert "contiguous: the devices are a pipeline" in told
    assert "one-accelerator  none: the graph takes 3 bytes" in told
    plain = json.loads(json.dumps(as_json(best, compare(best))))
    assert plain["ok"]
    assert plain["contiguous"]
    assert plain["ordered"]
    assert plain["proven"]
    assert plain["objective"] == plain["maxLoad"] == plain["bound"] == 3
    assert plain["others"] == {"dpl": 3, "greedy": 3, "pipedream": 3, "one-accelerator": None}


def test_out_of_time_is_said_with_the_bound() -> None:
    best = place(layered_training(6, 3, 4), "dp", Options(time_limit=1e-3))
    told = lines(best, [])[0]
    assert f"not proven: at most {best.gap:.2%} could be saved (bound {best.bound:.6g})" in told
    assert told.endswith("the time limit was reached: this is the best split of 1 order")
    assert not as_json(best, [])["proven"]


def test_report_of_the_time_of_one_sample() -> None:
    w = make_workload(document(4, [(0, 1), (1, 2), (2, 3)], memory=2.0))
    best = place(w, "latency-milp")
    others = compare(best)
    assert [o.solver for o in others] == ["latency-greedy"]
    told = "\n".join(lines(best, others))
    assert f"time of one sample {best.objective:.6g}" in told
    assert "contiguous" not in told
