"""Piper's dynamic program over downsets: sets of layers that contain all successors of their
members.

best[D][k][s] = min over downsets D' in D, tensor degree t and data degree d of
                max(best[D'][k - d t][s - d], time of stage D - D' on d t devices, with
                ceil(s / d) micro-batches in flight)

on at most k devices with a sum of data degrees of at most s. Choosing a way for each layer of a
stage is a knapsack: all layers use the fastest way if that fits; else layers change to ways with
less memory, in the order of time lost per memory saved. With two ways per layer that is optimal to
within one layer.

Source: Piper (NeurIPS 2021), section 4 and appendix A.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hybridpar.errors import ConfigError
from hybridpar.placement.ideals import MAX_IDEALS, Ideals, enumerate_ideals
from hybridpar.placement.piper.equal import Allowed, plan_equal_stages
from hybridpar.placement.piper.free import without_free
from hybridpar.placement.piper.instance import RECOMPUTED, Instance, Way
from hybridpar.placement.piper.knapsack import leaner
from hybridpar.placement.piper.stage_scoring import LayerGroup, PlannerResult, StagePlan, make_plan
from hybridpar.placement.solvers.exact import OutOfTime
from hybridpar.placement.workload import Bools, Floats, Ints

SLACK = 1e-9
FIRST_LIMIT = 1.15
NEXT_LIMIT = 1.4
LIMITS = 3
"""The search first tries limits on the time of a stage: FIRST_LIMIT times the least time, then
NEXT_LIMIT times the previous limit. After LIMITS of them it runs without a limit."""
LONG = 0.7
"""Share of the time limit after which only one order is searched."""


def plan_stages(
    instance: Instance,
    allowed: Allowed | None = None,
    max_downsets: int = MAX_IDEALS,
    time_limit: float = np.inf,
) -> StagePlan:
    """Return the best stages. A plan without stages means that nothing fits or, with a note, that
    nothing was found.

    With more than `max_downsets` downsets, or close to the time limit (seconds), only the downsets
    of one linear order of the layers are searched; if there is no time for that either, equal
    stages are returned. `note` says so.
    """
    start = time.monotonic()
    allowed = allowed or Allowed()
    equal = plan_equal_stages(instance, allowed)
    order, behind = without_free(instance)
    number = {v: i for i, v in enumerate(order)}
    after = [[number[w] for w in behind[v]] for v in order]
    line = [[i - 1] if i else [] for i in range(len(order))]
    table = partial(_Table, instance, allowed, order, behind)
    reason = ""
    what = ""
    try:
        last = start + LONG * time_limit
        best = table(enumerate_ideals(after, max_downsets, last), last)
        stages = best.solve(equal.time)
    except (ConfigError, OutOfTime) as error:
        reason = (
            "the time limit was reached"
            if isinstance(error, OutOfTime)
            else f"more than {max_downsets} downsets"
        )
        best = table(enumerate_ideals(line, len(line) + 2), start + time_limit)
        what = "one order of the layers"
        try:
            stages = best.solve(equal.time)
        except OutOfTime:
            stages = []
            what = "equal stages"
    seconds = time.monotonic() - start
    stats = {"downsets": float(len(best.downsets))}
    note = f"{reason}: this is the best of {what}" if reason else ""
    found = PlannerResult(stages, stats, note, best.least())
    plan = make_plan(instance, allowed.name, found, seconds)
    return (
        plan if plan.time <= equal.time else replace(plan, stages=equal.stages, score=equal.score)
    )


@dataclass(eq=False)
class _Degree:
    """The ways of all layers at one tensor degree, as arrays [layers, ways]; missing ways are
    infinitely slow."""

    t: int
    names: list[list[str]]
    runs: Bools
    time: Floats
    weights: Floats
    memory_a: Floats
    memory_b: Floats
    edge_bytes: Floats
    """Array [edges, 2, ways]: twice the bytes if the edge leaves its source's stage, or enters its
    destination's."""

    def useful(self, inside: Bools, table: _Table) -> Bools:
        """Return which of many stages [stages, layers] can at best run at this degree, within the
        limit and memory."""
        leanest = np.where(np.isinf(self.time), np.inf, self.memory_a + self.memory_b).min(1)
        known = np.where(self.runs, np.stack([self.time.min(1), leanest]), 0.0)
        compute, memory = known @ inside.T
        return (
            ~(inside & ~self.runs).any(1)
            & (memory <= table.instance.memory * (1 + SLACK))
            & (compute <= table.limit * int(table.data_of(self, table.instance.num_devices)[-1]))
        )


def _degree(instance: Instance, t: int, recompute: bool) -> _Degree:
    n = instance.num_layers
    ways = [
        [way for way in instance.ways[v].get(t, ()) if recompute or way.name != RECOMPUTED]
        for v in range(n)
    ]
    width = max(1, max(map(len, ways)))

    def column(read: str, missing: float) -> Floats:
        return np.array(
            [[getattr(way, read) for way in row] + [missing] * (width - len(row)) for row in ways]
        )

    edge_bytes = np.zeros((len(instance.edges), 2, width))
    for e, (u, v, num_bytes) in enumerate(instance.edges):
        for side, layer, other in ((0, u, v), (1, v, u)):
            for i, way in enumerate(ways[layer]):
                edge_bytes[e, side, i] = 2 * (num_bytes + _sync(way, side, other))
    return _Degree(
        t,
        [[way.name for way in row] for row in ways],
        np.array([bool(row) for row in ways]),
        column("time", np.inf),
        column("weights", 0.0),
        column("memory_a", 0.0),
        column("memory_b", 0.0),
        edge_bytes,
    )


def _sync(way: Way, side: int, other: int) -> float:
    return way.sync_forward[other] if side else way.sync_backward[other]


class _Table:
    """The table best[D][k][s], with the choice behind each entry.

    Args:
        order: The layer of each element of the downsets.
        behind: Layers that must be in a downset for each further layer to be in it.
    """

    def __init__(
        self,
        instance: Instance,
        allowed: Allowed,
        order: list[int],
        behind: Mapping[int, set[int]],
        downsets: Ideals,
        deadline: float,
    ):
        self.instance = instance
        self.downsets = downsets
        self.limit = np.inf
        self.deadline = deadline
        self.lowest = self.highest = np.zeros(0, np.int64)
        self.layers = np.zeros((len(downsets), instance.num_layers), np.bool_)
        self.layers[:, order] = downsets.members.astype(np.bool_)
        for v in set(behind).difference(order):
            self.layers[:, v] = self.layers[:, list(behind[v])].all(1)
        self.edges = np.array([(u, v) for u, v, _ in instance.edges], np.int64).reshape(-1, 2)
        k = instance.num_devices
        self.most = min(k, instance.num_microbatches)
        self.degrees = [
            _degree(instance, t, allowed.recompute)
            for t in instance.degrees
            if t <= k and (allowed.tensor or t == 1)
        ]
        self.data = np.array(
            [d for d in range(1, self.most + 1) if instance.num_microbatches % d == 0]
            if allowed.data
            else [1],
            np.int64,
        )
        self.best = np.full((len(downsets), k + 1, self.most + 1), np.inf)
        self.came = np.full(self.best.shape, -1, np.int32)
        self.choices: list[tuple[int, _Degree, int]] = []

    def least_work(self) -> Floats:
        """Least device time of each layer [layers]: with the fastest way, without communication."""
        return np.min(
            [degree.time.min(1) * degree.t for degree in self.degrees], axis=0, initial=np.inf
        )

    def least(self) -> float:
        """Lower bound on the time of any plan: all devices equally busy with the least work."""
        return float(self.least_work().sum()) / self.instance.num_devices

    def solve(self, known: float) -> list[LayerGroup]:
        """Return the best stages, or [] if nothing fits.

        Args:
            known: Time of a known plan.

        Raises:
            OutOfTime: The time limit passed.
        """
        # skip stages above a limit; if nothing is found, the limit was too low
        limit = FIRST_LIMIT * self.least()
        if not np.isfinite(limit):
            return []
        for _ in range(LIMITS):
            self.fill(min(limit, known) * (1 + SLACK))
            # a plan above the limit need not be the best
            if limit >= known or self.best[-1, -1, -1] <= limit:
                break
            limit *= NEXT_LIMIT
        else:
            self.fill(known * (1 + SLACK))
        return self.stages()

    def fill(self, limit: float) -> None:
        """Fill the table for plans that take at most `limit`; entries above it may be infinite.

        With fewer devices than `lowest`, a downset takes more than the limit; with more than
        `highest`, the remaining layers do.

        Raises:
            OutOfTime: The time limit passed.
        """
        self.limit = limit
        self.best[...] = np.inf
        self.came[...] = -1
        self.best[0] = 0.0
        self.choices.clear()
        work = self.layers @ self.least_work()
        needed = np.ceil(np.stack([work, work[-1] - work]) / (limit or 1.0) * (1 - SLACK)).astype(
            np.int64
        )
        self.lowest = needed[0]
        self.highest = self.instance.num_devices - needed[1]
        for downset in (np.flatnonzero(self.lowest[1:] <= self.highest[1:]) + 1).tolist():
            if time.monotonic() > self.deadline:
                raise OutOfTime
            subsets = self.downsets.subsets(downset)[:-1]
            subsets = subsets[
                (self.best[subsets, -1, -1] <= limit)
                & (self.lowest[subsets] < self.highest[downset])
            ]
            for degree in self.degrees:
                for below in subsets[
                    degree.useful(self.layers[downset] & ~self.layers[subsets], self)
                ].tolist():
                    self._try(downset, below, degree)
            row = self.best[downset]
            for axis in (0, 1):
                np.minimum.accumulate(row, axis, out=row)

    def _try(self, downset: int, below: int, degree: _Degree) -> None:
        """Try the stage of layers in `downset` and not in `below`, with every data-parallel
        degree."""
        inside = self.layers[downset] & ~self.layers[below]
        highest = int(self.highest[downset])
        data = self.data_of(degree, highest - int(self.lowest[below]))
        for d, times in self._stage_times(degree, inside, data, min(highest, self.most)):
            self._update(downset, below, degree, d, times)

    def _update(self, downset: int, below: int, degree: _Degree, d: int, times: Floats) -> None:
        used = degree.t * d
        first = max(int(self.lowest[downset]), int(self.lowest[below]) + used)
        last = min(int(self.highest[downset]), int(self.highest[below]) + used)
        in_time = np.flatnonzero(times <= self.limit)
        if first > last or not len(in_time):
            return
        most = min(self.most, last, d * int(in_time[-1] + 1))  # largest number of replicas
        flight = -(-np.arange(d, most + 1) // d)
        value = np.maximum(
            self.best[below, first - used : last + 1 - used, : most + 1 - d], times[flight - 1]
        )
        row = self.best[downset, first : last + 1, d : most + 1]
        came = self.came[downset, first : last + 1, d : most + 1]
        better = value < row
        if better.any():
            row[better] = value[better]
            came[better] = len(self.choices)
            self.choices.append((below, degree, d))

    def data_of(self, degree: _Degree, devices: int) -> Ints:
        """Return the data-parallel degrees that `devices` devices are enough for."""
        return self.data[self.data * degree.t <= devices]

    def _stage_times(
        self, degree: _Degree, inside: Bools, data: Ints, most: int
    ) -> Iterator[tuple[int, Floats]]:
        """Yield for each data-parallel degree the stage's time by micro-batches in flight from 1,
        for up to `most` replicas."""
        cost = self._costs(degree, inside, data)
        useful = np.flatnonzero(cost.min(2).sum(1) <= self.limit)
        if len(useful):
            memory = self._memory(degree, inside)
            for i in useful.tolist():
                yield int(data[i]), self._knapsack(cost[i], memory[: -(-most // int(data[i]))])[0]

    def _memory(self, degree: _Degree, inside: Bools) -> Floats:
        """Return bytes [micro-batches in flight, from 1; layers of the stage; ways]."""
        flight = np.arange(1, self.most + 2)[:, None, None]
        memory = degree.memory_a[inside] * flight + degree.memory_b[inside]
        memory[:, np.isinf(degree.time[inside])] = np.inf
        return memory

    def _costs(self, degree: _Degree, inside: Bools, data: Ints) -> Floats:
        """Return seconds that each layer adds to the stage [data degrees, layers of the stage,
        ways]."""
        crossing = np.zeros(degree.time.shape)
        source, to = self.edges.T
        for side, own, other in ((0, source, to), (1, to, source)):
            cut = inside[own] & ~inside[other]
            np.add.at(crossing, own[cut], degree.edge_bytes[cut, side])
        d = data[:, None, None]
        sync = 4 * (d - 1) * degree.weights[inside] / d / self.instance.num_microbatches
        return (crossing[inside] / d + sync) / self.instance.bandwidth + degree.time[inside] / d

    def _knapsack(self, cost: Floats, memory: Floats) -> tuple[Floats, Ints]:
        """Return the stage's time by micro-batches in flight, infinite if it does not fit, and the
        ways [in flight, layers]."""
        rows = np.arange(len(cost))
        fastest = cost.argmin(1)
        way = np.repeat(fastest[None], len(memory), 0)
        total = np.full(len(memory), cost[rows, fastest].sum())
        excess = memory[:, rows, fastest].sum(1) - self.instance.memory
        if excess[-1] > 0:
            total[memory.min(2).sum(1) > self.instance.memory] = np.inf
            some = np.flatnonzero((excess > 0) & np.isfinite(total))
            if len(some):
                way[some] = leaner(cost, memory[some], fastest, excess[some])
                total[some] = cost[rows, way[some]].sum(1)
        return total, way

    def stages(self) -> list[LayerGroup]:
        """Return the stages, first to last; [] if nothing fits."""
        downset = len(self.downsets) - 1
        k = self.best.shape[1] - 1
        s = self.most
        found = []
        if not np.isfinite(self.best[downset, k, s]):
            return []
        while downset:
            value = self.best[downset, k, s]  # the fewest devices and replicas with this value
            while k and self.best[downset, k - 1, s] == value:
                k -= 1
            while s and self.best[downset, k, s - 1] == value:
                s -= 1
            below, degree, d = self.choices[self.came[downset, k, s]]
            inside = self.layers[downset] & ~self.layers[below]
            cost = self._costs(degree, inside, np.array([d]))[0]
            way = self._knapsack(cost, self._memory(degree, inside))[1][-(-s // d) - 1]
            layers = np.flatnonzero(inside).tolist()
            ways = {v: degree.names[v][i] for v, i in zip(layers, way.tolist(), strict=True)}
            found.append(LayerGroup(ways, d, degree.t))
            downset = below
            k = k - d * degree.t
            s = s - d
        return found
