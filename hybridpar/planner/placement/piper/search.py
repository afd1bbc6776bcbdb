"""Piper's dynamic program over downsets: sets of layers that hold everything after their members.

    best[D][k][s] = min over downsets D' in D, tensor degree t and data degree d of
        max(best[D'][k - d t][s - d], time of stage D - D' on d t devices, with ceil(s / d) micro-batches in flight)

on at most k devices with a sum of data degrees of at most s. A stage's ways to run its layers are a knapsack: all
fastest, if that fits; else layers change to a leaner way in the order of time lost for memory gained, until it does.
With two ways a layer that is optimal to within one layer.

Source: Piper (NeurIPS 2021), section 4 and appendix A.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridpar.planner.placement.ideals import MAX_IDEALS, Ideals, enumerate_ideals
from hybridpar.planner.placement.piper.equal import Allowed, plan_equal_stages
from hybridpar.planner.placement.piper.instance import RECOMPUTED, Instance, Way
from hybridpar.planner.placement.piper.load import Stage, StagePlan, make_plan
from hybridpar.planner.placement.workload import Bools, Floats, Ints, order_of

SLACK = 1e-9
ENOUGH = 1e-9  # bytes


def plan_stages(instance: Instance, allowed: Allowed | None = None, max_downsets: int = MAX_IDEALS) -> StagePlan:
    """The best stages. A plan without stages says that nothing fits.

    Raises: ConfigError if there are more downsets than `max_downsets`.
    """
    start = time.monotonic()
    allowed = allowed or Allowed()
    order = order_of(instance.num_layers, [(u, v) for u, v, _ in instance.edges])[::-1]
    number = {v: i for i, v in enumerate(order)}
    after: list[list[int]] = [[] for _ in order]
    for u, v, _ in instance.edges:
        after[number[u]].append(number[v])
    downsets = enumerate_ideals(after, max_downsets)
    limit = plan_equal_stages(instance, allowed).time  # no stage that takes longer need be looked at
    table = _Table(instance, allowed, downsets, np.array(order, np.int64), limit * (1 + SLACK))
    table.fill()
    return make_plan(instance, allowed.name, table.stages(), time.monotonic() - start,
                     {"downsets": len(downsets), "pairs": table.num_pairs})


@dataclass(eq=False)
class _Degree:
    """The ways of all layers at one tensor degree, as arrays [layers, ways]; missing ways are infinitely slow."""

    t: int
    names: list[list[str]]
    runs: Bools
    time: Floats
    weights: Floats
    memory_a: Floats
    memory_b: Floats
    edge_bytes: Floats
    """[edges, 2, ways]: twice the bytes if the edge leaves its source's stage, or enters its destination's."""


def _degree(instance: Instance, t: int, recompute: bool) -> _Degree:
    n = instance.num_layers
    ways = [[way for way in instance.ways[v].get(t, ()) if recompute or way.name != RECOMPUTED] for v in range(n)]
    width = max(1, max(map(len, ways)))

    def column(read: str, missing: float) -> Floats:
        return np.array([[getattr(way, read) for way in row] + [missing] * (width - len(row)) for row in ways])

    edge_bytes = np.zeros((len(instance.edges), 2, width))
    for e, (u, v, num_bytes) in enumerate(instance.edges):
        for side, layer, other in ((0, u, v), (1, v, u)):
            for i, way in enumerate(ways[layer]):
                edge_bytes[e, side, i] = 2 * (num_bytes + _sync(way, side, other))
    return _Degree(t, [[way.name for way in row] for row in ways], np.array([bool(row) for row in ways]),
                   column("time", np.inf), column("weights", 0.0), column("memory_a", 0.0), column("memory_b", 0.0),
                   edge_bytes)


def _sync(way: Way, side: int, other: int) -> float:
    return way.sync_forward[other] if side else way.sync_backward[other]


class _Table:
    """The table best[D][k][s], and how each entry came about. `order`: the layer of each element of the downsets."""

    def __init__(self, instance: Instance, allowed: Allowed, downsets: Ideals, order: Ints, limit: float):
        self.instance, self.downsets, self.limit = instance, downsets, limit
        self.layers = np.zeros((len(downsets), instance.num_layers), np.bool_)
        self.layers[:, order] = downsets.members.astype(np.bool_)
        self.edges = np.array([(u, v) for u, v, _ in instance.edges], np.int64).reshape(-1, 2)
        k = instance.num_devices
        self.most = min(k, instance.num_microbatches)
        self.degrees = [_degree(instance, t, allowed.recompute) for t in instance.degrees
                        if t <= k and (allowed.tensor or t == 1)]
        self.data = np.array([d for d in range(1, self.most + 1) if instance.num_microbatches % d == 0]
                             if allowed.data else [1], np.int64)
        self.best = np.full((len(downsets), k + 1, self.most + 1), np.inf)
        self.best[0] = 0.0
        self.came = np.full(self.best.shape, -1, np.int32)
        self.choices: list[tuple[int, _Degree, int]] = []
        self.num_pairs = 0

    def fill(self) -> None:
        for downset in range(1, len(self.downsets)):
            for below in self.downsets.subsets(downset)[:-1].tolist():
                self.num_pairs += 1
                for degree, d, times in self._stage_times(self.layers[downset] & ~self.layers[below]):
                    self._update(downset, below, degree, d, times)
            row = self.best[downset]
            for axis in (0, 1):
                np.minimum.accumulate(row, axis, out=row)

    def _update(self, downset: int, below: int, degree: _Degree, d: int, times: Floats) -> None:
        used = degree.t * d
        flight = -(-np.arange(d, self.most + 1) // d)
        value = np.maximum(self.best[below, :self.best.shape[1] - used, :self.most + 1 - d], times[flight - 1])
        row, came = self.best[downset, used:, d:], self.came[downset, used:, d:]
        better = value < row
        if better.any():
            row[better] = value[better]
            came[better] = len(self.choices)
            self.choices.append((below, degree, d))

    def _stage_times(self, inside: Bools) -> Iterator[tuple[_Degree, int, Floats]]:
        """For each degree of tensor and data parallelism: the stage's time by micro-batches in flight, from 1."""
        for degree in self.degrees:
            if not degree.runs[inside].all():
                continue
            data = self.data[self.data * degree.t <= self.instance.num_devices]
            cost = self._costs(degree, inside, data)
            useful = np.flatnonzero(cost.min(2).sum(1) <= self.limit)
            if not len(useful):
                continue
            memory = self._memory(degree, inside)
            if memory[0].min(1).sum() > self.instance.memory:
                continue
            for i in useful.tolist():
                yield degree, int(data[i]), self._knapsack(cost[i], memory[:self.most // int(data[i]) + 1])[0]

    def _memory(self, degree: _Degree, inside: Bools) -> Floats:
        """[micro-batches in flight, from 1; layers of the stage; ways]"""
        flight = np.arange(1, self.most + 2)[:, None, None]
        memory = degree.memory_a[inside] * flight + degree.memory_b[inside]
        memory[:, np.isinf(degree.time[inside])] = np.inf
        return memory

    def _costs(self, degree: _Degree, inside: Bools, data: Ints) -> Floats:
        """[data degrees, layers of the stage, ways]: seconds that each layer adds to the stage."""
        crossing = np.zeros(degree.time.shape)
        source, to = self.edges.T
        for side, own, other in ((0, source, to), (1, to, source)):
            cut = inside[own] & ~inside[other]
            np.add.at(crossing, own[cut], degree.edge_bytes[cut, side])
        d = data[:, None, None]
        sync = 4 * (d - 1) * degree.weights[inside] / d / self.instance.num_microbatches
        return (crossing[inside] / d + sync) / self.instance.bandwidth + degree.time[inside] / d

    def _knapsack(self, cost: Floats, memory: Floats) -> tuple[Floats, Ints]:
        """The stage's time by micro-batches in flight, infinite if it does not fit, and ways [in flight, layers]."""
        rows = np.arange(len(cost))
        fastest = cost.argmin(1)
        way = np.repeat(fastest[None], len(memory), 0)
        total = np.full(len(memory), cost.min(1).sum())
        excess = memory[:, rows, fastest].sum(1) - self.instance.memory
        if excess[-1] > 0:
            total[memory.min(2).sum(1) > self.instance.memory] = np.inf
            for i in np.flatnonzero((excess > 0) & np.isfinite(total)):
                way[i] = _leaner(cost, memory[i], fastest, float(excess[i]))
                total[i] = cost[rows, way[i]].sum()
        return total, way

    def stages(self) -> list[Stage]:
        """The stages, first to last; none if nothing fits."""
        downset, k, s = len(self.downsets) - 1, self.best.shape[1] - 1, self.most
        found = []
        if not np.isfinite(self.best[downset, k, s]):
            return []
        while downset:
            value = self.best[downset, k, s]  # found with as few devices and replicas as have this value
            while k and self.best[downset, k - 1, s] == value:
                k -= 1
            while s and self.best[downset, k, s - 1] == value:
                s -= 1
            below, degree, d = self.choices[self.came[downset, k, s]]
            inside = self.layers[downset] & ~self.layers[below]
            cost = self._costs(degree, inside, np.array([d]))[0]
            way = self._knapsack(cost, self._memory(degree, inside))[1][-(-s // d) - 1]
            layers = np.flatnonzero(inside).tolist()
            found.append(Stage({v: degree.names[v][i] for v, i in zip(layers, way.tolist(), strict=True)}, d, degree.t))
            downset, k, s = below, k - d * degree.t, s - d
        return found


def _leaner(cost: Floats, memory: Floats, way: Ints, excess: float) -> Ints:
    """Changes ways, the cheapest first by time lost for memory gained, until `excess` bytes are saved.

    Shapes: cost, memory [layers, ways]; way [layers].
    """
    way = way.copy()
    rows = np.arange(len(way))
    while excess > ENOUGH:
        saved = memory[rows, way][:, None] - memory
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(saved > ENOUGH, (cost - cost[rows, way][:, None]) / saved, np.inf)
        if cost.shape[1] <= 2:  # no layer changes twice: all in one go
            options = price.min(1)
            for v in np.argsort(options, kind="stable"):
                to = int(price[v].argmin())
                excess -= float(saved[v, to])
                way[v] = to
                if excess < ENOUGH:
                    return way
            return way
        v, to = divmod(int(price.argmin()), price.shape[1])
        excess -= float(saved[v, to])
        way[v] = to
    return way
