"""The least largest load by integer programming, contiguous or not.

    x[c, d]            class c is on device d
    high, low[e, d]    the largest and least x[c, d] over the classes c of net e, so that accelerator d transfers it if
                       they differ
    L >= load[d] = sum of times * x + sum of cost(e) (high[e, d] - low[e, d])

Contiguity: z[v, d] >= x[v, d] for forward nodes v, and along a forward edge u -> v, z[v] <= z[u] and
z[v] <= x[v] - x[u] + 1: after an edge that leaves a device there is nothing of it.

Beyond the paper: classes instead of nodes, nets instead of edges, bounds of L from placements known before and from
coverings (cover.py), and equal devices are told apart (the i-th largest class is on one of the first i).

Source: arXiv 2006.16423, figure 5 and section 5.2.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from hybridpar.planner.placement.bound import work_bound
from hybridpar.planner.placement.classes import ClassGraph
from hybridpar.planner.placement.cover import cover_bound
from hybridpar.planner.placement.model import Model
from hybridpar.planner.placement.workload import Floats, Ints

COVER_SHARE = 0.4
"""Of the time limit: for the bound that comes first. The best contiguous placement is mostly far above it."""
GAP = 1e-6
"""Relative: what is so little above the bound is the best."""
SLACK = 1e-6
"""Relative, of the upper bound of L: HiGHS keeps rows only to within 1e-6."""


class Solution(NamedTuple):
    """`device` of each class is empty if nothing better than what was known before was found."""

    device: Ints
    bound: float
    proven: bool


def solve_max_load(graph: ClassGraph, *, contiguous: bool, known: float, seconds: float) -> Solution:
    """Looks for a placement whose largest load is below `known` (which may be infinite)."""
    start = time.monotonic()
    end, least = start + seconds, work_bound(graph)
    if not contiguous:
        least = cover_bound(graph, known, start + COVER_SHARE * seconds)
    if least >= known * (1 - GAP):
        return Solution(np.empty(0, np.int64), least, True)
    model, x = _model(graph, contiguous, known, least)
    while True:
        answer = model.solve(end - time.monotonic())
        bound = max(answer.bound, least)
        if answer.infeasible:
            return Solution(np.empty(0, np.int64), known, True)
        if not len(answer.values):
            return Solution(np.empty(0, np.int64), bound, False)
        device = answer.values[x].argmax(1)
        full = _overfull(graph, device)
        if not full:
            return Solution(device, bound, answer.proven)
        for classes in full:  # by less than HiGHS can see: forbid just that
            k = graph.workload.num_accelerators
            model.at_most([(1.0, x[classes, :k].T)], len(classes) - 1)


def _overfull(graph: ClassGraph, device: Ints) -> list[Ints]:
    """The classes of each accelerator whose memory does not suffice."""
    used = np.bincount(device, graph.size, int(device.max()) + 1)[:graph.workload.num_accelerators]
    return [np.flatnonzero(device == d) for d in np.flatnonzero(used > graph.workload.room)]


def _model(graph: ClassGraph, contiguous: bool, known: float, least: float) -> tuple[Model, Ints]:
    w, n, k = graph.workload, graph.num_classes, graph.workload.num_accelerators
    num_devices = k + w.num_cpus
    model = Model()
    x = model.variables((n, num_devices), 0.0, _allowed(graph), integer=True)
    model.equal([(1.0, x)], 1.0)
    if graph.size.sum() > w.memory:
        model.at_most([(graph.size / w.memory, x[:, :k].T)], 1.0)
    high = model.variables((len(graph.nets), k), 0.0, 1.0)
    low = model.variables((len(graph.nets), k), 0.0, 1.0)
    net = np.array([e for e, members in enumerate(graph.nets) for _ in members], np.int64)
    member = np.array([c for members in graph.nets for c in members], np.int64)
    if len(net):
        for d in range(k):
            model.at_most([(1.0, x[member, d]), (-1.0, high[net, d])], 0.0)
            model.at_most([(1.0, low[net, d]), (-1.0, x[member, d])], 0.0)
    load = model.variables((1,), least, known * (1 + SLACK) if np.isfinite(known) else np.inf)
    model.objective = int(load[0])
    accelerator = np.where(np.isinf(graph.accelerator_time), 0.0, graph.accelerator_time)
    for d in range(num_devices):
        terms = [(accelerator if d < k else graph.cpu_time, x[None, :, d]), (-1.0, load[None])]
        if d < k and len(net):
            terms += [(graph.net_cost, high[None, :, d]), (-graph.net_cost, low[None, :, d])]
        model.at_most(terms, 0.0)
    if contiguous:
        _contiguous(model, graph, x)
    return model, x


def _allowed(graph: ClassGraph) -> Floats:
    """1 where a class may be on a device. Of equal devices, the i-th largest class takes one of the first i."""
    n, k, num_cpus = graph.num_classes, graph.workload.num_accelerators, graph.workload.num_cpus
    upper = np.ones((n, k + num_cpus))
    upper[:, :k] = np.isfinite(graph.accelerator_time)[:, None]
    largest = np.argsort(-np.minimum(graph.accelerator_time, graph.cpu_time), kind="stable")
    for first, count in ((0, k), (k, num_cpus)):
        for i, c in enumerate(largest[:count]):
            upper[c, first + i + 1:first + count] = 0.0
    return upper


def _contiguous(model: Model, graph: ClassGraph, x: Ints) -> None:
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
        other = graph.class_of[u] != graph.class_of[v]  # an edge inside a class leaves no device
        model.at_most([(1.0, z[v[other], d]), (-1.0, of_node[v[other], d]), (1.0, of_node[u[other], d])], 1.0)
