"""Mixed-integer linear programs for HiGHS, assembled row by row."""

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
"""Limit on variables and coefficients. Above it HiGHS hardly ends presolve within minutes, and
takes gigabytes."""
TOO_LARGE = "the graph is too large for integer programming on so many devices"


class TooLargeError(Exception):
    """The program has more than `MAX_NUMBERS` variables or coefficients."""


@dataclass(eq=False)
class ProgramBuilder:
    """A program that minimises the variable of number `objective`.

    While it is assembled, it raises TooLargeError, and OutOfTime once `time.monotonic()` is past
    `deadline`; the message serves as a placement's note.
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
        """Raise TooLargeError if `more` further variables or coefficients are too many, or
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
        """Add variables, and return their numbers in the given shape."""
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
        """Add rows  sum over terms of  coefficient * variable <= limit, and return their numbers.

        A term's variables are [rows] or [rows, several]; its coefficients must broadcast to them.
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
        """Add rows like `at_most`, with = instead of <=."""
        self.at_most(terms, value)
        self.at_most([(-np.asarray(c, np.float64), v) for c, v in terms], -value)

    def program(self) -> Program:
        """Return the complete program."""
        cost = np.zeros(self._num_variables)
        cost[self.objective] = 1.0
        row, column, value = (np.concatenate(x) for x in zip(*self._rows, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self._num_rows, self._num_variables))
        lower, upper, integer = (
            np.concatenate(x) for x in (self._lower, self._upper, self._integer)
        )
        return Program(cost, matrix, np.concatenate(self._at_most), lower, upper, integer)
