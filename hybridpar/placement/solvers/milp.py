"""Minimize the largest load by integer programming, contiguous or not.

x[c, d]            class c is on device d
high, low[e, d]    the largest and least x[c, d] over the classes c of net e, so that
                   accelerator d transfers it if they differ
L >= load[d] = sum of times * x + sum of cost(e) (high[e, d] - low[e, d])

Other objectives (Workload.objective): "overlapped" has a row for each of the two sums; "gpipe" has
L >= LF + LB, and rows of the forward part below LF and of the backward part below LB.

Contiguity: z[v, d] >= x[v, d] for forward nodes v, and along a forward edge u -> v, z[v] <= z[u]
and z[v] <= x[v] - x[u] + 1: after an edge that leaves a device, no node is on it.

Differences from the paper: classes instead of nodes, nets instead of edges; bounds of L from known
placements, which are improved two devices at a time (pairs.py), and from coverings (cover.py); and
broken symmetry between equal devices (the i-th largest class is on one of the first i).

Source: arXiv 2006.16423, figure 5 and section 5.2.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hybridpar.placement.classes import ClassGraph, backward_costs
from hybridpar.placement.ideals import OutOfTime
from hybridpar.placement.scoring import score
from hybridpar.placement.solvers.bound import work_bound
from hybridpar.placement.solvers.cover import cover_bound
from hybridpar.placement.solvers.highs import OUT_OF_TIME, Highs
from hybridpar.placement.solvers.pairs import Whole, improve_pairs
from hybridpar.placement.solvers.program import ProgramBuilder, TooLargeError
from hybridpar.placement.workload import Floats, Ints

PAIRS_SHARE = 0.4
COVER_SHARE = 0.4
"""Shares of the remaining time: for improving placements by pairs of devices, then for the bound of
coverings. The best contiguous placement is mostly far above that bound."""
GAP = 1e-6
"""Relative difference from the bound up to which a placement is optimal."""
SLACK = 1e-6
"""Relative slack of the upper bound of L, because HiGHS satisfies rows only to within 1e-6."""
SCALE = 100.0
"""Lower bound on the largest load, in the program's unit of time."""


class Solution(NamedTuple):
    """The best known placement. `device`: of each class; empty if there is none."""

    device: Ints
    bound: float
    proven: bool
    note: str = ""
    """Reason why it is not proven optimal."""


def solve_max_load(
    graph: ClassGraph, highs: Highs, start: Ints, *, contiguous: bool, deadline: float
) -> Solution:
    """Search for a placement whose largest load is below the one of `start`, which has a device for
    each class or is empty."""
    least = work_bound(graph)
    known = _largest(graph, start)
    if least >= known * (1 - GAP):
        return Solution(start, least, True)
    try:
        whole = _model(graph, contiguous, known, deadline)
    except (TooLargeError, OutOfTime) as error:
        return Solution(start, least, False, str(error))
    now = time.monotonic()
    objective = graph.workload.objective
    if len(start) and objective == "serial":
        start = improve_pairs(graph, whole, start, highs, now + PAIRS_SHARE * (deadline - now))
        known = _largest(graph, start)
        now = time.monotonic()
    if not contiguous and objective != "overlapped":  # a covering's loads are sums
        least = cover_bound(graph, known, now + COVER_SHARE * (deadline - now), highs)
    if least >= known * (1 - GAP):
        return Solution(start, least, True)
    return _solve_whole(graph, whole, highs, Solution(start, least, False), known, deadline)


def _solve_whole(
    graph: ClassGraph, whole: Whole, highs: Highs, before: Solution, known: float, deadline: float
) -> Solution:
    model = whole.model
    x = whole.x
    unit = whole.unit
    k = graph.workload.num_accelerators
    while time.monotonic() < deadline:
        program = model.program()
        program.upper[x] = _told_apart(graph)
        program.lower[model.objective] = before.bound / unit
        program.upper[model.objective] = known * (1 + SLACK) / unit
        answer = highs.solve(program, deadline)
        if answer.infeasible:
            return before._replace(bound=known, proven=True)
        bound = max(answer.bound * unit, before.bound)
        if not len(answer.values):
            return before._replace(bound=bound, note=answer.note)
        device = answer.values[x].argmax(1)
        full = _overfull(graph, device)
        if not full:
            better = answer.proven or _largest(graph, device) < known
            return Solution(device if better else before.device, bound, answer.proven, answer.note)
        try:
            for classes in full:  # by less than HiGHS can see, so forbid exactly these classes
                model.at_most([(1.0, x[classes, :k].T)], len(classes) - 1)
        except (TooLargeError, OutOfTime) as error:
            return before._replace(bound=bound, note=str(error))
    return before._replace(note=OUT_OF_TIME)


def _largest(graph: ClassGraph, device: Ints) -> float:
    return score(graph.workload, graph.devices(device)).objective if len(device) else np.inf


def _overfull(graph: ClassGraph, device: Ints) -> list[Ints]:
    """Return the classes of each accelerator whose memory does not suffice."""
    used = np.bincount(device, graph.size, int(device.max()) + 1)[: graph.workload.num_accelerators]
    return [np.flatnonzero(device == d) for d in np.flatnonzero(used > graph.workload.room)]


def _model(graph: ClassGraph, contiguous: bool, known: float, deadline: float = np.inf) -> Whole:
    """Return the program for loads up to `known`; longer times count as twice `known`.

    Raises:
        TooLargeError: The program is too large.
        OutOfTime: The deadline passed.
    """
    unit = work_bound(graph) / SCALE or 1.0

    def scaled(times: Floats) -> Floats:
        return np.minimum(np.where(np.isinf(times), 0.0, times), 2 * known) / unit

    accelerator = scaled(graph.accelerator_time)
    cpu = scaled(graph.cpu_time)
    net_cost = scaled(graph.net_cost)
    w = graph.workload
    n = graph.num_classes
    k = graph.workload.num_accelerators
    num_devices = k + w.num_cpus
    model = ProgramBuilder(deadline)
    model.expect(n * num_devices)
    x = model.variables((n, num_devices), 0.0, _allowed(graph), integer=True)
    model.equal([(1.0, x)], 1.0)
    if graph.size.sum() > w.memory:
        model.at_most([(np.minimum(graph.size / w.memory, 2.0), x[:, :k].T)], 1.0)
    high = model.variables((len(graph.nets), k), 0.0, 1.0)
    low = model.variables((len(graph.nets), k), 0.0, 1.0)
    net = np.array([e for e, members in enumerate(graph.nets) for _ in members], np.int64)
    member = np.array([c for members in graph.nets for c in members], np.int64)
    if len(net):
        for d in range(k):
            model.at_most([(1.0, x[member, d]), (-1.0, high[net, d])], 0.0)
            model.at_most([(1.0, low[net, d]), (-1.0, x[member, d])], 0.0)
    load = model.variables((1,))
    model.objective = int(load[0])
    rows = []

    def add_load(d: int, work: Floats | None, moved: Floats | None, most: Ints) -> None:
        """Limit the sum of a device's times and transfers by a variable."""
        terms: list[tuple[ArrayLike, Ints]] = [] if work is None else [(work, x[None, :, d])]
        terms.append((-1.0, most[None]))
        if moved is not None and d < k and len(net):
            terms += [(moved, high[None, :, d]), (-moved, low[None, :, d])]
        if len(terms) > 1:
            rows.append(model.at_most(terms, 0.0))

    if w.objective == "gpipe":
        backward = tuple(map(scaled, backward_costs(graph)))
        forward = tuple(
            np.maximum(whole - back, 0.0)
            for whole, back in zip((accelerator, cpu, net_cost), backward, strict=True)
        )
        passes = model.variables((2,))
        model.at_most([(1.0, passes[None]), (-1.0, load[None])], 0.0)
        for (on_accelerator, on_cpu, moved), most in zip(
            (forward, backward), passes[:, None], strict=True
        ):
            for d in range(num_devices):
                add_load(d, on_accelerator if d < k else on_cpu, moved, most)
    else:
        for d in range(num_devices):
            work = accelerator if d < k else cpu
            if w.objective == "overlapped":
                add_load(d, work, None, load)
                add_load(d, None, net_cost, load)
            else:
                add_load(d, work, net_cost, load)
    if contiguous:
        _contiguous(model, graph, x)
    return Whole(model, x, np.concatenate(rows), unit)


def _allowed(graph: ClassGraph) -> Floats:
    """Return 1 where a class may be on a device."""
    upper = np.ones((graph.num_classes, graph.workload.num_accelerators + graph.workload.num_cpus))
    upper[:, : graph.workload.num_accelerators] = np.isfinite(graph.accelerator_time)[:, None]
    return upper


def _told_apart(graph: ClassGraph) -> Floats:
    """Return `_allowed` with broken symmetry: among equal devices, the i-th largest class takes one
    of the first i."""
    k = graph.workload.num_accelerators
    num_cpus = graph.workload.num_cpus
    upper = _allowed(graph)
    largest = np.argsort(-np.minimum(graph.accelerator_time, graph.cpu_time), kind="stable")
    for first, count in ((0, k), (k, num_cpus)):
        for i, c in enumerate(largest[:count]):
            upper[c, first + i + 1 : first + count] = 0.0
    return upper


def _contiguous(model: ProgramBuilder, graph: ClassGraph, x: Ints) -> None:
    w = graph.workload
    pairs = [(u, v) for u, v in w.edges.tolist() if not w.backward[u] and not w.backward[v]]
    if not pairs:
        return
    z = model.variables((w.num_nodes, x.shape[1]), 0.0, 1.0)
    of_node = x[graph.class_of]
    forward = np.flatnonzero(~w.backward)
    u, v = np.array(pairs).T
    for d in range(x.shape[1]):
        model.at_most([(1.0, of_node[forward, d]), (-1.0, z[forward, d])], 0.0)
        model.at_most([(1.0, z[v, d]), (-1.0, z[u, d])], 0.0)
        other = graph.class_of[u] != graph.class_of[v]  # an edge within a class leaves no device
        model.at_most(
            [(1.0, z[v[other], d]), (-1.0, of_node[v[other], d]), (1.0, of_node[u[other], d])], 1.0
        )
