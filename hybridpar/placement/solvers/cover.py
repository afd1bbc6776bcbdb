"""A lower bound on the largest load that keeps classes intact: no devices with loads up to U can
hold all classes, even fractionally.

a column    a set of classes that one device can hold with a load of at most U
covering    can k columns of accelerators, and l of CPUs, in fractions, hold every class once?

If not, every placement has a larger load. Columns are generated as needed: dual prices of the
covering by known columns show which classes it lacks, and for each kind of device a small integer
program finds the set with the highest price. If all prices together exceed what the devices can
hold at best, there is no covering. Bisection finds the largest U without one.

Source: Gilmore and Gomory's column generation (1961), for devices with additional transfer costs.
"""

from __future__ import annotations

import time

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.solvers.bound import work_bound
from hybridpar.placement.solvers.highs import Highs, Program
from hybridpar.placement.workload import Bools, Floats

MAX_CLASSES = 64
"""Number of classes above which the sets of the highest price take too long to find."""
TOLERANCE = 2e-7
"""Relative tolerance of the bound."""
SCALE = 1e3
SLACK = 1e-8
"""Factor on the load constraints: HiGHS satisfies rows to within 1e-6, and so loads to within less
than SLACK, relative."""
COLUMN_GAP = 1e-4
"""Relative gap to the highest price that is good enough."""
MARGIN = 1e-6
"""Relative margin by which prices must exceed what devices can hold, because HiGHS satisfies rows
only to within that."""


class _Unknown(Exception):
    """There was no time to find out."""


def cover_bound(graph: ClassGraph, known: float, deadline: float, highs: Highs) -> float:
    """Return a lower bound on the largest load of any placement.

    Args:
        graph: The classes.
        known: Largest load of a known placement.
        deadline: Time limit (monotonic).
        highs: The solver process.
    """
    low = work_bound(graph)
    high = known
    if graph.num_classes > MAX_CLASSES or not np.isfinite(known) or high - low <= TOLERANCE * high:
        return low
    covering = _Covering(graph, known, deadline, highs)
    try:
        if not covering.possible(known * (1 - TOLERANCE)):
            return known * (1 - TOLERANCE)
        while high - low > TOLERANCE * high:
            middle = (low + high) / 2
            if covering.possible(middle):
                high = middle
            else:
                low = middle
    except _Unknown:
        pass
    return low


class _Covering:
    """Columns: (classes, whether it is for a CPU, load)."""

    def __init__(self, graph: ClassGraph, unit: float, deadline: float, highs: Highs):
        self.graph = graph
        self.unit = unit / SCALE
        self.deadline = deadline
        self.highs = highs
        w = graph.workload
        self.counts = np.array([w.num_accelerators, w.num_cpus], np.float64)
        self.columns: list[tuple[Bools, int, float]] = []
        self.runs = np.isfinite(graph.accelerator_time)
        n = graph.num_classes
        num_nets = len(graph.nets)
        pins = [(e, c) for e, net in enumerate(graph.nets) for c in net]
        rows = []
        columns = []
        values = []
        for i, (e, c) in enumerate(pins):  # x[c] <= high[e], low[e] <= x[c]
            rows += [2 * i, 2 * i, 2 * i + 1, 2 * i + 1]
            columns += [c, n + e, n + num_nets + e, c]
            values += [1.0, -1.0, 1.0, -1.0]
        last = 2 * len(pins)
        self._time = np.where(self.runs, graph.accelerator_time, 0.0)
        self._net_size = np.array([len(net) for net in graph.nets])
        dense = np.zeros((2, n + 2 * num_nets))
        dense[0] = np.concatenate([self._time, graph.net_cost, -graph.net_cost]) / self.unit
        dense[1, :n] = graph.size / w.memory
        nets = csr_array((values, (rows, columns)), shape=(last, n + 2 * num_nets))
        self._matrix = csr_array(vstack([nets, csr_array(dense)]))
        self._limits = np.concatenate([np.zeros(last + 1), [w.room / w.memory]])

    def possible(self, limit: float) -> bool:
        """Return whether there is a covering with loads up to `limit`. Raises: _Unknown if there is
        no time."""
        while True:
            usable = [column for column in self.columns if column[2] <= limit * (1 + SLACK)]
            short, prices, worth = self._cover(usable)
            if short < MARGIN:
                return True
            found = [self._best_accelerator(prices, limit), self._best_cpu(prices, limit)]
            if prices.sum() * (1 - MARGIN) > self.counts @ [most for most, _, _ in found]:
                return False
            new = [
                (classes, kind, load)
                for kind, (_, classes, load) in enumerate(found)
                if prices @ classes > worth[kind] * (1 + MARGIN) + MARGIN
            ]
            if not new or any(load > limit * (1 + SLACK) for _, _, load in new):
                raise _Unknown
            self.columns += new

    def _cover(self, usable: list[tuple[Bools, int, float]]) -> tuple[float, Floats, Floats]:
        """Return the number of classes that the best covering leaves uncovered, the prices of
        classes, and the price of a device of each kind."""
        n = self.graph.num_classes
        held = np.array([classes for classes, _, _ in usable], np.float64).reshape(-1, n).T
        kinds = np.array([[kind == i for _, kind, _ in usable] for i in (0, 1)], np.float64)
        matrix = np.block([[-held, -np.eye(n)], [kinds, np.zeros((2, n))]])
        cost = np.concatenate([np.zeros(len(usable)), np.ones(n)])
        answer = linprog(cost, matrix, np.concatenate([-np.ones(n), self.counts]), method="highs")
        if answer.status:
            raise _Unknown
        prices = -np.asarray(answer.ineqlin.marginals)
        return float(answer.fun), prices[:n], prices[n:]

    def _best_accelerator(self, prices: Floats, limit: float) -> tuple[float, Bools, float]:
        """Return an upper bound on the price of the classes that an accelerator can hold, the best
        set found, and its load."""
        n = len(prices)
        limits = self._limits.copy()
        limits[-2] = limit / self.unit
        upper = np.ones(self._matrix.shape[1])
        upper[:n] = self.runs
        values = np.concatenate([prices, np.zeros(len(upper) - n)])
        most, x = self._highest(values, n, upper, self._matrix, limits)
        classes = x[:n] > 0.5
        held = self.graph.incidence.T @ classes.astype(np.float64)
        return (
            most,
            classes,
            float(
                self._time @ classes + self.graph.net_cost @ ((held > 0) & (held < self._net_size))
            ),
        )

    def _best_cpu(self, prices: Floats, limit: float) -> tuple[float, Bools, float]:
        time_of = self.graph.cpu_time
        if not self.counts[1]:
            return 0.0, np.zeros(len(prices), np.bool_), 0.0
        row = csr_array(time_of[None] / self.unit)
        most, x = self._highest(
            prices, len(prices), np.ones(len(prices)), row, np.array([limit / self.unit])
        )
        return most, x > 0.5, float(time_of @ (x > 0.5))

    def _highest(
        self, values: Floats, num_integers: int, upper: Floats, matrix: csr_array, limits: Floats
    ) -> tuple[float, Floats]:
        if time.monotonic() > self.deadline:
            raise _Unknown
        integer = (np.arange(len(values)) < num_integers).astype(np.float64)
        answer = self.highs.solve(
            Program(-values, matrix, limits, np.zeros(len(values)), upper, integer, gap=COLUMN_GAP),
            self.deadline,
        )
        if not len(answer.values) or not np.isfinite(answer.bound):
            raise _Unknown
        return -answer.bound, answer.values
