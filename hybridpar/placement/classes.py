"""A workload in the form that the placement solvers use: colour classes, their order, and the
transfers between them.

A class is a set of operators that must share a device: the forward and backward nodes of one
colour. In a pipeline, colours on a common cycle form one class, too. The costs of a class are sums.
Two relations hold between classes:

edges    u -> v: a forward node of v reads a forward node of u, so no device may hold u after v.
         A class without forward nodes gets its edges from its backward nodes, reversed, because
         a layer's backward nodes run in reverse order.
nets     all classes that touch one output: its producer's and its readers'. An accelerator
         that holds some of them, but not all, pays the transfer once, to send or to receive. So
         the transfer time of a set S is

             sum of cost(e) over nets e with  0 < |e & S| < |e|

Source: arXiv 2006.16423, sections 3 and 5.3 (training), appendix B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from hybridpar.placement.workload import Floats, Ints, Workload, order_of


@dataclass(frozen=True, eq=False)
class ClassGraph:
    """n classes, and the nets between them. For pipelines, edges lead from smaller to larger
    numbers.

    Shapes: costs [n]; `class_of` [nodes of the workload]; `net_cost` [number of nets].
    """

    workload: Workload
    class_of: Ints
    cpu_time: Floats
    accelerator_time: Floats
    """Infinite if an accelerator cannot run one of the nodes, or lacks the memory for the class."""
    size: Floats
    predecessors: tuple[tuple[int, ...], ...]
    nets: tuple[tuple[int, ...], ...]
    """Each net is sorted and has at least two classes."""
    net_cost: Floats

    @property
    def num_classes(self) -> int:
        return len(self.size)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        after: list[list[int]] = [[] for _ in range(self.num_classes)]
        for v, before in enumerate(self.predecessors):
            for u in before:
                after[u].append(v)
        return tuple(tuple(x) for x in after)

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets of each class."""
        found: list[list[int]] = [[] for _ in range(self.num_classes)]
        for e, net in enumerate(self.nets):
            for v in net:
                found[v].append(e)
        return tuple(tuple(x) for x in found)

    @cached_property
    def incidence(self) -> csr_array:
        """Matrix of classes (rows) by nets (columns): 1.0 if the class is in the net."""
        rows = [v for net in self.nets for v in net]
        columns = [e for e, net in enumerate(self.nets) for _ in net]
        return csr_array(
            (np.ones(len(rows)), (rows, columns)), shape=(self.num_classes, len(self.nets))
        )

    def reordered(self, order: Sequence[int]) -> ClassGraph:
        """Return this graph with its classes renumbered: order[i] becomes number i. Edges must lead
        to larger numbers."""
        number = np.empty(self.num_classes, np.int64)
        number[list(order)] = np.arange(self.num_classes)
        renamed = lambda members: tuple(sorted(number[list(members)].tolist()))  # noqa: E731
        return ClassGraph(
            self.workload,
            number[self.class_of],
            self.cpu_time[order],
            self.accelerator_time[order],
            self.size[order],
            tuple(renamed(self.predecessors[c]) for c in order),
            tuple(map(renamed, self.nets)),
            self.net_cost,
        )

    def devices(self, of_class: Sequence[int] | Ints) -> Ints:
        """Return a device for each node of the workload, from one for each class."""
        return np.asarray(of_class, np.int64)[self.class_of]

    def of_classes(self, devices: Ints) -> Ints:
        """Return a device for each class, from one for each node of a placement that keeps classes
        together."""
        found = np.empty(self.num_classes, np.int64)
        found[self.class_of] = devices
        return found


def class_graph(
    workload: Workload,
    *,
    pipeline: bool = True,
    merge: Iterable[Iterable[int]] = (),
    merge_leaves: bool = True,
) -> ClassGraph:
    """Return the classes of a workload.

    Args:
        workload: The workload.
        pipeline: Whether the devices form a pipeline; otherwise classes on a common cycle may be on
            several devices.
        merge: Groups of nodes (positions) that must share a class, too.
        merge_leaves: Whether to merge a class that costs no time and accesses only one other class
            into that class, if this cannot make any placement worse.
    """
    w = workload
    label = _labels(w, merge)
    if pipeline:
        label = _fuse_cycles(w, label)
    if merge_leaves:
        label = _merge_leaves(w, label)
    n = int(label.max()) + 1
    order = order_of(n, _edges(w, label)) if pipeline else list(range(n))
    assert len(order) == n, "a cycle is left"
    number = np.empty(n, np.int64)
    number[order] = np.arange(n)
    class_of = number[label]
    total = lambda values: np.bincount(class_of, values, n).astype(np.float64)  # noqa: E731
    size = total(w.size)
    unsupported = total((~w.supported).astype(float)) > 0
    before: list[set[int]] = [set() for _ in range(n)]
    for u, v in _edges(w, class_of):
        before[v].add(u)
    nets, cost = _nets(w, class_of)
    return ClassGraph(
        w,
        class_of,
        total(w.cpu_time),
        np.where(unsupported | (size > w.room), np.inf, total(w.accelerator_time)),
        size,
        tuple(tuple(sorted(x)) for x in before),
        nets,
        cost,
    )


def backward_costs(graph: ClassGraph) -> tuple[Floats, Floats, Floats]:
    """Return the part of the costs that backward nodes and their outputs have: times on an
    accelerator and on a CPU, and costs of nets.

    Shapes: [n], [n], [number of nets].
    """
    w = graph.workload
    accelerator, cpu = (
        np.bincount(graph.class_of, time * w.backward, graph.num_classes).astype(np.float64)
        for time in (w.accelerator_time, w.cpu_time)
    )
    number = {net: e for e, net in enumerate(graph.nets)}
    cost = np.zeros(len(graph.nets))
    for u, net in _net_of_outputs(w, graph.class_of):
        if w.backward[u]:
            cost[number[net]] += float(w.transfer_time[u])
    return accelerator, cpu, cost


def _labels(w: Workload, merge: Iterable[Iterable[int]]) -> Ints:
    """Return a class for each node, numbered from 0: its colour, together with the nodes to be
    merged."""
    colour = np.unique(w.colour, return_inverse=True)[1]
    links = [(colour[group[0]], colour[v]) for group in map(list, merge) for v in group[1:]]
    if not links:
        return colour.astype(np.int64)
    return _components(int(colour.max()) + 1, links, "weak")[colour]


def _components(n: int, edges: Iterable[tuple[int, int]], connection: str) -> Ints:
    """Return the component of each of n vertices, numbered by their first vertices."""
    pairs = np.array(list(edges), np.int64).reshape(-1, 2)
    graph = csr_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    count, found = connected_components(graph, connection=connection)
    first = np.full(count, n)
    np.minimum.at(first, found, np.arange(n))
    return np.unique(first[found], return_inverse=True)[1].astype(np.int64)


def _edges(w: Workload, label: Ints) -> list[tuple[int, int]]:
    """Return the edges between classes: edges between forward nodes, and reversed edges of classes
    without forward nodes."""
    u, v = w.edges.T
    a = label[u]
    b = label[v]
    orphan = np.bincount(label, ~w.backward, int(label.max()) + 1) == 0
    forward = ~w.backward[v] & (a != b)
    mirrored = w.backward[u] & w.backward[v] & (orphan[a] | orphan[b]) & (a != b)
    pairs = np.concatenate([np.stack([a, b], 1)[forward], np.stack([b, a], 1)[mirrored]])
    return [(int(x), int(y)) for x, y in np.unique(pairs, axis=0)]


def _fuse_cycles(w: Workload, label: Ints) -> Ints:
    """Merge classes on a common cycle into one. The edges, and so their direction, are determined
    before."""
    return _components(int(label.max()) + 1, _edges(w, label), "strong")[label]


def _nets(w: Workload, class_of: Ints) -> tuple[tuple[tuple[int, ...], ...], Floats]:
    """Return nets and their costs; outputs that touch the same classes share one net."""
    cost: dict[tuple[int, ...], float] = {}
    for u, net in _net_of_outputs(w, class_of):
        cost[net] = cost.get(net, 0.0) + float(w.transfer_time[u])
    return tuple(cost), np.array(list(cost.values()), np.float64)


def _net_of_outputs(w: Workload, class_of: Ints) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each node whose output may have to be transferred, and the classes that touch it."""
    touched: list[set[int]] = [set() for _ in range(w.num_nodes)]
    for u, v in w.edges.tolist():
        touched[u].add(int(class_of[v]))
    for u in np.flatnonzero(w.transfer_time > 0).tolist():
        net = tuple(sorted(touched[u] | {int(class_of[u])}))
        if len(net) > 1:
            yield u, net


# -- leaves


def _merge_leaves(w: Workload, label: Ints) -> Ints:
    """Merge a class into its only neighbour if every placement stays as good: see `_harmless`.

    Source: the authors' program, which merges more; on their files the result is the same.
    """
    n = int(label.max()) + 1
    time = np.bincount(label, w.cpu_time + w.accelerator_time, n)
    size = np.bincount(label, w.size, n)
    supported = np.bincount(label, ~w.supported, n) == 0
    roomy = bool(w.size.sum() <= w.room)  # then memory is no constraint
    neighbours: list[set[int]] = [set() for _ in range(n)]
    for u, v in _edges(w, label):
        neighbours[u].add(v)
        neighbours[v].add(u)
    nets = [set(net) for net in _nets(w, label)[0]]
    nets_of: list[list[set[int]]] = [[] for _ in range(n)]
    for net in nets:
        for v in net:
            nets_of[v].append(net)
    into = list(range(n))
    waiting = list(range(n))
    while waiting:
        v = waiting.pop()
        if into[v] != v or len(neighbours[v]) != 1 or time[v] > 0:
            continue
        (u,) = neighbours[v]
        if not (
            (roomy or size[v] == 0)
            and (supported[v] or not supported[u])
            and all(u in net for net in nets_of[v])
        ):
            continue
        into[v] = u
        size[u] += size[v]
        neighbours[u].discard(v)
        for net in nets_of[v]:
            net.discard(v)
        waiting.append(u)
    return np.unique(np.array([_root(into, v) for v in range(n)])[label], return_inverse=True)[
        1
    ].astype(np.int64)


def _root(into: list[int], v: int) -> int:
    while into[v] != v:
        v = into[v]
    return v
