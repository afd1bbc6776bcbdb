"""DPL: the exact dynamic program on one order of the classes, whose ideals are its n + 1 prefixes.

Every device gets a contiguous part of the order. Time O(n^2 (k+1)(l+1)), memory O(n (k+1)(l+1)).

Source: arXiv 2006.16423, section 5.1.2 (linearisation).
"""

from __future__ import annotations

import time

import numpy as np

from hybridpar.planner.placement.classes import ClassGraph
from hybridpar.planner.placement.workload import Floats, Ints

ORDERS = 20  # that are tried besides the first


class Segments:
    """Loads of all segments [i, j) of the order that end at j, for growing j."""

    def __init__(self, graph: ClassGraph):
        self.graph = graph
        self.j = 0
        n = graph.num_classes
        self._transfer, self._accelerator, self._cpu, self._size = (np.zeros(n) for _ in range(4))

    def extend(self) -> tuple[Floats, Floats]:
        """Ends one class later. Returns the loads of an accelerator and of a CPU, by i = 0 .. j - 1."""
        g, j = self.graph, self.j
        for e in g.nets_of[j]:
            net, cost = g.nets[e], g.net_cost[e]
            at = net.index(j)
            self._transfer[net[at - 1] + 1 if at else 0:j + 1] += cost  # segments that touch it from now on
            if at == len(net) - 1:
                self._transfer[:net[0] + 1] -= cost  # segments that now hold all of it
        self.j = j + 1
        for total, values in ((self._accelerator, g.accelerator_time), (self._cpu, g.cpu_time), (self._size, g.size)):
            total[:j + 1] += values[j]
        load = self._accelerator[:j + 1] + self._transfer[:j + 1]
        load[self._size[:j + 1] > g.workload.room] = np.inf
        return load, self._cpu[:j + 1]


def solve_linear(graph: ClassGraph) -> tuple[float, Ints]:
    """The best split of the order 0 .. n - 1: its largest load, and the device of each class.

    Devices: 0 .. k - 1 accelerators, k .. k + l - 1 CPUs. Infinite, and no devices, if nothing fits.
    """
    k, num_cpus = graph.workload.num_accelerators, graph.workload.num_cpus
    n = graph.num_classes
    best = np.full((n + 1, k + 1, num_cpus + 1), np.inf)  # of a prefix, by how many accelerators and CPUs it may use
    best[0] = 0.0
    segments = Segments(graph)
    for j in range(1, n + 1):
        accelerator, cpu = segments.extend()
        best[j, 1:] = np.maximum(best[:j, :-1], accelerator[:, None, None]).min(0)
        if num_cpus:
            on_cpu = np.maximum(best[:j, :, :-1], cpu[:, None, None]).min(0)
            best[j, :, 1:] = np.minimum(best[j, :, 1:], on_cpu)
        for axis in (0, 1):
            best[j] = np.minimum.accumulate(best[j], axis)
    if not np.isfinite(best[n, k, num_cpus]):
        return np.inf, np.empty(0, np.int64)
    return float(best[n, k, num_cpus]), _trace(graph, best)


def _trace(graph: ClassGraph, best: Floats) -> Ints:
    device = np.empty(graph.num_classes, np.int64)
    j, a, c = graph.num_classes, best.shape[1] - 1, best.shape[2] - 1
    used_a = used_c = 0
    while j:
        segments = Segments(graph)
        while segments.j < j:
            accelerator, cpu = segments.extend()
        on_accelerator = np.maximum(best[:j, a - 1, c], accelerator) if a else np.full(j, np.inf)
        on_cpu = np.maximum(best[:j, a, c - 1], cpu) if c else np.full(j, np.inf)
        if on_accelerator.min() <= on_cpu.min():
            i = int(on_accelerator.argmin())
            device[i:j] = used_a
            a, used_a = a - 1, used_a + 1
        else:
            i = int(on_cpu.argmin())
            device[i:j] = graph.workload.num_accelerators + used_c
            c, used_c = c - 1, used_c + 1
        j = i
    return device


def solve_orders(graph: ClassGraph, deadline: float) -> tuple[float, Ints, int]:
    """As `solve_linear`, the best of several orders, until `deadline` (`time.monotonic()`); and how many they were."""
    best, device = solve_linear(graph)
    generator = np.random.default_rng(0)
    for tried in range(1, ORDERS + 1):
        if time.monotonic() > deadline:
            return best, device, tried
        order = random_order(graph, generator)
        value, found = solve_linear(graph.reordered(order))
        if value < best:
            best, device = value, np.empty_like(found)
            device[order] = found
    return best, device, ORDERS + 1


def random_order(graph: ClassGraph, generator: np.random.Generator) -> list[int]:
    """Depth first, with random choices."""
    missing = [len(x) for x in graph.predecessors]
    ready = [c for c in range(graph.num_classes) if not missing[c]]
    generator.shuffle(ready)
    order = []
    while ready:
        c = ready.pop()
        order.append(c)
        freed = []
        for after in graph.successors[c]:
            missing[after] -= 1
            if not missing[after]:
                freed.append(after)
        generator.shuffle(freed)
        ready += freed
    return order
