"""Graphs for the tests: the paper's, where they are at hand, random ones, and what brute force
finds on these."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridpar.placement import Workload, is_contiguous, latency, make_workload, problems, score


def data_folder() -> Path:
    """`shared/data` beside the repository or above it; skips the test where there is none."""
    for parent in Path(__file__).resolve().parents:
        if (folder := parent / "shared" / "data").is_dir():
            return folder
    pytest.skip("the paper's graphs are not here")


def paper_graph(name: str) -> Path:
    found = list((data_folder() / "device_placement").glob(f"*/{name}.json"))
    if not found:
        pytest.skip(f"{name} is not here")
    return found[0]


def document(
    num_nodes: int,
    edges: list[tuple[int, int]],
    *,
    accelerator: list[float] | None = None,
    cost: list[float] | None = None,
    k: int = 2,
    num_cpus: int = 1,
    memory: float = 100.0,
    **node: list[Any],
) -> dict[str, Any]:
    """A workload's document: nodes 0, 1, .. of 1 each (10 on CPUs), transfers of 0 unless given."""
    accelerator = accelerator or [1.0] * num_nodes
    cost = cost or [0.0] * num_nodes
    nodes = []
    for v in range(num_nodes):
        entry = {
            "id": v,
            "supportedOnFpga": True,
            "cpuLatency": 10 * accelerator[v],
            "fpgaLatency": accelerator[v],
            "isBackwardNode": False,
            "size": 1.0,
        }
        nodes.append(entry | {key: values[v] for key, values in node.items()})
    return {
        "maxSizePerFPGA": memory,
        "maxFPGAs": k,
        "maxCPUs": num_cpus,
        "nodes": nodes,
        "edges": [{"sourceId": u, "destId": v, "cost": cost[u]} for u, v in edges],
    }


def random_document(
    generator: np.random.Generator, *, training: bool, most: int = 8
) -> dict[str, Any]:
    """2 to `most` nodes in all: shared colours, orphans, unsupported nodes, tight memory, no CPU,
    zero costs."""
    n = int(generator.integers(2, most + 1))
    forward = n if not training else max(1, n - int(generator.integers(1, n)))
    edges = [
        (u, v)
        for v in range(n)
        for u in range(v)
        if generator.random() < 0.4 and not (u >= forward > v)
    ]
    pick = lambda low, high: np.round(generator.uniform(low, high, n), 2)  # noqa: E731
    cheap = generator.random(n) < 0.25
    colours = generator.integers(0, max(1, int(forward * generator.uniform(0.7, 1.4))), n).tolist()
    if not training:
        colours = [c if generator.random() < 0.3 else 100 + v for v, c in enumerate(colours)]
    sizes = np.where(generator.random(n) < 0.2, 0.0, pick(0.5, 3))
    return document(
        n,
        edges,
        accelerator=np.where(cheap, 0.0, pick(0.2, 4)).tolist(),
        cost=np.where(generator.random(n) < 0.3, 0.0, pick(0, 1.5)).tolist(),
        k=int(generator.integers(1, 4)),
        num_cpus=int(generator.integers(0, 3)),
        memory=float(generator.choice([4.0, 7.0, 100.0])),
        cpuLatency=np.where(cheap & (generator.random(n) < 0.7), 0.0, pick(0.2, 9)).tolist(),
        supportedOnFpga=(generator.random(n) < 0.92).tolist(),
        isBackwardNode=[v >= forward for v in range(n)],
        colorClass=colours,
        size=sizes.tolist(),
    )


def random_workload(seed: int, *, training: bool, most: int = 8) -> Workload:
    return make_workload(random_document(np.random.default_rng(seed), training=training, most=most))


def branched_inference(seed: int, num_nodes: int) -> Workload:
    """A chain, chains beside parts of it, and edges over others; tight memory, shared colours, or
    no CPU."""
    generator = np.random.default_rng(seed)
    chain = int(generator.integers(3, num_nodes))
    edges = {(v, v + 1) for v in range(chain - 1)}
    made = chain
    while made < num_nodes:
        start = int(generator.integers(chain - 1))
        more = int(generator.integers(1, num_nodes - made + 1))
        edges |= set(
            itertools.pairwise(
                [start, *range(made, made + more), int(generator.integers(start + 1, chain))]
            )
        )
        made += more
    edges |= {
        (u, v)
        for u, v in generator.integers(0, chain, (int(generator.integers(3)), 2)).tolist()
        if u < v
    }
    pick = lambda low, high: np.round(generator.uniform(low, high, num_nodes), 2)  # noqa: E731
    colours = [
        int(generator.integers(3)) if generator.random() < 0.25 else 100 + v
        for v in range(num_nodes)
    ]
    return make_workload(
        document(
            num_nodes,
            sorted(edges),
            accelerator=pick(0.1, 2).tolist(),
            cost=np.maximum(pick(-0.7, 3), 0).tolist(),
            num_cpus=int(generator.integers(3)),
            memory=float(generator.choice([3.0, 5.0, 8.0])),
            cpuLatency=pick(0.2, 12).tolist(),
            supportedOnFpga=(generator.random(num_nodes) < 0.95).tolist(),
            size=pick(0, 2).tolist(),
            colorClass=colours,
        )
    )


def layered_training(
    num_layers: int, branches: int, per_layer: int, seed: int = 0, **devices: Any
) -> Workload:
    """An operator graph with its backward nodes: layers of parallel branches that meet, as in
    attention."""
    generator = np.random.default_rng(seed)
    edges = []
    forward = 0
    last = -1
    for _ in range(num_layers):
        ends = []
        for _ in range(branches):
            for i in range(per_layer):
                edges += [(forward - 1, forward)] if i else [(last, forward)] * (last >= 0)
                forward += 1
            ends.append(forward - 1)
        edges += [(end, forward) for end in ends] + ([(last, forward)] if last >= 0 else [])
        last = forward
        forward = forward + 1
    mirrored = [(2 * forward - 1 - v, 2 * forward - 1 - u) for u, v in edges]
    across = [(v, 2 * forward - 1 - v) for v in range(forward)]
    n = 2 * forward
    half = generator.uniform(0.1, 2, forward).round(3)
    cost = generator.uniform(0.01, 0.3, n).round(3).tolist()
    return make_workload(
        document(
            n,
            [*edges, *mirrored, *across],
            accelerator=[*half, *(2 * half[::-1])],
            cost=cost,
            isBackwardNode=[v >= forward for v in range(n)],
            colorClass=[min(v, n - 1 - v) for v in range(n)],
            **({"k": 6, "memory": 1e9} | devices),
        )
    )


# -- brute force


def colours_of(w: Workload) -> np.ndarray:
    return np.unique(w.colour, return_inverse=True)[1]


def assignments(w: Workload, devices: int) -> list[np.ndarray]:
    """Every choice of a device for each colour class, as devices of nodes."""
    colour = colours_of(w)
    return [
        np.array(choice)[colour]
        for choice in itertools.product(range(devices), repeat=int(colour.max()) + 1)
    ]


def best_pipeline(w: Workload) -> float:
    """The least largest load over devices in a row, any order of the kinds: forward edges lead
    onwards, and backward edges of classes without forward nodes back.
    """
    k = w.num_accelerators
    total = w.num_accelerators + w.num_cpus
    colour = colours_of(w)
    has_forward = np.bincount(colour, ~w.backward) > 0
    edges = []
    for u, v in w.edges.tolist():
        if not w.backward[u] and not w.backward[v]:
            edges.append((u, v))
        elif (
            w.backward[u]
            and w.backward[v]
            and not (has_forward[colour[u]] and has_forward[colour[v]])
        ):
            edges.append((v, u))
    best = np.inf
    places = [x for x in assignments(w, total) if all(x[u] <= x[v] for u, v in edges)]
    for cpus in itertools.combinations(range(total), w.num_cpus):
        names = np.empty(total, np.int64)
        accelerators = iter(range(k))
        others = iter(range(k, total))
        for position in range(total):
            names[position] = next(others) if position in cpus else next(accelerators)
        for place in places:
            if not problems(w, names[place]):
                best = min(best, score(w, names[place]).objective)
    return best


def best_placement(w: Workload, contiguous: bool) -> float:
    """The least largest load over all valid placements."""
    best = np.inf
    for devices in assignments(w, w.num_accelerators + w.num_cpus):
        if not problems(w, devices) and (not contiguous or is_contiguous(w, devices)):
            best = min(best, score(w, devices).objective)
    return best


def best_latency(w: Workload, slots: int) -> float:
    """The least time of one sample over all placements whose calls are contiguous."""
    k = w.num_accelerators
    best = np.inf
    options = [(d, s) for d in range(k) for s in range(slots)] + [(k, 0)] * (w.num_cpus > 0)
    for choice in itertools.product(options, repeat=w.num_nodes):
        if [*(used := dict.fromkeys(d for d, _ in choice if d < k))] != [*range(len(used))]:
            continue  # accelerators are equal
        devices, slot = (np.array(x) for x in zip(*choice, strict=True))
        if problems(w, devices):
            continue
        call = np.where(devices == k, -1 - np.arange(w.num_nodes), devices * slots + slot)
        if _leaves_and_returns(w, call):
            continue
        best = min(best, latency(w, devices, slot))
    return best


def _leaves_and_returns(w: Workload, call: np.ndarray) -> bool:
    reach = np.zeros((w.num_nodes, w.num_nodes), bool)
    for u, v in w.edges.tolist():
        reach[u, v] = True
    for middle in range(w.num_nodes):
        reach |= reach[:, middle, None] & reach[None, middle]
    return any(
        call[u] == call[v] and call[u] != call[x] and reach[u, x] and reach[x, v]
        for u, x, v in itertools.permutations(range(w.num_nodes), 3)
    )
