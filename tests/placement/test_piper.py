"""Piper: known answers, brute force on small chains, and instances that cannot be."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from hybridpar.errors import ConfigError
from hybridpar.placement.piper import (
    Allowed,
    Instance,
    LayerGroup,
    make_instance,
    plan_equal_stages,
    plan_stages,
    read_instance,
    score_stages,
    stage_search,
)

from .graphs import data_folder

GIB = 2**30
# devices, GiB: seconds a micro-batch; None: nothing fits. The benchmark has the other rows of the
# table
KNOWN = {
    (8, 8): {"piper": 0.165856, "equi": 0.230978, "noAR": 0.259752},
    (8, 80): {"piper": 0.122007, "equi": 0.122007, "noDP": 0.164516},
    (16, 8): {"equi": 0.102604, "noDP": 0.100427},
    (32, 2): {"piper": 0.066550, "equi": None, "noDP": 0.073906, "noTP": None, "noAR": None},
    (32, 8): {"equi": 0.051351},
    (32, 80): {"piper": 0.030844},
}
PLANNERS = {
    "piper": plan_stages,
    "equi": plan_equal_stages,
    "noDP": lambda x: plan_stages(x, Allowed(data=False)),
    "noTP": lambda x: plan_stages(x, Allowed(tensor=False)),
    "noAR": lambda x: plan_stages(x, Allowed(recompute=False)),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("devices", KNOWN, ids=str)
def test_known_answers(devices: tuple[int, int]) -> None:
    path = data_folder() / "piper" / "bert32a100.json"
    instance = read_instance(path).with_devices(
        num_devices=devices[0], memory=devices[1] * GIB, bandwidth=25 * GIB, num_microbatches=1920
    )
    for name, expected in KNOWN[devices].items():
        plan = PLANNERS[name](instance)
        assert plan.fits == (expected is not None), name
        if expected is not None:
            assert round(plan.time, 6) == expected, name
        if (devices, name) == ((32, 2), "piper"):
            assert any(stage.tensor == 2 for stage in plan.stages)


def small(
    num_layers: int = 4, seed: int = 0, memory: float = 40.0, devices: int = 4, branch: bool = False
) -> dict[str, Any]:
    """Layers in a row, each with tensor degrees 1 and 2, plain and recomputed."""
    generator = np.random.default_rng(seed)
    edges = [(v, v + 1) for v in range(num_layers - 1)] + ([(0, num_layers - 1)] if branch else [])
    nodes = []
    for v in range(num_layers):
        time = float(generator.uniform(1, 3))
        ways = {}
        for t in (1, 2):
            ways[str(t)] = [
                {
                    "id": name,
                    "timePerSample": time / t * slow,
                    "parameterSize": 6.0 / t,
                    "memoryUsageA": lean / t,
                    "memoryUsageB": 2.0 / t,
                    "syncTimeFw": {str(a): (t - 1) * 0.5 for a, b in edges if b == v},
                    "syncTimeBw": {str(b): (t - 1) * 0.25 for a, b in edges if a == v},
                }
                for name, slow, lean in (("vanilla", 1.0, 6.0), ("activation recomp", 1.3, 1.0))
            ]
        nodes.append({"id": v, "name": "layer", "TMPCs": ways})
    return {
        "maxMemoryPerDevice": memory,
        "maxDevices": devices,
        "mbsInBatch": 4,
        "bandwidth": 10.0,
        "nodes": nodes,
        "edges": [{"sourceId": u, "destId": v, "communicationCost": 1.0} for u, v in edges],
    }


def all_plans(instance: Instance) -> float:
    """The best time over all ways to cut the layers, which lie in a row."""
    n = instance.num_layers
    best = math.inf
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, n), i) for i in range(n)
    ):
        parts = list(itertools.pairwise([0, *cuts, n]))
        for degrees in itertools.product(
            [(d, t) for d in (1, 2, 4) for t in (1, 2)], repeat=len(parts)
        ):
            for names in itertools.product(("vanilla", "activation recomp"), repeat=n):
                score = score_stages(
                    instance,
                    [
                        LayerGroup({v: names[v] for v in range(a, b)}, d, t)
                        for (a, b), (d, t) in zip(parts, degrees, strict=True)
                    ],
                )
                if not score.problems:
                    best = min(best, score.time)
    return best


@pytest.mark.parametrize(
    ("seed", "memory", "devices"),
    [(0, 100.0, 4), (1, 12.0, 4), (2, 9.0, 3), (3, 6.0, 4), (4, 2.0, 3)],
)
def test_brute_force(seed: int, memory: float, devices: int) -> None:
    """One layer's worth of memory is what the knapsack may miss; these are met exactly."""
    instance = make_instance(small(3, seed, memory, devices))
    assert plan_stages(instance).time == pytest.approx(all_plans(instance), rel=1e-12)


@pytest.mark.parametrize("branch", [False, True])
def test_plans_keep_the_rules_and_ablations_are_no_better(branch: bool) -> None:
    for memory in (6.0, 15.0, 100.0):
        instance = make_instance(small(6, 1, memory, 5, branch))
        times = {name: planner(instance).time for name, planner in PLANNERS.items()}
        assert times["piper"] == min(times.values())
        assert math.isfinite(times["piper"])
        plan = plan_stages(instance)
        assert not score_stages(instance, plan.stages).problems
        assert "micro-batch" in str(plan)


def test_a_stage_by_hand() -> None:
    """Two stages of two layers: times, the edge between them twice, two micro-batches in flight
    first."""
    instance = make_instance(small(4))
    score = score_stages(
        instance, [LayerGroup(dict.fromkeys(part, "vanilla"), 1, 1) for part in ((0, 1), (2, 3))]
    )
    compute = [sum(instance.ways[v][1][0].time for v in part) for part in ((0, 1), (2, 3))]
    assert score.times == pytest.approx([x + 2 * 1.0 / 10 for x in compute])
    assert score.memory == (2 * (6 * 2 + 2), 2 * (6 + 2))
    assert score.in_flight == (2, 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([LayerGroup({0: "vanilla", 1: "vanilla"}, 1, 1)], "is in no stage"),
        (
            [LayerGroup({2: "vanilla"}, 1, 1), LayerGroup({0: "vanilla", 1: "vanilla"}, 1, 1)],
            "leads to an earlier stage",
        ),
        ([LayerGroup({0: "vanilla", 1: "vanilla", 2: "none"}, 1, 1)], "is none at tensor 1"),
        ([LayerGroup(dict.fromkeys(range(3), "vanilla"), 3, 1)], "must divide 4"),
        ([LayerGroup(dict.fromkeys(range(3), "vanilla"), 4, 2)], "are more than 4"),
    ],
)
def test_broken_rules_are_named(stages: list[LayerGroup], message: str) -> None:
    score = score_stages(make_instance(small(3)), stages)
    assert any(message in str(problem) for problem in score.problems)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("maxDevices",), 0, "maxDevices = 0"),
        (("bandwidth",), 0.0, "bandwidth = 0.0: must be above 0"),
        (("mbsInBatch",), None, "mbsInBatch = None"),
        (("nodes", 0, "TMPCs"), {}, r"nodes\[0\].TMPCs = \{\}: must hold a way"),
        (("nodes", 0, "TMPCs"), {"two": []}, "the degree of tensor parallelism"),
        (("nodes", 0, "TMPCs", "1", 0, "timePerSample"), float("nan"), r"timePerSample = nan"),
        (("nodes", 0, "TMPCs", "1", 0, "id"), "activation recomp", "must be a name that no other"),
        (("nodes", 0, "TMPCs", "1", 0, "syncTimeBw"), {}, r"syncTimeBw.1 = None"),
        (("nodes", 0, "TMPCs", "1", 0, "syncTimeFw"), {"2": 1.0}, "there is no edge"),
        (("nodes", 1, "id"), 0, "is the id of"),
        (("edges", 0, "destId"), 7, "must be the id of a node"),
        (("edges", 0, "destId"), 0, "is a cycle"),
        (("edges", 1), {"sourceId": 0, "destId": 1, "communicationCost": 1.0}, "is there twice"),
    ],
)
def test_bad_instances(path: tuple, value: object, message: str) -> None:
    bad = copy.deepcopy(small(3))
    target: Any = bad
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        make_instance(bad)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_downsets": 3}, "more than 3 downsets: this is the best of one order of the layers"),
        ({"time_limit": 1e-9}, "the time limit was reached: this is the best of equal stages"),
    ],
)
def test_unsearched_parts_are_said(options: dict[str, Any], reason: str) -> None:
    instance = make_instance(small(6, 1, 15.0, 5, branch=True))
    best = plan_stages(instance)
    plan = plan_stages(instance, **options)
    assert not best.note
    assert plan.note == reason
    assert f"{reason}, at most" in str(plan)
    assert 0 < plan.bound <= best.time <= plan.time <= plan_equal_stages(instance).time
    nowhere = plan_stages(instance.with_devices(memory=1.0), **options)
    assert "nothing was found in time that fits 5 devices" in str(nowhere)


def test_the_first_plan_within_no_limit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits on what a stage may take grow from run to run; a plan above the limit says nothing
    of the best."""
    sizes = (4, 3, 8.0, 4), (6, 3, 9.0, 8), (6, 7, 8.0, 8)
    instances = [make_instance(small(*some, branch=True)) for some in sizes]
    found = [plan_stages(instance).time for instance in instances]
    monkeypatch.setattr(stage_search, "FIRST_LIMIT", 1e6)
    assert found == pytest.approx([plan_stages(instance).time for instance in instances], rel=1e-12)


def add_nothing(
    line: dict[str, Any], layers: Iterable[int], edges: Iterable[tuple[int, int]]
) -> None:
    """Adds layers and edges that cost nothing."""
    nothing = dict.fromkeys(("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB"), 0.0)
    line["nodes"] += [
        {"id": v, "TMPCs": {t: [{"id": "vanilla"} | nothing] for t in "12"}} for v in layers
    ]
    line["edges"] += [{"sourceId": u, "destId": v, "communicationCost": 0.0} for u, v in edges]
    for node in line["nodes"]:
        for way in itertools.chain(*node["TMPCs"].values()):
            for key, own, end in (
                ("syncTimeFw", "destId", "sourceId"),
                ("syncTimeBw", "sourceId", "destId"),
            ):
                others = [str(edge[end]) for edge in line["edges"] if edge[own] == node["id"]]
                way[key] = {other: way.get(key, {}).get(other, 0.0) for other in others}


@pytest.mark.parametrize(
    ("seed", "memory", "devices"), [(0, 100.0, 4), (1, 12.0, 4), (2, 9.0, 3), (4, 2.0, 3)]
)
def test_free_layers_are_left_out(seed: int, memory: float, devices: int) -> None:
    """One leads to all of a line, another takes the place of an edge that costs nothing: the same
    plans, and as many downsets as there are of the line."""
    line = small(3, seed, memory, devices)
    line["edges"][0]["communicationCost"] = 0.0
    for v, key, other in ((0, "syncTimeBw", "1"), (1, "syncTimeFw", "0")):
        for way in itertools.chain(*line["nodes"][v]["TMPCs"].values()):
            way[key][other] = 0.0
    best = all_plans(make_instance(line))

    line["edges"][0]["destId"] = 3
    add_nothing(line, (3, 4), [(3, 1), *((4, v) for v in range(3))])
    plan = plan_stages(make_instance(line))
    assert plan.time == pytest.approx(best, rel=1e-12)
    assert plan.stats["downsets"] == 4


@pytest.mark.parametrize(
    ("edge", "sync"), [((2, 3), 0.0), ((3, 0), 1.0)], ids=["leads nowhere", "synchronized"]
)
def test_layers_that_are_not_free_stay(edge: tuple[int, int], sync: float) -> None:
    line = small(3)
    add_nothing(line, (3,), [edge])
    for way in itertools.chain(*line["nodes"][3]["TMPCs"].values()):
        way["syncTimeBw"] = dict.fromkeys(way["syncTimeBw"], sync)
    plan = plan_stages(make_instance(line))
    assert plan.stats["downsets"] == 5
    assert sorted(v for stage in plan.stages for v in stage.ways) == [0, 1, 2, 3]


def test_one_order_is_enough_for_a_line() -> None:
    instance = make_instance(small(5, 2, 9.0, 4))
    assert plan_stages(instance, max_downsets=3).time == plan_stages(instance).time
