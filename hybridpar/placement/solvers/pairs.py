"""Better placements from good ones: what two devices hold is dealt out anew between them by integer
programming.

One of the two is always the device with the largest load. Everything else stays where it is, which
leaves a small program, where a whole graph's finds nothing better in minutes. Ends when no pair can
be improved.
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
"""Relative; less is within HiGHS's tolerances."""
ENOUGH = 2e-4
"""Relative: a pair need not be better than within that of its best."""


class Whole(NamedTuple):
    """A graph's program, in which equal devices are not told apart.

    `x` [classes, devices]: variables; `loads` [devices]: the rows  load - objective <= 0; `unit`:
    of its times.
    """

    model: ProgramBuilder
    x: Ints
    loads: Ints
    unit: float


def improve_pairs(
    graph: ClassGraph, whole: Whole, device: Ints, highs: Highs, deadline: float
) -> Ints:
    """A placement at least as good as `device`, a device for each class, looked for until
    `deadline` (monotonic)."""
    program = whole.model.program()
    x = whole.x
    patience = PATIENCE * (deadline - time.monotonic())
    current = _loads(graph, device)
    hopeless: set[tuple[bytes, bytes]] = (
        set()
    )  # what two devices hold, of which nothing better was found
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
        with suppress(EOFError, OSError):  # then `solve` says why
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
    """Only what the two devices hold may move, between them, and only their loads count, which must
    be `below` that."""
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
    lower[objective], upper[objective] = 0.0, below
    limits[np.delete(loads, pair)] = np.inf
    return replace(program, upper=upper, lower=lower, limits=limits, gap=ENOUGH)


def _loads(graph: ClassGraph, device: Ints) -> Floats:
    return score(graph.workload, graph.devices(device)).loads


def _fits(graph: ClassGraph, device: Ints) -> bool:
    k = graph.workload.num_accelerators
    return bool((np.bincount(device, graph.size, k)[:k] <= graph.workload.room).all())
