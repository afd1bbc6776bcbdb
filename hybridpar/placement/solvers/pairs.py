"""Improve good placements: redistribute the classes of two devices between them by integer
programming.

One of the two is always the device with the largest load. Everything else stays, which leaves a
small program, where a program of the full graph finds nothing better in minutes. Ends when no pair
can be improved.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.scoring import score
from hybridpar.placement.solvers.highs import Highs, Program
from hybridpar.placement.solvers.program import ProgramBuilder
from hybridpar.placement.workload import Floats, Ints

PATIENCE = 0.05
"""Share of all the time for one pair."""
GAIN = 1e-6
"""Relative gain that counts; less is within HiGHS's tolerances."""
ENOUGH = 2e-4
"""Relative gap to the best solution of a pair that is good enough."""


class Whole(NamedTuple):
    """A graph's program without broken symmetry between equal devices.

    Args:
        x: Variables [classes, devices].
        loads: Numbers of the rows  load - objective <= 0  [devices].
        unit: Unit of time.
    """

    model: ProgramBuilder
    x: Ints
    loads: Ints
    unit: float


def improve_pairs(
    graph: ClassGraph, whole: Whole, device: Ints, highs: Highs, deadline: float
) -> Ints:
    """Return a placement at least as good as `device` (a device for each class), found until
    `deadline` (monotonic)."""
    program = whole.model.program()
    x = whole.x
    patience = PATIENCE * (deadline - time.monotonic())
    current = _loads(graph, device)
    hopeless: set[tuple[bytes, bytes]] = (
        set()
    )  # sets of classes on two devices for which nothing better was found
    while time.monotonic() < deadline:
        worst = int(current.argmax())
        mine = (device == worst).tobytes()
        others = [
            d
            for d in current.argsort(kind="stable").tolist()
            if d != worst and (mine, (device == d).tobytes()) not in hopeless
        ]
        if not others:
            break
        other = others[0]
        below = current[worst] / whole.unit * (1 - GAIN)
        part = _of_pair(program, x, whole.loads, device, [worst, other], below)
        with suppress(EOFError, OSError):  # `solve` then reports why
            highs.wait_until_ready(deadline)
        answer = highs.solve(part, min(time.monotonic() + patience, deadline))
        changed = answer.values[x].argmax(1) if len(answer.values) else device
        found = _loads(graph, changed)
        if max(found[worst], found[other]) < current[worst] and _fits(graph, changed):
            device = changed
            current = found
        else:
            hopeless.add((mine, (device == other).tobytes()))
    return device


def _of_pair(
    program: Program, x: Ints, loads: Ints, device: Ints, pair: list[int], below: float
) -> Program:
    """Return a program in which only the classes of two devices may move, between these two, and
    only their loads count, which must be below `below`."""
    upper = program.upper.copy()
    lower = program.lower.copy()
    limits = program.limits.copy()
    free = np.isin(device, pair)
    rows = np.arange(len(device))
    keep = np.zeros(x.shape, np.bool_)
    keep[rows, device] = True
    keep[np.ix_(np.flatnonzero(free), np.array(pair))] = True
    upper[x[~keep]] = 0.0
    lower[x[rows[~free], device[~free]]] = 1.0
    objective = int(program.cost.argmax())
    lower[objective] = 0.0
    upper[objective] = below
    limits[np.delete(loads, pair)] = np.inf
    return replace(program, upper=upper, lower=lower, limits=limits, gap=ENOUGH)


def _loads(graph: ClassGraph, device: Ints) -> Floats:
    return score(graph.workload, graph.devices(device)).loads


def _fits(graph: ClassGraph, device: Ints) -> bool:
    k = graph.workload.num_accelerators
    return bool((np.bincount(device, graph.size, k)[:k] <= graph.workload.room).all())
