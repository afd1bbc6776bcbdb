"""Baselines for comparison: one accelerator, greedy packing, and PipeDream's optimizer."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hybridpar.errors import config_error
from hybridpar.placement.classes import ClassGraph
from hybridpar.placement.workload import Ints, Workload


def one_accelerator(workload: Workload) -> Ints:
    """Put everything on accelerator 0. Raises: ConfigError if it cannot run or hold everything."""
    if not workload.supported.all():
        node = workload.ids[int((~workload.supported).argmax())]
        raise config_error(
            "solver", "one-accelerator", f"no accelerator can run node {node}", "dpl"
        )
    if (total := float(workload.size.sum())) > workload.room:
        raise config_error(
            "solver",
            "one-accelerator",
            f"the graph takes {total:.0f} bytes, an accelerator has {workload.memory:.0f}",
            "dpl",
        )
    return np.zeros(workload.num_nodes, np.int64)


def greedy(graph: ClassGraph, share: float) -> Ints | None:
    """Assign classes in order: each accelerator takes classes until its memory is full or its time
    reaches `share`.

    Classes that cannot run on accelerators, or that come when all are full, go to the first CPU.
    Returns a device for each class, or None if classes remain and there is no CPU.

    Source: arXiv 2006.16423, appendix F, where only memory ends an accelerator's turn: `share` =
    infinity.
    """
    w = graph.workload
    device = np.empty(graph.num_classes, np.int64)
    d = 0
    size = 0.0
    load = 0.0
    for c in range(graph.num_classes):
        more = float(graph.accelerator_time[c])
        bytes_more = float(graph.size[c])
        if np.isinf(more):
            device[c] = w.num_accelerators
            continue
        fits = size + bytes_more <= w.room
        if d < w.num_accelerators and (
            not fits or (load + more / 2 > share and d + 1 < w.num_accelerators)
        ):
            d = d + 1
            size = 0.0
            load = 0.0
        device[c] = d  # once all are full, number k is the first CPU
        size = size + bytes_more
        load = load + more
    return device if w.num_cpus or device.max() < w.num_accelerators else None


def packed_evenly(graph: ClassGraph) -> Ints | None:
    """Run `greedy` with equal shares of the work for all accelerators."""
    finite = graph.accelerator_time[np.isfinite(graph.accelerator_time)]
    return greedy(graph, float(finite.sum()) / graph.workload.num_accelerators)


def pipedream_groups(workload: Workload, ignored: Collection[int] | None = None) -> list[list[int]]:
    """Return groups of nodes (positions) that PipeDream's optimizer keeps together before it splits
    a line of layers.

    In the graph of colour classes, forward and backward apart, the sources of the edges of a
    biconnected component are merged. Edges from `ignored` nodes (ids) do not count. By default
    these are forward nodes that take no time and feed several others, such as inputs and masks,
    which PipeDream's profiles leave out. (The authors leave out nodes by number. If the backward
    node of a mask counts, nearly all of a training graph is merged, as in their results.)

    Source: arXiv 2006.16423, section 6.1 and appendix; Narayanan et al., PipeDream, SOSP 2019,
    section 3.1.
    """
    import networkx  # takes a quarter of a second to import; torch depends on it, too

    w = workload
    vertices = np.unique(np.stack([w.colour, w.backward]), axis=1, return_inverse=True)[1].ravel()
    first = {int(x): i for i, x in reversed(list(enumerate(vertices.tolist())))}
    pairs = {
        (int(vertices[u]), int(vertices[v]))
        for u, v in w.edges.tolist()
        if vertices[u] != vertices[v]
    }
    if ignored is None:
        time = np.bincount(vertices, w.cpu_time + w.accelerator_time)
        readers = np.bincount(np.array([u for u, _ in pairs], np.int64), minlength=len(time))
        forward = np.bincount(vertices, w.backward) == 0
        skipped = set(np.flatnonzero((time == 0) & (readers > 1) & forward).tolist())
    else:
        skipped = {int(vertices[w.ids.index(node)]) for node in ignored}
    pairs = {pair for pair in pairs if pair[0] not in skipped}
    groups = []
    for component in networkx.biconnected_component_edges(networkx.Graph(sorted(pairs))):
        ends = {pair for u, v in component for pair in ((u, v), (v, u)) if pair in pairs}
        groups.append([first[u] for u in sorted({u for u, _ in ends})])
    return [group for group in groups if len(group) > 1]
