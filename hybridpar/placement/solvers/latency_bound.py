"""Lower bounds on the latency of any placement: the time of a path, uncut or cut into
accelerator calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.workload import Floats, Ints, Workload, order_of

PRICES = 64
"""Number of prices per byte to try."""
MOST_CALLS = 64
"""Largest number of calls that is counted; above it, any number of calls is allowed."""
Order = list[tuple[int, list[int]]]
"""Nodes with their inputs, each after its inputs."""


def path_bound(colours: ClassGraph, deadline: float) -> float:
    """Return the time of the longest path, with every node on its fastest device and without
    transfers.

    If accelerators cannot hold everything, nodes pay a price for each byte there, and the price of
    the total memory is subtracted (a Lagrangian relaxation). Each price gives a bound; the best one
    found until `deadline` counts.
    """
    w = colours.workload
    runs = np.isfinite(colours.accelerator_time)[
        colours.class_of
    ]  # a node and everything that must be with it fit on an accelerator
    accelerator = np.where(runs, w.accelerator_time, np.inf)
    cpu = w.cpu_time if w.num_cpus else np.full(w.num_nodes, np.inf)
    order = in_order(w)
    room = w.num_accelerators * w.room
    prices = np.zeros(1)
    if w.num_cpus and w.size.sum() > room:
        worth = (cpu - accelerator)[runs & (w.size > 0)] / w.size[runs & (w.size > 0)]
        prices = np.unique(
            np.quantile(np.append(np.maximum(worth, 0.0), 0.0), np.linspace(0, 1, PRICES))
        )
    bound = 0.0
    for price in prices:
        longest = heaviest(np.minimum(accelerator + price * w.size, cpu), order)[0]
        bound = max(bound, longest - price * room)
        if time.monotonic() > deadline:
            break
    return bound


def cut_bound(colours: ClassGraph, slots: int, deadline: float) -> float:
    """Return the least time of a path whose nodes run on CPUs or in accelerator calls: the best
    bound of three paths.

    A path cannot return to a call, because the call would wait for itself. So a call holds one
    contiguous part of the path and everything between its ends, and a node that depends on the call
    waits for all its computations and transfers. A call must fit on an accelerator, and each
    accelerator has at most `slots` calls. Returns 0 if there is no time.

    Args:
        colours: Classes of nodes that must share a device.
        slots: Calls of each accelerator.
        deadline: Time limit (monotonic).
    """
    w = colours.workload
    order = in_order(w)
    compute, size = (
        x / (x.sum() or 1.0)
        for x in (np.where(w.supported, w.accelerator_time, w.cpu_time), w.size)
    )
    paths = {tuple(heaviest(x, order)[1]) for x in (compute, size, compute + size)}
    return max(
        _CutPath(colours, slots, np.array(path), order).least(deadline) for path in sorted(paths)
    )


@dataclass(eq=False)
class _CutPath:
    """A path of L nodes, and the time of a call that holds a part of it.

    The rest of the path is outside the call, and so are the nodes that lead to it before the part
    or follow from it after the part. Outputs that cross between inside and outside may have to be
    moved.
    """

    colours: ClassGraph
    slots: int
    path: Ints
    order: Order

    @cached_property
    def reach(self) -> tuple[Ints, Ints]:
        return reach(self.path, self.order, self.colours.workload.num_nodes)

    @cached_property
    def read_at(self) -> Ints:
        """Array [n]: the largest end of a part that is known to have a reader of the node after
        it."""
        source, to = self.colours.workload.edges.T
        return _extreme(np.maximum, source, self.reach[0][to], self.colours.workload.num_nodes, -1)

    @cached_property
    def detours(self) -> list[tuple[int, int, Ints, float]]:
        """Detours around parts of the path that share no node or start: start, end, nodes between,
        and the least time that moves an output on the way. The output is moved only if exactly one
        of the ends is in a call."""
        w = self.colours.workload
        of = self.colours.class_of
        before = dict(self.order)
        position = {v: i for i, v in enumerate(self.path.tolist())}
        taken = set(position)
        found = {}
        for v in reversed(self.path.tolist()):
            for u in before[v]:
                way = [v]
                while u not in taken and before[u]:
                    way.append(u)
                    u = max(before[u], key=self.reach[0].__getitem__)
                if len(way) > 1 and u in position and position[u] not in found:
                    taken.update(way)
                    to = np.array(way)
                    source = np.array([*way[1:], u])
                    apart = source[
                        (of[source] != of[to]) | (self.slots > 1)
                    ]  # in one call, because the class is
                    if len(apart):
                        found[position[u]] = (
                            position[v],
                            source[:-1],
                            float(w.transfer_time[apart].min()),
                        )
        return [(a, *rest) for a, rest in found.items()]

    def calls_from(self, i: int) -> Floats:
        """Return [L + 1], the time of a call that holds the path from i on, by its end; infinite if
        impossible."""
        w = self.colours.workload
        of = self.colours.class_of
        length = len(self.path)
        never = len(self.path) + 1
        last, first = self.reach
        source, to = w.edges.T
        enters = np.where(
            (last >= i) & (first < length), first + 1, never
        )  # the first end with the node in the call
        classes = _extreme(np.minimum, of, enters, self.colours.num_classes, never)
        size = self._sums(classes, np.bincount(of, np.where(w.supported, w.size, np.inf)))
        apart = np.zeros(length + 1)
        if self.slots == 1:  # a class is in one call, so none of it may be before or after the call
            enters = classes[of]
            until = np.where(first < i, length, last)
            apart = self._sums(enters, np.ones_like(of), np.maximum(until + 1, enters))
        took = self._sums(enters, np.where(w.supported, w.accelerator_time, 0.0))
        took += self._sums(enters, w.transfer_time, np.maximum(self.read_at + 1, enters))
        known = (first[source] < i) & (enters[to] < never)
        comes = _extreme(np.minimum, source[known], enters[to[known]], w.num_nodes, never)
        took += self._sums(comes, w.transfer_time)
        for a, b, between, moved in self.detours:
            u = self.path[a]
            if i <= a:
                took[max(a, self.read_at[u]) + 1 : min(b + 1, enters[between].min())] += moved
            elif i <= b and first[between].min() >= i:
                took[b + 1 : comes[u]] += moved
        took[(size > w.room) | (apart > 0)] = np.inf
        return took

    def _sums(self, at: Ints, by: Floats | Ints, until: Ints | None = None) -> Floats:
        """Return [L + 1] running sums of `by`, each counted from its position `at` to `until`."""
        room = len(self.path) + 2
        added = np.bincount(at, by, room)
        return np.cumsum(added if until is None else added - np.bincount(until, by, room))[
            : room - 1
        ]

    def least(self, deadline: float) -> float:
        """Return the least time of the path, or 0 if it is not found by the deadline."""
        w = self.colours.workload
        length = len(self.path)
        calls = self.colours.workload.num_accelerators * self.slots
        counted = calls <= MOST_CALLS
        best = np.full(
            (calls + 1 if counted else 1, length + 1), np.inf
        )  # of the path up to there, by number of calls
        best[0, 0] = 0.0
        for i, v in enumerate(self.path.tolist()):
            if time.monotonic() > deadline:
                return 0.0
            if w.num_cpus:
                best[:, i + 1] = np.minimum(best[:, i + 1], best[:, i] + w.cpu_time[v])
            one_more = best[1:, i + 1 :] if counted else best[:, i + 1 :]
            np.minimum(
                one_more, best[: len(one_more), i, None] + self.calls_from(i)[i + 1 :], out=one_more
            )
        return float(best[:, -1].min())


def _extreme(which: np.ufunc, at: Ints, of: Ints, number: int, start: int) -> Ints:
    """Return [number], the minimum or maximum at each index, or `start`."""
    found = np.full(number, start)
    which.at(found, at, of)
    return found


def reach(path: Ints, order: Order, n: int) -> tuple[Ints, Ints]:
    """Return [n] the last position on the path that leads to each node, or -1; and the first
    position that each node leads to, or L."""
    last = np.full(n, -1)
    first = np.full(n, len(path))
    last[path] = first[path] = np.arange(len(path))
    for v, before in order:
        last[v] = max([last[v], *last[before]])
    for v, before in reversed(order):
        first[before] = np.minimum(first[before], first[v])
    return last, first


def heaviest(weights: Floats, order: Order) -> tuple[float, list[int]]:
    """Return the largest sum along a path, and the path."""
    done = weights.tolist()
    came = [-1] * len(weights)
    for v, before in order:
        if before:
            came[v] = max(before, key=done.__getitem__)
            done[v] += done[came[v]]
    v = max(range(len(done)), key=done.__getitem__)
    most = done[v]
    path = []
    while v >= 0:
        path.append(v)
        v = came[v]
    return most, path[::-1]


def in_order(w: Workload) -> Order:
    """Return the nodes, each after all its inputs."""
    before: list[list[int]] = [[] for _ in range(w.num_nodes)]
    for u, v in w.edges.tolist():
        before[v].append(u)
    return [(v, before[v]) for v in order_of(w.num_nodes, w.edges.tolist())]
