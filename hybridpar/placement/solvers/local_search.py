"""Local search: from a random placement, repeat the best move of one class until none helps.

Moves are compared by the p-norm of the loads, a smooth maximum: if two devices share the largest
load, a move that relieves one of them still counts. Excess memory of an accelerator is penalized,
so a start may use too much. Placements need not be contiguous.

Source: the baseline of arXiv 2006.16423, section 6.1, which compares maxima and ignores memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.workload import Bools, Floats, Ints

NORM = 24.0
# of an excess as large as all memory of an accelerator, in units of the whole graph's work
PENALTY = 10.0
MAX_NUMBERS = 20_000_000
"""Limit on the numbers in a table."""
GAIN = 1e-9  # relative; moves that gain less are rounding


@dataclass(eq=False)
class _State:
    """A placement of classes and its cost. Shapes: D devices; `held` [nets, D] counts classes of
    each net."""

    device: Ints
    held: Floats
    loads: Floats
    memory: Floats


class LocalSearch:
    """A search over the placements of one graph."""

    def __init__(self, graph: ClassGraph):
        w = graph.workload
        self.graph = graph
        self.k = w.num_accelerators
        self.num_devices = w.num_accelerators + w.num_cpus
        self.is_accelerator = np.arange(self.num_devices) < self.k
        self.allowed = np.ones((graph.num_classes, self.num_devices), np.bool_)
        self.allowed[:, : self.k] = np.isfinite(graph.accelerator_time)[:, None]
        accelerator = np.where(np.isinf(graph.accelerator_time), 0.0, graph.accelerator_time)
        self.times = np.concatenate(
            [
                np.repeat(accelerator[:, None], self.k, 1),
                np.repeat(graph.cpu_time[:, None], w.num_cpus, 1),
            ],
            1,
        )
        self.incidence = graph.incidence
        self.net_size = np.array([len(net) for net in graph.nets], np.float64)
        self.scale = max(
            float(
                np.minimum(
                    np.where(self.allowed[:, 0], accelerator, np.inf),
                    graph.cpu_time if w.num_cpus else np.inf,
                ).sum()
            ),
            1e-300,
        )

    @staticmethod
    def size(graph: ClassGraph) -> int:
        """Return the numbers in one of the tables that a search keeps."""
        rows = graph.num_classes + len(graph.nets)
        return rows * (graph.workload.num_accelerators + graph.workload.num_cpus)

    def random(self, generator: np.random.Generator) -> Ints:
        """Put every class on a random accelerator that can run it, else on a random CPU."""
        device = generator.integers(0, self.k, self.graph.num_classes)
        only_cpu = ~self.allowed[:, 0]
        device[only_cpu] = generator.integers(self.k, self.num_devices, int(only_cpu.sum()))
        return device.astype(np.int64)

    def descend(self, device: Ints, deadline: float) -> tuple[float, Ints]:
        """Descend from a placement to a local optimum, and return its largest load (infinite if
        memory does not suffice) and devices."""
        state = self._state(device.copy())
        while time.monotonic() < deadline:
            value = self._value(state.loads, state.memory)
            change = self._moves(state)
            v, to = np.unravel_index(int(change.argmin()), change.shape)
            if not change[v, to] < value * (1 - GAIN):
                break
            self._move(state, int(v), int(to))
        state = self._state(state.device)  # recomputed, to remove accumulated rounding
        fits = bool((state.memory[: self.k] <= self.graph.workload.room).all())
        return (float(state.loads.max()) if fits else np.inf), state.device

    def _state(self, device: Ints) -> _State:
        g = self.graph
        n = self.graph.num_classes
        at = np.zeros((n, self.num_devices))
        at[np.arange(n), device] = 1.0
        held = self.incidence.T @ at if g.nets else np.zeros((0, self.num_devices))
        cut = (held > 0) & (held < self.net_size[:, None])
        cut[:, self.k :] = False
        return _State(device, held, (at * self.times).sum(0) + g.net_cost @ cut, g.size @ at)

    def _value(self, loads: Floats, memory: Floats) -> float:
        values = self._penalised(loads, memory, self.is_accelerator)
        top = max(float(values.max()), 1e-300)
        return top * float(((values / top) ** NORM).sum() ** (1 / NORM))

    def _penalised(self, loads: Floats, memory: Floats, accelerator: Bools) -> Floats:
        """Return the loads plus a penalty for exceeding an accelerator's memory. `accelerator`:
        whether each device is one."""
        limit = self.graph.workload.memory
        return loads + np.where(
            accelerator, np.maximum(memory / limit - 1, 0) * (PENALTY * self.scale), 0.0
        )

    def _moves(self, s: _State) -> Floats:
        """Return [n, D], the value after moving each class to each device; infinite if the move is
        not allowed."""
        g = self.graph
        n = self.graph.num_classes
        rows = np.arange(n)
        size = self.net_size[:, None]
        cost = g.net_cost[:, None]
        leaves = cost * ((s.held > 1).astype(float) - (s.held < size))  # on its current device
        enters = cost * ((s.held + 1 < size).astype(float) - (s.held > 0))
        leaves[:, self.k :] = enters[:, self.k :] = 0.0
        fewer = (
            (self.incidence @ leaves)[rows, s.device] - self.times[rows, s.device]
            if g.nets
            else -self.times[rows, s.device]
        )
        more = self.times + (self.incidence @ enters if g.nets else 0.0)
        now = self._penalised(s.loads, s.memory, self.is_accelerator)
        from_load = self._penalised(
            s.loads[s.device] + fewer, s.memory[s.device] - g.size, self.is_accelerator[s.device]
        )
        to_load = self._penalised(s.loads + more, s.memory + g.size[:, None], self.is_accelerator)
        top = max(float(now.max()), 1e-300)
        powers = (now / top) ** NORM
        with np.errstate(over="ignore"):
            total = (
                powers.sum()
                - powers[s.device][:, None]
                - powers
                + (np.maximum(from_load, 0) / top)[:, None] ** NORM
                + (np.maximum(to_load, 0) / top) ** NORM
            )
        values = top * np.maximum(total, 0.0) ** (1 / NORM)
        values[~self.allowed] = np.inf
        values[rows, s.device] = np.inf
        return values

    def _move(self, s: _State, v: int, to: int) -> None:
        g = self.graph
        nets = np.array(g.nets_of[v], np.int64)
        for d, step in ((int(s.device[v]), -1.0), (to, 1.0)):
            before = s.held[nets, d]
            after = before + step
            if d < self.k:
                size = self.net_size[nets]
                cut = ((after > 0) & (after < size)).astype(float) - (
                    (before > 0) & (before < size)
                )
                s.loads[d] += float(g.net_cost[nets] @ cut)
            s.held[nets, d] = after
            s.loads[d] += step * self.times[v, d]
            s.memory[d] += step * g.size[v]
        s.device[v] = to


def local_search(
    graph: ClassGraph,
    *,
    restarts: int = 10,
    seed: int = 0,
    starts: tuple[Ints, ...] = (),
    deadline: float = np.inf,
) -> tuple[float, Ints]:
    """Return the best local optimum of `restarts` random placements and of `starts` (a device for
    each class).

    Returns:
        The largest load, infinite if no placement fits the memory, and the devices.
    """
    search = LocalSearch(graph)
    generator = np.random.default_rng(seed)
    best = np.inf
    found = np.empty(0, np.int64)
    for i in range(len(starts) + restarts):
        start = starts[i] if i < len(starts) else search.random(generator)
        value, device = search.descend(start, deadline)
        if value < best:
            best = value
            found = device
        if time.monotonic() > deadline:
            break
    return best, found
