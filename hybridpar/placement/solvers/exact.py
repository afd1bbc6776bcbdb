"""The exact dynamic program over pairs of ideals: the best placement whose devices form a pipeline.

best[I][a][c] = least largest load of ideal I on at most a accelerators and c CPUs
              = min over ideals I' in I of  max(best[I'][a-1][c], accelerator(I - I')),
                and likewise with a CPU

Pairs are enumerated depth first: classes are removed from I one by one, in decreasing order, which
reaches each I' once. Loads are updated incrementally, and a branch ends when its difference is too
much for an accelerator and for a CPU: above `limit`, the load of a known placement. The extension
hybridpar._C does this if it was built; otherwise numpy computes all pairs of an ideal at once, from
the number of classes of each net in each ideal.

Source: arXiv 2006.16423, section 5.1, theorem 5.1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from hybridpar import native
from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.ideals import Ideals, OutOfTime
from hybridpar.placement.workload import Floats, Ints

SLACK = 1e-9
ROUNDING = 1e-12
BLOCK = 1 << 22  # numbers in a temporary array of numpy's way


class PairLoads:
    """Loads of differences of ideals, by numpy. `all_pairs`: whether most of them will be needed,
    so that a table pays."""

    def __init__(self, graph: ClassGraph, ideals: Ideals, all_pairs: bool):
        self.graph = graph
        self.ideals = ideals
        unsupported = np.isinf(graph.accelerator_time)
        finite = np.where(unsupported, 0.0, graph.accelerator_time)
        costs = np.stack([finite, graph.cpu_time, graph.size, unsupported], 1)
        step = max(1, BLOCK // graph.num_classes)
        self._totals = np.concatenate(
            [
                ideals.members[i : i + step].astype(np.float64) @ costs
                for i in range(0, len(ideals), step)
            ]
        )
        self._net_size = np.array([len(net) for net in graph.nets], np.int32)
        self._pins = graph.incidence.T.astype(np.int32).tocsr()
        self._table = self._count(np.arange(len(ideals))) if all_pairs else None
        self._combine = np.maximum if graph.workload.objective == "overlapped" else np.add

    def _count(self, ideals: Ints) -> NDArray[np.int32]:
        """Return how many of a net's classes are in each ideal [ideals, nets]."""
        return np.ascontiguousarray((self._pins @ self.ideals.members[ideals].T.astype(np.int32)).T)

    def __call__(self, ideal: int, limit: float) -> tuple[Ints, Floats, Floats]:
        """Return subsets of the ideal, and the loads of an accelerator and a CPU that hold the
        rest.

        Subsets for which both loads certainly exceed `limit` are left out.
        """
        subsets = self.ideals.subsets(ideal)
        accelerator, cpu, size, unsupported = (self._totals[ideal] - self._totals[subsets]).T
        fits = (unsupported < 0.5) & (size <= self.graph.workload.room) & (accelerator <= limit)
        keep = fits | (cpu <= limit)
        subsets = subsets[keep]
        accelerator = accelerator[keep]
        cpu = cpu[keep]
        fits = fits[keep]
        load = np.full(len(subsets), np.inf)
        load[fits] = self._combine(accelerator[fits], self._transfers(ideal, subsets[fits]))
        return subsets, load, cpu

    def _transfers(self, ideal: int, subsets: Ints) -> Floats:
        here = self._count(np.array([ideal]))[0]
        nets = np.flatnonzero(here)
        whole = nets[here[nets] == self._net_size[nets]]
        cost = self.graph.net_cost
        out = np.empty(len(subsets))
        step = max(1, BLOCK // max(1, len(nets)))
        for start in range(0, len(subsets), step):
            some = subsets[start : start + step]
            count = self._count(some) if self._table is None else self._table[some]
            touched = count[:, nets] != here[nets]
            held = count[:, whole] == 0
            out[start : start + step] = touched @ cost[nets] - held @ cost[whole]
        return out


def best_loads(graph: ClassGraph, ideals: Ideals, limit: float, deadline: float) -> Floats:
    """Return the table best[I, a, c]; values above `limit` may be infinite.

    Raises:
        OutOfTime: `time.monotonic()` is past `deadline`.
    """
    # the extension adds times and transfers
    by_numpy = native.missing() or graph.workload.objective != "serial"
    way = _best_loads_numpy if by_numpy else _best_loads_native
    return way(graph, ideals, _above(graph, limit), deadline)


def _above(graph: ClassGraph, limit: float) -> float:
    """Return slightly more than the limit, because sums in another order differ in their last
    bits."""
    total = graph.accelerator_time[np.isfinite(graph.accelerator_time)].sum() + graph.cpu_time.sum()
    return limit * (1 + SLACK) + ROUNDING * float(total)


def _best_loads_native(graph: ClassGraph, ideals: Ideals, limit: float, deadline: float) -> Floats:
    w = graph.workload
    unsupported = np.isinf(graph.accelerator_time)
    costs = np.stack(
        [
            np.where(unsupported, 0.0, graph.accelerator_time),
            graph.cpu_time,
            graph.size,
            unsupported,
        ],
        1,
    )
    pins = [(v, e) for v, nets in enumerate(graph.nets_of) for e in nets]
    net_size = [len(net) for net in graph.nets]
    best = torch.ops.hybridpar.placement_best_loads(
        torch.from_numpy(ideals.covers),
        torch.from_numpy(np.ascontiguousarray(costs, np.float64)),
        torch.tensor(pins, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(graph.net_cost, dtype=torch.float64),
        torch.tensor(net_size, dtype=torch.int64),
        len(ideals),
        w.num_accelerators,
        w.num_cpus,
        w.room,
        limit,
        min(deadline - time.monotonic(), 1e9),
    )
    if not len(best):
        raise OutOfTime
    return best.numpy()


def _best_loads_numpy(graph: ClassGraph, ideals: Ideals, limit: float, deadline: float) -> Floats:
    w = graph.workload
    loads = PairLoads(graph, ideals, all_pairs=True)
    best = np.full((len(ideals), w.num_accelerators + 1, w.num_cpus + 1), np.inf)
    best[0] = 0.0
    for ideal in range(1, len(ideals)):
        if time.monotonic() > deadline:
            raise OutOfTime
        subsets, accelerator, cpu = loads(ideal, limit)
        # the last is the ideal itself
        subsets = subsets[:-1]
        accelerator = accelerator[:-1]
        cpu = cpu[:-1]
        row = best[ideal]
        for some, load, before, to in (
            (accelerator <= limit, accelerator, best[:, :-1], row[1:]),
            (cpu <= limit, cpu, best[..., :-1], row[:, 1:]),
        ):
            if to.size and some.any():
                to[...] = np.minimum(
                    to, np.maximum(before[subsets[some]], load[some, None, None]).min(0)
                )
        for axis in (0, 1):
            np.minimum.accumulate(row, axis, out=row)
    return best


def trace(graph: ClassGraph, ideals: Ideals, best: Floats) -> Ints:
    """Return the device of each class from a table whose last value is finite; accelerators, then
    CPUs."""
    loads = PairLoads(graph, ideals, all_pairs=False)
    device = np.full(graph.num_classes, -1, np.int64)
    next_accelerator = 0
    next_cpu = graph.workload.num_accelerators
    ideal = len(ideals) - 1
    a = best.shape[1] - 1
    c = best.shape[2] - 1
    limit = _above(graph, float(best[ideal, a, c]))
    while ideal:
        subsets, accelerator, cpu = (x[:-1] for x in loads(ideal, limit))
        nowhere = np.full(len(subsets), np.inf)
        on_accelerator = np.maximum(best[subsets, a - 1, c], accelerator) if a else nowhere
        on_cpu = np.maximum(best[subsets, a, c - 1], cpu) if c else nowhere
        assert min(on_accelerator.min(), on_cpu.min()) <= limit, "the table promises more"
        if on_accelerator.min() <= on_cpu.min():
            below = int(subsets[on_accelerator.argmin()])
            index = next_accelerator
            a = a - 1
            next_accelerator = next_accelerator + 1
        else:
            below = int(subsets[on_cpu.argmin()])
            index = next_cpu
            c = c - 1
            next_cpu = next_cpu + 1
        for v in _elements(ideals.masks[ideal] & ~ideals.masks[below]):
            device[v] = index
        ideal = below
    return device


def _elements(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
