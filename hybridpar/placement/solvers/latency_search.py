"""Placements of low latency without integer programming: packed in order, split along orders, then
improved.

All of them run each accelerator once (one slot). `scoring.latency` defines the latency.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.scoring import latency, problems
from hybridpar.placement.solvers.baselines import greedy
from hybridpar.placement.solvers.linear import ORDERS, Segments, random_order
from hybridpar.placement.workload import Ints

GAIN = 1e-9


def simple_placements(graph: ClassGraph, deadline: float) -> list[Ints]:
    """Return the simple placements that fit, as a device for each node: greedy packing, a split
    along the order (if in time), everything on CPUs."""
    w = graph.workload
    found = [greedy(graph, np.inf)]
    with suppress(OutOfTime):
        found.append(_split(graph, deadline))
    if w.num_cpus:
        found.append(np.full(graph.num_classes, w.num_accelerators))
    return [x for x in (graph.devices(y) for y in found if y is not None) if not problems(w, x)]


def searched_placements(
    graph: ClassGraph, colours: ClassGraph, known: list[Ints], deadline: float
) -> list[Ints]:
    """Return the best split along several orders, improved until `deadline` (`time.monotonic()`) or
    a local optimum.

    Args:
        graph: The classes of a pipeline.
        colours: The classes that must share a device in any placement.
        known: Known placements.
        deadline: Time limit.
    """
    w = graph.workload
    found = list(known)
    generator = np.random.default_rng(0)
    with suppress(OutOfTime):
        for _ in range(ORDERS):
            other = graph.reordered(random_order(graph, generator))
            if (split := _split(other, deadline)) is not None and not problems(
                w, other.devices(split)
            ):
                found.append(other.devices(split))
    if not found:
        return []
    zeros = np.zeros(w.num_nodes, np.int64)
    best = min(found, key=lambda x: latency(w, x, zeros))
    return [_improved(colours, best, deadline)]


def _improved(graph: ClassGraph, devices: Ints, deadline: float) -> Ints:
    """Move single classes to the devices of their neighbours, or to the CPUs, while that helps."""
    w = graph.workload
    zeros = np.zeros(w.num_nodes, np.int64)
    best = devices.copy()
    value = latency(w, devices, zeros)
    members = [np.flatnonzero(graph.class_of == c) for c in range(graph.num_classes)]
    improved = True
    while improved:
        improved = False
        for c, target in _moves(graph, best):
            if time.monotonic() > deadline:
                return best
            changed = best.copy()
            changed[members[c]] = target
            used = w.size[changed == target].sum()
            if target < w.num_accelerators and used > w.room:
                continue
            if (found := latency(w, changed, zeros)) < value * (1 - GAIN):
                best = changed
                value = found
                improved = True
    return best


def _moves(graph: ClassGraph, devices: Ints) -> Iterator[tuple[int, int]]:
    """Yield (class, device) of moves that may help, from a placement that may change between
    yields."""
    w = graph.workload
    at = graph.of_classes(devices)
    for c in range(graph.num_classes):
        near = {int(at[x]) for x in (*graph.predecessors[c], *graph.successors[c])}
        if w.num_cpus:
            near.add(w.num_accelerators)
        if unused := set(range(w.num_accelerators)).difference(at.tolist()):
            near.add(min(unused))
        for target in sorted(near - {int(at[c])}):
            if target >= w.num_accelerators or np.isfinite(graph.accelerator_time[c]):
                yield c, target


def _split(graph: ClassGraph, deadline: float) -> Ints | None:
    """Return the split of the order with the least sum of loads, or None if nothing fits.

    Raises:
        OutOfTime: `time.monotonic()` is past `deadline`.
    """
    w = graph.workload
    n = graph.num_classes
    k = graph.workload.num_accelerators
    best = np.full((n + 1, k + 1), np.inf)  # of a prefix, by largest number of accelerators
    best[0] = 0.0
    came = np.zeros(
        (n + 1, k + 1), np.int64
    )  # start of the last accelerator's part; -1: the last class is on a CPU
    segments = Segments(graph)
    for j in range(1, n + 1):
        accelerator, _ = segments.extend()
        total = best[:j, :-1] + accelerator[:, None]
        came[j, 1:] = total.argmin(0)
        best[j, 1:] = total.min(0)
        on_cpu = best[j - 1] + (graph.cpu_time[j - 1] if w.num_cpus else np.inf)
        came[j] = np.where(on_cpu < best[j], -1, came[j])
        best[j] = np.minimum(best[j], on_cpu)
        for a in range(1, k + 1):
            if best[j, a - 1] <= best[j, a]:
                best[j, a] = best[j, a - 1]
                came[j, a] = came[j, a - 1]
        if time.monotonic() > deadline:
            raise OutOfTime
    if not np.isfinite(best[n, k]):
        return None
    device = np.full(n, k, np.int64)
    j = n
    a = k
    used = 0
    while j:
        while a and best[j, a - 1] == best[j, a]:
            a -= 1
        i = int(came[j, a])
        if i < 0:
            j -= 1
            continue
        device[i:j] = used
        j = i
        a = a - 1
        used = used + 1
    return device
