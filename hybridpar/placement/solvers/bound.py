"""A lower bound for every placement, and the check that a graph can be placed."""

from __future__ import annotations

import numpy as np

from hybridpar.errors import config_error
from hybridpar.placement.classes import ClassGraph


def work_bound(graph: ClassGraph) -> float:
    """Return a load that some device must have: work divided evenly, in fractions, without
    transfers.

    Fractions go to the kind of device that is relatively best at them: a fractional knapsack.
    """
    k = graph.workload.num_accelerators
    num_cpus = graph.workload.num_cpus
    accelerator = graph.accelerator_time
    cpu = graph.cpu_time
    if not num_cpus:
        return max(float(accelerator.sum()) / k, float(accelerator.max()))
    only_cpu = np.isinf(accelerator)
    fixed = float(cpu[only_cpu].sum())
    accelerator = accelerator[~only_cpu]
    cpu = cpu[~only_cpu]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        order = np.argsort(np.nan_to_num(cpu / accelerator, nan=0.0, posinf=np.inf), kind="stable")
    a = accelerator[order]
    c = cpu[order]
    on_cpu = fixed + np.concatenate([[0.0], np.cumsum(c)])  # the first i classes go to CPUs
    rest = np.concatenate([np.cumsum(a[::-1])[::-1], [0.0]])
    for i in range(len(a)):  # find the class at which both kinds have equal load
        if on_cpu[i + 1] / num_cpus >= rest[i + 1] / k:
            x = _balance(on_cpu[i] / num_cpus, c[i] / num_cpus, rest[i] / k, a[i] / k)
            shared = max((on_cpu[i] + x * c[i]) / num_cpus, (rest[i] - x * a[i]) / k)
            break
    else:
        shared = on_cpu[-1] / num_cpus
    single = np.minimum(graph.accelerator_time, graph.cpu_time)
    return max(float(shared), float(single.max()))


def _balance(left: float, grows: float, right: float, shrinks: float) -> float:
    """Return the x in 0 .. 1 with left + x grows = right - x shrinks, or the nearest."""
    if grows + shrinks <= 0:
        return 0.0
    return min(max((right - left) / (grows + shrinks), 0.0), 1.0)


def check_possible(graph: ClassGraph) -> None:
    """Raise a ConfigError if the classes evidently cannot be placed."""
    w = graph.workload
    if w.num_cpus:
        return
    if len(lost := np.flatnonzero(np.isinf(graph.accelerator_time))):
        c = int(lost[0])
        nodes = [w.ids[v] for v in np.flatnonzero(graph.class_of == c)]
        alone = [v for v in np.flatnonzero(graph.class_of == c) if not w.supported[v]]
        if alone:
            raise config_error("maxCPUs", 0, f"no accelerator can run node {w.ids[alone[0]]}", "1")
        raise config_error(
            "maxSizePerFPGA",
            w.memory,
            f"the nodes that must share a device with node {nodes[0]} take "
            f"{graph.size[c]:.0f} bytes, and there is no CPU",
            f"{graph.size[c]:.0f}",
        )
    if (total := float(graph.size.sum())) > w.room * w.num_accelerators:
        raise config_error(
            "maxSizePerFPGA",
            w.memory,
            f"{w.num_accelerators} accelerators of that are less than the graph's "
            f"{total:.0f} bytes, and there is no CPU",
            f"{np.ceil(total / w.num_accelerators):.0f}",
        )
