"""Layers that cost nothing on any stage. The search leaves them out, because each may double the
number of downsets.

A free layer goes to the stage of the first layer that depends on it. Layers before and after it
keep their order, so the best plan of the other layers is the best plan of all.
"""

from __future__ import annotations

from hybridpar.placement.piper.instance import RECOMPUTED, Instance, Way
from hybridpar.placement.workload import order_of


def without_free(instance: Instance) -> tuple[list[int], dict[int, set[int]]]:
    """Return the layers that are not free, each after all its successors; and the successors of
    every layer, direct or through free layers."""
    free = _free(instance)
    after: dict[int, list[int]] = {v: [] for v in range(instance.num_layers)}
    for u, v, _ in instance.edges:
        after[u].append(v)
    free -= {v for v in free if not after[v]}  # a layer without successors has no stage to go to
    behind: dict[int, set[int]] = {}
    for u in order_of(instance.num_layers, [(u, v) for u, v, _ in instance.edges])[::-1]:
        behind[u] = set().union(*(behind[v] if v in free else {v} for v in after[u]))
    return [v for v in behind if v not in free], behind


def _free(instance: Instance) -> set[int]:
    """Return the layers with nothing to compute, keep or send, at any degree."""
    free = {
        v
        for v, ways in enumerate(instance.ways)
        if all(any(map(_is_free, ways.get(t, ()))) for t in instance.degrees)
    }
    for u, v, num_bytes in instance.edges:
        sync = [way.sync_backward[v] for ways in instance.ways[u].values() for way in ways]
        sync += [way.sync_forward[u] for ways in instance.ways[v].values() for way in ways]
        if num_bytes or any(sync):
            free -= {u, v}
    return free


def _is_free(way: Way) -> bool:
    return way.name != RECOMPUTED and not (way.time or way.weights or way.memory_a or way.memory_b)
