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
FIRST_LIMIT, NEXT_LIMIT, LIMITS = 1.15, 1.4, 3
"""Of the least time there can be; from a limit to the next; how many before there is none."""
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
    known = plan_equal_stages(instance, allowed).time
    table = _Table(instance, allowed, downsets, np.array(order, np.int64))
    # stages that take longer than a limit are not looked at; where the limit was too low, nothing is found
    limit = FIRST_LIMIT * table.least()
    for _ in range(LIMITS):
        table.fill(min(limit, known) * (1 + SLACK))
        if limit >= known or np.isfinite(table.best[-1, -1, -1]):
            break
        limit *= NEXT_LIMIT
    else:
        table.fill(known)
    return make_plan(instance, allowed.name, table.stages(), time.monotonic() - start, {"downsets": len(downsets)})


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

    def useful(self, inside: Bools, table: _Table) -> Bools:
        """Which of many stages [stages, layers] can run at this degree, in the limit and memory, at best."""
        leanest = np.where(np.isinf(self.time), np.inf, self.memory_a + self.memory_b).min(1)
        known = np.where(self.runs, np.stack([self.time.min(1), leanest]), 0.0)
        compute, memory = known @ inside.T
        return (~(inside & ~self.runs).any(1) & (memory <= table.instance.memory * (1 + SLACK))
                & (compute <= table.limit * int(table.data_of(self)[-1])))


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

    def __init__(self, instance: Instance, allowed: Allowed, downsets: Ideals, order: Ints):
        self.instance, self.downsets, self.limit = instance, downsets, np.inf
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
        self.came = np.full(self.best.shape, -1, np.int32)
        self.choices: list[tuple[int, _Degree, int]] = []

    def least(self) -> float:
        """No plan is faster: every layer run the fastest way, all devices equally busy, without communication."""
        total = np.min([degree.time.min(1) * degree.t for degree in self.degrees], axis=0, initial=np.inf)
        return float(total.sum()) / self.instance.num_devices

    def fill(self, limit: float) -> None:
        """The table for plans that take `limit` at most; what takes longer may be infinite."""
        self.limit = limit
        self.best[...], self.came[...] = np.inf, -1
        self.best[0] = 0.0
        self.choices.clear()
        for downset in range(1, len(self.downsets)):
            subsets = self.downsets.subsets(downset)[:-1]
            subsets = subsets[self.best[subsets, -1, -1] <= limit]
            for degree in self.degrees:
                for below in subsets[degree.useful(self.layers[downset] & ~self.layers[subsets], self)].tolist():
                    inside = self.layers[downset] & ~self.layers[below]
                    for d, times in self._stage_times(degree, inside):
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

    def data_of(self, degree: _Degree) -> Ints:
        """The degrees of data parallelism that there are devices for."""
        return self.data[self.data * degree.t <= self.instance.num_devices]

    def _stage_times(self, degree: _Degree, inside: Bools) -> Iterator[tuple[int, Floats]]:
        """For each degree of data parallelism: the stage's time by micro-batches in flight, from 1."""
        data = self.data_of(degree)
        cost = self._costs(degree, inside, data)
        useful = np.flatnonzero(cost.min(2).sum(1) <= self.limit)
        if len(useful):
            memory = self._memory(degree, inside)
            for i in useful.tolist():
                yield int(data[i]), self._knapsack(cost[i], memory[:self.most // int(data[i]) + 1])[0]

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
        total = np.full(len(memory), cost[rows, fastest].sum())
        excess = memory[:, rows, fastest].sum(1) - self.instance.memory
        if excess[-1] > 0:
            total[memory.min(2).sum(1) > self.instance.memory] = np.inf
            some = np.flatnonzero((excess > 0) & np.isfinite(total))
            if len(some):
                leaner = _leaner if cost.shape[1] > 2 else _leaner_of_two
                way[some] = leaner(cost, memory[some], fastest, excess[some])
                total[some] = cost[rows, way[some]].sum(1)
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


def _leaner_of_two(cost: Floats, memory: Floats, fastest: Ints, excess: Floats) -> Ints:
    """Changes ways, the cheapest first by time lost for memory gained, until `excess` bytes are saved.

    Shapes: cost [layers, 2], memory [y, layers, 2], fastest [layers], excess [y]. Returns ways [y, layers].
    """
    if cost.shape[1] == 1:
        return np.repeat(fastest[None], len(memory), 0)
    rows, other = np.arange(len(fastest)), 1 - fastest
    saved = memory[:, rows, fastest] - memory[:, rows, other]
    lost = cost[rows, other] - cost[rows, fastest]
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.where(saved > ENOUGH, lost / saved, np.inf).argsort(1, kind="stable")
    left = excess[:, None] - np.take_along_axis(saved, order, 1).cumsum(1)
    before = np.concatenate([excess[:, None], left[:, :-1]], 1)
    changed = np.zeros(saved.shape, np.bool_)
    np.put_along_axis(changed, order, before >= ENOUGH, 1)
    return np.where(changed, other, fastest)


def _leaner(cost: Floats, memory: Floats, fastest: Ints, excess: Floats) -> Ints:
    """The same for any number of ways, among which a layer may change several times."""
    rows = np.arange(len(fastest))
    found = np.repeat(fastest[None], len(memory), 0)
    for way, used, left in zip(found, memory, excess.tolist(), strict=True):
        while left > ENOUGH:
            saved = used[rows, way][:, None] - used
            with np.errstate(divide="ignore", invalid="ignore"):
                price = np.where(saved > ENOUGH, (cost - cost[rows, way][:, None]) / saved, np.inf)
            v, to = divmod(int(price.argmin()), price.shape[1])
            left -= float(saved[v, to])
            way[v] = to
    return found
