"""Cost and validity of a placement, computed directly from operators and edges.

This module shares no code with the solvers, and scores the results of all of them.

load(accelerator) = sum of times + for each output made elsewhere and read here, or made here
                    and read elsewhere, its transfer time, once
load(CPU)         = sum of times

objective         = the largest load. With Workload.objective "overlapped" a load is the larger of
                    its two sums. With "gpipe" it is the largest load of forward nodes and their
                    outputs, plus the largest load of backward nodes and their outputs

Source: arXiv 2006.16423, section 3, and its appendix for the last two.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hybridpar.errors import Problem
from hybridpar.placement.workload import Floats, Ints, Workload, order_of


@dataclass(frozen=True, eq=False)
class Score:
    """Costs by device, in arrays [k + l]. `objective`: as above. `memory`: bytes."""

    objective: float
    loads: Floats
    transfers: Floats
    memory: Floats


def score(workload: Workload, devices: Ints) -> Score:
    """Return the cost of a placement, valid or not."""
    w = workload
    k = workload.num_accelerators
    total = k + w.num_cpus
    loads = [0.0] * total
    transfers = [0.0] * total
    memory = [0.0] * total
    passes = np.zeros((2, total))  # forward and backward, times and transfers
    at = [int(d) for d in devices]
    for v, d in enumerate(at):
        time = float(w.accelerator_time[v] if d < k else w.cpu_time[v])
        loads[d] += time
        passes[int(w.backward[v]), d] += time
        memory[d] += float(w.size[v])
    moves: set[tuple[int, int]] = set()  # (output, device that sends or receives it)
    for u, v in w.edges.tolist():
        if at[u] != at[v]:
            moves.update({(u, at[u]), (u, at[v])})
    for u, d in moves:
        if d < k:
            transfers[d] += float(w.transfer_time[u])
            passes[int(w.backward[u]), d] += float(w.transfer_time[u])
    combine = max if w.objective == "overlapped" else operator.add
    loads = [combine(load, moved) for load, moved in zip(loads, transfers, strict=True)]
    objective = float(passes.max(1).sum()) if w.objective == "gpipe" else max(loads)
    return Score(objective, np.array(loads), np.array(transfers), np.array(memory))


def problems(workload: Workload, devices: Ints) -> list[Problem]:
    """Return the rules that a placement breaks: nonexistent devices, memory, support, colour
    classes."""
    w = workload
    k = workload.num_accelerators
    found: list[Problem] = []
    if devices.shape != (w.num_nodes,):
        return [
            Problem(
                "devices", devices.shape, "must hold one device for each node", f"({w.num_nodes},)"
            )
        ]
    if len(outside := np.flatnonzero((devices < 0) | (devices >= k + w.num_cpus))):
        v = int(outside[0])
        return [
            Problem(
                "device",
                int(devices[v]),
                f"of node {w.ids[v]} does not exist",
                f"0 to {k + w.num_cpus - 1}",
            )
        ]
    for d, used in enumerate(np.bincount(devices, w.size, k + w.num_cpus)[:k].tolist()):
        if used > w.memory + min(
            2e-12 * w.memory, 0.5
        ):  # sums of integers are exact, sums of fractions are not
            found.append(
                Problem(
                    f"memory of accelerator {d}",
                    used,
                    f"is more than its {w.memory:g} bytes",
                    f"maxSizePerFPGA = {used:g}",
                )
            )
    for v in np.flatnonzero(~w.supported & (devices < k)).tolist():
        found.append(
            Problem(
                "device", int(devices[v]), f"accelerators cannot run node {w.ids[v]}", f"{k}, a CPU"
            )
        )
    first: dict[int, int] = {}
    for v, colour in enumerate(w.colour.tolist()):
        u = first.setdefault(colour, v)
        if devices[u] != devices[v]:
            found.append(
                Problem(
                    "device",
                    int(devices[v]),
                    f"of node {w.ids[v]} must match the device of node {w.ids[u]}, which has "
                    f"the same colour class {colour}",
                    str(int(devices[u])),
                )
            )
    return found


def _forward_edges(workload: Workload) -> list[tuple[int, int]]:
    return [
        (u, v)
        for u, v in workload.edges.tolist()
        if not workload.backward[u] and not workload.backward[v]
    ]


def is_contiguous(workload: Workload, devices: Ints) -> bool:
    """Return whether no path of forward nodes leaves a device and comes back to it."""
    n = workload.num_nodes
    edges = _forward_edges(workload)
    before: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    after: list[list[int]] = [[] for _ in range(n)]
    for u, v in edges:
        before[v].append(u)
        after[u].append(v)
        missing[v] += 1
    ready = [v for v in range(n) if not missing[v]]
    left = [0] * n  # bit set of the devices that some path to the node has left
    while ready:
        v = ready.pop()
        for u in before[v]:
            left[v] |= left[u] | (1 << int(devices[u]) if devices[u] != devices[v] else 0)
        if left[v] >> int(devices[v]) & 1:
            return False
        for x in after[v]:
            missing[x] -= 1
            if not missing[x]:
                ready.append(x)
    return True


def chunks(workload: Workload, devices: Ints) -> Ints:
    """Return a lower bound on the number of contiguous chunks of each device: the largest number of
    times that a path of forward nodes enters it.

    The bound is 1 for a contiguous device, and 0 for an empty one. Shapes: [k + l], by device.
    """
    total = workload.num_accelerators + workload.num_cpus
    edges = _forward_edges(workload)
    before: list[list[int]] = [[] for _ in range(workload.num_nodes)]
    for u, v in edges:
        before[v].append(u)
    entered = np.zeros((workload.num_nodes, total), np.int64)  # by the paths that end at a node
    for v in order_of(workload.num_nodes, edges):
        d = int(devices[v])
        if workload.backward[v]:
            entered[v, d] = 1
            continue
        for u in before[v]:
            come = entered[u].copy()
            come[d] += devices[u] != d
            np.maximum(entered[v], come, out=entered[v])
        entered[v, d] = max(entered[v, d], 1)
    return entered.max(0)


def in_order(workload: Workload, devices: Ints) -> list[int]:
    """Return the devices in use, ordered so that forward edges only lead to later devices; [] if
    there is no such order."""
    pairs = {
        (int(devices[u]), int(devices[v]))
        for u, v in _forward_edges(workload)
        if devices[u] != devices[v]
    }
    total = workload.num_accelerators + workload.num_cpus
    order = order_of(total, pairs)
    used = set(devices.tolist())
    return [d for d in order if d in used] if len(order) == total else []


def is_ordered(workload: Workload, devices: Ints) -> bool:
    """Return whether forward edges between devices form no cycle, so that the devices can form a
    pipeline."""
    return bool(in_order(workload, devices))


# -- latency of one sample


def latency(workload: Workload, devices: Ints, slots: Ints) -> float:
    """Return the latency of one sample, alone on the devices; infinite if calls would wait for each
    other in a cycle.

    An accelerator runs its nodes in one call for each slot (`slots` [nodes], from 0), in the order
    of slots: a call starts when all inputs are available, moves them in, computes, and moves
    outputs out. Each node on a CPU has a core of its own.

    Source: arXiv 2006.16423, section 4 and appendix A.
    """
    w = workload
    k = workload.num_accelerators
    calls = {
        pair: i
        for i, pair in enumerate(
            sorted({(int(d), int(s)) for d, s in zip(devices, slots, strict=True) if d < k})
        )
    }
    unit = [
        calls.get((int(d), int(s)), len(calls) + v) if d < k else len(calls) + v
        for v, (d, s) in enumerate(zip(devices, slots, strict=True))
    ]
    duration = [0.0] * (len(calls) + w.num_nodes)
    for v in range(w.num_nodes):
        duration[unit[v]] += float(w.accelerator_time[v] if unit[v] < len(calls) else w.cpu_time[v])
    pairs: set[tuple[int, int]] = set()
    moves: set[tuple[int, int]] = set()
    for u, v in w.edges.tolist():
        if unit[u] != unit[v]:
            pairs.add((unit[u], unit[v]))
            moves.update({(u, unit[u]), (u, unit[v])})
    for u, call in moves:
        if call < len(calls):
            duration[call] += float(w.transfer_time[u])
    ordered = sorted(calls)
    for (d, s), (next_d, next_s) in pairwise(ordered):
        if d == next_d:
            pairs.add((calls[d, s], calls[next_d, next_s]))
    return _longest_path(duration, pairs)


def _longest_path(duration: list[float], pairs: set[tuple[int, int]]) -> float:
    """Return the largest sum of durations along edges; infinite if there is a cycle."""
    n = len(duration)
    after: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    start = [0.0] * n
    for a, b in pairs:
        after[a].append(b)
        missing[b] += 1
    ready = [x for x in range(n) if not missing[x]]
    done = 0
    end = 0.0
    while ready:
        a = ready.pop()
        done += 1
        finish = start[a] + duration[a]
        end = max(end, finish)
        for b in after[a]:
            start[b] = max(start[b], finish)
            missing[b] -= 1
            if not missing[b]:
                ready.append(b)
    return end if done == n else float("inf")
