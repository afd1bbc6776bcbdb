"""Mixed-integer linear programs, put together row by row for HiGHS."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.solvers.highs import OUT_OF_TIME, Program
from hybridpar.placement.workload import Floats, Ints

MAX_NUMBERS = 10_000_000
"""Limit on variables and coefficients. With more, HiGHS hardly ends presolve within minutes, and
takes gigabytes."""
TOO_LARGE = "the graph is too large for integer programming on so many devices"


class TooLargeError(Exception):
    """The program has more than `MAX_NUMBERS`."""


@dataclass(eq=False)
class ProgramBuilder:
    """A program that minimises the variable of number `objective`.

    Raises: while it is put together, TooLargeError, and OutOfTime once `time.monotonic()` is past
        `deadline`; the
    message is a note for a placement.
    """

    deadline: float = np.inf
    objective: int = -1
    _lower: list[Floats] = field(default_factory=list)
    _upper: list[Floats] = field(default_factory=list)
    _integer: list[Floats] = field(default_factory=list)
    _rows: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    _at_most: list[Floats] = field(default_factory=list)
    _num_variables: int = 0
    _num_rows: int = 0
    _num_numbers: int = 0

    def expect(self, more: int) -> None:
        """Raises: TooLargeError if so many more variables or coefficients are too many;
        OutOfTime."""
        if self._num_numbers + more > MAX_NUMBERS:
            raise TooLargeError(TOO_LARGE)
        if time.monotonic() > self.deadline:
            raise OutOfTime(OUT_OF_TIME)

    def _count(self, more: int) -> None:
        self.expect(more)
        self._num_numbers += more

    def variables(
        self,
        shape: tuple[int, ...],
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        integer: bool = False,
    ) -> Ints:
        """New variables; returns their numbers, in that shape."""
        count = math.prod(shape)
        self._count(count)
        for values, to in (
            (lower, self._lower),
            (upper, self._upper),
            (float(integer), self._integer),
        ):
            to.append(np.broadcast_to(np.asarray(values, np.float64), shape).ravel())
        first = self._num_variables
        self._num_variables = self._num_variables + count
        return np.arange(first, first + count).reshape(shape)

    def at_most(self, terms: Sequence[tuple[ArrayLike, ArrayLike]], limit: ArrayLike) -> Ints:
        """Rows  sum over terms of  coefficient * variable <= limit. Returns their numbers.

        A term's variables are [rows] or [rows, several], its coefficients something that broadcasts
        to them.
        """
        rows = np.asarray(terms[0][1]).shape[0]
        first = self._num_rows
        if not rows:
            return np.arange(0)
        for coefficient, variable in terms:
            columns = np.asarray(variable).reshape(rows, -1)
            self._count(columns.size)
            values = np.broadcast_to(
                np.asarray(coefficient, np.float64), np.asarray(variable).shape
            )
            row = np.repeat(np.arange(self._num_rows, self._num_rows + rows), columns.shape[1])
            self._rows.append((row, columns.ravel(), values.ravel()))
        self._at_most.append(np.broadcast_to(np.asarray(limit, np.float64), (rows,)))
        self._num_rows += rows
        return np.arange(first, self._num_rows)

    def equal(self, terms: Sequence[tuple[ArrayLike, ArrayLike]], value: float) -> None:
        """Rows as of `at_most`, with =."""
        self.at_most(terms, value)
        self.at_most([(-np.asarray(c, np.float64), v) for c, v in terms], -value)

    def program(self) -> Program:
        """All of it."""
        cost = np.zeros(self._num_variables)
        cost[self.objective] = 1.0
        row, column, value = (np.concatenate(x) for x in zip(*self._rows, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._num_rows, self._num_variables))
        lower, upper, integer = (
            np.concatenate(x) for x in (self._lower, self._upper, self._integer)
        )
        return Program(cost, matrix, np.concatenate(self._at_most), lower, upper, integer)
