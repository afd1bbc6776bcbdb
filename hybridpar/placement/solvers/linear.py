"""DPL: the exact dynamic program on one linear order of the classes, whose ideals are its n + 1
prefixes.

Every device gets a contiguous part of the order, whose work without transfers is at most `limit`, a
guess of the largest load that is raised until some placement satisfies it. Then the parts that end
at one place form a window of w classes: time O(n w (k+1)(l+1)), where w is about n / k, memory O(n
(k+1)(l+1)).

Source: arXiv 2006.16423, section 5.1.2 (linearisation).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from hybridpar.errors import config_error
from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.solvers.bound import work_bound
from hybridpar.placement.workload import Floats, Ints

ORDERS = 20  # that are tried in addition to the first
GUESSES = (1.25, 2.0, 8.0)
"""Limits of the largest load, as multiples of its lower bound."""
MAX_TABLE = 1 << 28
"""Numbers in a table: 2 GiB."""


class Segments:
    """Loads of all segments [i, j) of the order that end at j, for growing j and for i from `first`
    on, which may grow."""

    def __init__(self, graph: ClassGraph, first: int = 0):
        self.graph = graph
        self.first = self.j = first
        n = graph.num_classes
        self._transfer, self._accelerator, self._cpu, self._size = (np.zeros(n) for _ in range(4))

    def extend(self) -> tuple[Floats, Floats]:
        """Advance the end by one class, and return the loads of an accelerator and of a CPU for i =
        first .. j - 1."""
        g = self.graph
        j = self.j
        first = self.first
        for e in g.nets_of[j]:
            net = g.nets[e]
            cost = g.net_cost[e]
            at = bisect_left(net, j)
            self._transfer[max(net[at - 1] + 1 if at else 0, first) : j + 1] += (
                cost  # segments that touch the net from now on
            )
            if at == len(net) - 1:
                # segments that now contain the complete net
                self._transfer[first : net[0] + 1] -= cost
        self.j = j + 1
        for total, values in (
            (self._accelerator, g.accelerator_time),
            (self._cpu, g.cpu_time),
            (self._size, g.size),
        ):
            total[first : j + 1] += values[j]
        combine = np.maximum if g.workload.objective == "overlapped" else np.add
        load = combine(self._accelerator[first : j + 1], self._transfer[first : j + 1])
        load[self._size[first : j + 1] > g.workload.room] = np.inf
        return load, self._cpu[first : j + 1]

    def narrow(self, limit: float) -> int:
        """Drop the segments whose work exceeds `limit` on any device, now and when they grow, and
        return their number."""
        here = slice(self.first, self.j)
        some = (self._accelerator[here] <= limit) & (self._size[here] <= self.graph.workload.room)
        if self.graph.workload.num_cpus:
            some |= self._cpu[here] <= limit
        left_out = int(some.argmax()) if some.any() else len(some)
        self.first += left_out
        return left_out


def solve_linear(graph: ClassGraph, deadline: float = np.inf) -> tuple[float, Ints]:
    """Return the best split of the order 0 .. n - 1: its largest load, and the device of each
    class.

    Devices: 0 .. k - 1 accelerators, k .. k + l - 1 CPUs. If nothing fits, the load is infinite and
    there are no devices.

    Raises:
        OutOfTime: `time.monotonic()` is past `deadline`.
        ConfigError: The table would be larger than `MAX_TABLE`.
    """
    for limit in _limits(graph):
        value, device = _solve_within(graph, limit, deadline)
        if value <= limit:
            return value, device
    return value, device


def _limits(graph: ClassGraph) -> Iterator[float]:
    least = work_bound(graph)
    if 0 < least < np.inf:
        yield from (factor * least for factor in GUESSES)
    yield np.inf


def _solve_within(graph: ClassGraph, limit: float, deadline: float) -> tuple[float, Ints]:
    """Solve like `solve_linear`, with segments whose work is at most `limit`."""
    k = graph.workload.num_accelerators
    num_cpus = graph.workload.num_cpus
    n = graph.num_classes
    if (n + 1) * (k + 1) * (num_cpus + 1) > MAX_TABLE:
        most = max(MAX_TABLE // ((n + 1) * (k + 1)) - 1, 0)
        raise config_error(
            "maxCPUs",
            num_cpus,
            f"the dynamic program's table for {n} classes, {k} accelerators and so "
            "many CPUs is too large",
            str(most),
        )
    best = np.full(
        (n + 1, k + 1, num_cpus + 1), np.inf
    )  # of a prefix, by largest numbers of accelerators and CPUs
    best[0] = 0.0
    segments = Segments(graph)
    first = [0]
    for j in range(1, n + 1):
        accelerator, cpu = segments.extend()
        left_out = segments.narrow(limit)
        first.append(segments.first)
        if segments.first == j:  # the last class alone is too much
            return np.inf, np.empty(0, np.int64)
        before = best[segments.first : j]
        accelerator = accelerator[left_out:]
        cpu = cpu[left_out:]
        best[j, 1:] = np.maximum(before[:, :-1], accelerator[:, None, None]).min(0)
        if num_cpus:
            on_cpu = np.maximum(before[..., :-1], cpu[:, None, None]).min(0)
            best[j, :, 1:] = np.minimum(best[j, :, 1:], on_cpu)
        for axis in (0, 1):
            best[j] = np.minimum.accumulate(best[j], axis)
        if time.monotonic() > deadline:
            raise OutOfTime
    if not np.isfinite(best[n, k, num_cpus]):
        return np.inf, np.empty(0, np.int64)
    return float(best[n, k, num_cpus]), _trace(graph, best, first)


def _trace(graph: ClassGraph, best: Floats, first: list[int]) -> Ints:
    device = np.empty(graph.num_classes, np.int64)
    j = graph.num_classes
    a = best.shape[1] - 1
    c = best.shape[2] - 1
    used_a = used_c = 0
    while j:
        segments = Segments(graph, first[j])
        while segments.j < j:
            accelerator, cpu = segments.extend()
        before = best[first[j] : j]
        on_accelerator = (
            np.maximum(before[:, a - 1, c], accelerator) if a else np.full(len(before), np.inf)
        )
        on_cpu = np.maximum(before[:, a, c - 1], cpu) if c else np.full(len(before), np.inf)
        if on_accelerator.min() <= on_cpu.min():
            i = first[j] + int(on_accelerator.argmin())
            device[i:j] = used_a
            a = a - 1
            used_a = used_a + 1
        else:
            i = first[j] + int(on_cpu.argmin())
            device[i:j] = graph.workload.num_accelerators + used_c
            c = c - 1
            used_c = used_c + 1
        j = i
    return device


def solve_orders(graph: ClassGraph, deadline: float, first: float) -> tuple[float, Ints, int]:
    """Return the best result of `solve_linear` over several orders until `deadline`
    (`time.monotonic()`), and the number of orders.

    Raises:
        OutOfTime: Not even one order was finished by `first`.
    """
    best, device = solve_linear(graph, first)
    generator = np.random.default_rng(0)
    for tried in range(1, ORDERS + 1):
        if time.monotonic() > deadline:
            return best, device, tried
        order = random_order(graph, generator)
        try:
            value, found = solve_linear(graph.reordered(order), deadline)
        except OutOfTime:
            return best, device, tried
        if value < best:
            best = value
            device = np.empty_like(found)
            device[order] = found
    return best, device, ORDERS + 1


def random_order(graph: ClassGraph, generator: np.random.Generator) -> list[int]:
    """Return a depth-first order with random choices."""
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
