"""Times of one sample that no placement can beat: of paths, and of a small integer program that knows devices by kind.

A placement says which accelerator, and which of its calls; the program knows only what is on accelerators at all:

    y[c]        class c of nodes that share a device is on one of the accelerators, else on CPUs
    done[v]     when v has run, its output not yet moved out of a call
    calls[v]    calls that paths to v have been through, which come back to none of them

    done[v] >= done[u] + time of v there + what moves u's output where one of both is on an accelerator, the other not
    the same, output moved out and in, where both are on accelerators and do not fit on one
    calls[v] >= calls[u] + 1 where v is on an accelerator, u is not

So it has neither the big constants nor the equal solutions of the program that places (latency_milp.py), and is solved
in seconds where that one's bound does not leave the path's.
"""

from __future__ import annotations

import time

import numpy as np

from hybridpar.planner.placement.classes import ClassGraph
from hybridpar.planner.placement.highs import Highs
from hybridpar.planner.placement.ideals import OutOfTime
from hybridpar.planner.placement.program import ProgramBuilder, TooLargeError
from hybridpar.planner.placement.workload import Floats, Ints, Workload, order_of

SCALE = 1e3
"""The time in which everything must end, in the program's unit."""
PRICES = 64
"""Prices of a byte that are tried for the bound."""


def relaxed_bound(colours: ClassGraph, slots: int, horizon: float, deadline: float, highs: Highs) -> float:
    """A latency that no placement is below, at most `horizon`, within which there is one; 0 where there is no time.

    colours: of what must share a device. slots: calls of an accelerator.
    """
    try:
        program = _relaxed(colours, slots, horizon / SCALE, deadline)
    except (TooLargeError, OutOfTime):
        return 0.0
    answer = highs.solve(program.program(), deadline)
    return horizon if answer.infeasible else min(horizon, max(0.0, answer.bound * horizon / SCALE))


def _relaxed(colours: ClassGraph, slots: int, unit: float, deadline: float) -> ProgramBuilder:
    w, class_of = colours.workload, colours.class_of
    n, k, count = w.num_nodes, w.num_accelerators, int(class_of.max()) + 1
    cpu, accelerator, moved = (  # what takes too long takes twice too long
        np.minimum(times / unit, 2 * SCALE) for times in (w.cpu_time, w.accelerator_time, w.transfer_time))
    size = np.bincount(class_of, w.size / w.room, count)
    allowed = (np.bincount(class_of, ~w.supported, count) == 0) & (size <= 1)
    accelerator = np.where(allowed[class_of], accelerator, 0.0)
    more = accelerator - cpu
    model = ProgramBuilder(deadline)
    y = model.variables((count,), float(not w.num_cpus), np.maximum(allowed, not w.num_cpus), integer=True)
    done, end = model.variables((n,), 0.0, SCALE), model.variables((1,), 0.0, SCALE)
    calls = model.variables((n,), 0.0, float(k * slots))
    model.objective, on = int(end[0]), y[class_of]
    model.at_most([(size[None] / k, y[None])], 1.0)
    if len(large := y[size > 0.5]):  # no two of these are on one
        model.at_most([(1.0, large[None])], float(k))
    model.at_most([(more, on), (-1.0, done)], -cpu)
    model.at_most([(1.0, on), (-1.0, calls)], 0.0)

    def run_after(pairs: Ints, into: float, out: float, both: float) -> None:
        """The later of each pair has run so long after the earlier, by where they are: `into`, `out` and `both` times
        what moves the output, as v is on an accelerator, as u is, and as they are on two."""
        if len(pairs):
            a, b = pairs.T
            model.at_most([(1.0, done[a]), (more[b] + into * moved[a], on[b]), (out * moved[a], on[a]),
                           (-1.0, done[b])], both * moved[a] - cpu[b])

    edges = np.asarray(w.edges)
    apart = edges[class_of[edges[:, 0]] != class_of[edges[:, 1]]]
    run_after(edges, 0, 0, 0)
    run_after(apart, 1, -1, 0)
    run_after(apart, -1, 1, 0)
    run_after(apart[size[class_of[apart]].sum(1) > 1], 2, 2, 2)
    if len(edges):
        u, v = edges.T
        model.at_most([(1.0, calls[u]), (-1.0, calls[v])], 0.0)
        model.at_most([(1.0, calls[u]), (1.0, on[v]), (-1.0, on[u]), (-1.0, calls[v])], 0.0)
    model.at_most([(1.0, done), (-1.0, np.full(n, end[0]))], 0.0)
    model.at_most([(accelerator[None] / k, on[None]), (-1.0, end[None])], 0.0)
    return model


def path_bound(colours: ClassGraph, deadline: float) -> float:
    """The longest path, every node on the device that is best at it, and without transfers.

    Where accelerators cannot hold everything, a byte of theirs has a price, and all that they hold is given back: a
    bound whatever the price is (the Lagrangian relaxation of their memory), so the best of `PRICES` counts, or of
    those that were tried until `deadline`.
    """
    w = colours.workload
    runs = np.isfinite(colours.accelerator_time)[colours.class_of]  # what must be with it fits an accelerator too
    accelerator = np.where(runs, w.accelerator_time, np.inf)
    cpu = w.cpu_time if w.num_cpus else np.full(w.num_nodes, np.inf)
    order, room = _in_order(w), w.num_accelerators * w.room
    prices = np.zeros(1)
    if w.num_cpus and w.size.sum() > room:
        worth = (cpu - accelerator)[runs & (w.size > 0)] / w.size[runs & (w.size > 0)]
        prices = np.unique(np.quantile(np.append(np.maximum(worth, 0.0), 0.0), np.linspace(0, 1, PRICES)))
    bound = 0.0
    for price in prices:
        bound = max(bound, _longest_path(np.minimum(accelerator + price * w.size, cpu), order) - price * room)
        if time.monotonic() > deadline:
            break
    return bound


def _longest_path(times: Floats, order: list[tuple[int, list[int]]]) -> float:
    done = times.tolist()
    for v, before in order:
        done[v] += max((done[u] for u in before), default=0.0)
    return max(done)


def _in_order(w: Workload) -> list[tuple[int, list[int]]]:
    """Nodes, each after all that it reads."""
    before: list[list[int]] = [[] for _ in range(w.num_nodes)]
    for u, v in w.edges.tolist():
        before[v].append(u)
    return [(v, before[v]) for v in order_of(w.num_nodes, w.edges.tolist())]
