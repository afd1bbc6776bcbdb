"""Mixed-integer linear programs, put together row by row and solved by HiGHS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from hybridpar.planner.placement.workload import Floats, Ints

RELATIVE_GAP = 5e-7


@contextmanager
def own_output() -> Iterator[None]:
    """What HiGHS prints (it does, whatever its options are) goes to stderr: stdout may be JSON."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@dataclass(frozen=True, eq=False)
class Answer:
    """`values` is empty if no solution was found. `bound`: none is below it. `proven`: the values are optimal."""

    values: Floats
    bound: float
    proven: bool
    infeasible: bool = False


@dataclass(eq=False)
class Model:
    """A program that minimises the variable of number `objective`."""

    objective: int = -1
    _lower: list[Floats] = field(default_factory=list)
    _upper: list[Floats] = field(default_factory=list)
    _integer: list[Floats] = field(default_factory=list)
    _rows: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    _at_most: list[Floats] = field(default_factory=list)
    _num_variables: int = 0
    _num_rows: int = 0

    def variables(self, shape: tuple[int, ...], lower: ArrayLike = 0.0, upper: ArrayLike = np.inf,
                  integer: bool = False) -> Ints:
        """New variables; returns their numbers, in that shape."""
        count = int(np.prod(shape))
        for values, to in ((lower, self._lower), (upper, self._upper), (float(integer), self._integer)):
            to.append(np.broadcast_to(np.asarray(values, np.float64), shape).ravel())
        first, self._num_variables = self._num_variables, self._num_variables + count
        return np.arange(first, first + count).reshape(shape)

    def at_most(self, terms: Sequence[tuple[ArrayLike, ArrayLike]], limit: ArrayLike) -> None:
        """Rows  sum over terms of  coefficient * variable <= limit.

        A term's variables are [rows] or [rows, several], its coefficients something that broadcasts to them.
        """
        rows = np.asarray(terms[0][1]).shape[0]
        if not rows:
            return
        for coefficient, variable in terms:
            columns = np.asarray(variable).reshape(rows, -1)
            values = np.broadcast_to(np.asarray(coefficient, np.float64), np.asarray(variable).shape)
            row = np.repeat(np.arange(self._num_rows, self._num_rows + rows), columns.shape[1])
            self._rows.append((row, columns.ravel(), values.ravel()))
        self._at_most.append(np.broadcast_to(np.asarray(limit, np.float64), (rows,)))
        self._num_rows += rows

    def equal(self, terms: Sequence[tuple[ArrayLike, ArrayLike]], value: float) -> None:
        """As `at_most`, with =."""
        self.at_most(terms, value)
        self.at_most([(-np.asarray(c, np.float64), v) for c, v in terms], -value)

    def solve(self, seconds: float) -> Answer:
        """Runs HiGHS for at most that long."""
        cost = np.zeros(self._num_variables)
        cost[self.objective] = 1.0
        row, column, value = (np.concatenate(x) for x in zip(*self._rows, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._num_rows, self._num_variables))
        limits = np.concatenate(self._at_most)
        with own_output():
            result = milp(
                cost, integrality=np.concatenate(self._integer),
                bounds=Bounds(np.concatenate(self._lower), np.concatenate(self._upper)),
                constraints=LinearConstraint(matrix, -np.inf, limits),
                options={"time_limit": max(seconds, 0.01), "mip_rel_gap": RELATIVE_GAP})
        bound = result.get("mip_dual_bound")
        return Answer(
            np.empty(0) if result.x is None else result.x, -np.inf if bound is None else float(bound),
            result.status == 0, infeasible=result.status == 2)
