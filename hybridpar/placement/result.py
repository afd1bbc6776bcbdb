"""Result of a solver: a device for every operator, its cost, and a bound on its quality."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.checkpoint.format.files import write_text
from hybridpar.errors import config_error
from hybridpar.placement.fields import Checker
from hybridpar.placement.scoring import Score, is_contiguous, is_ordered, latency, problems, score
from hybridpar.placement.workload import Ints, Workload, read_document

GAP = 1e-6
"""Relative difference from the bound up to which an objective counts as proven optimal."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """A valid placement, scored by `scoring.score` and not by the solver that found it. Units as in
    the workload.

    Devices are numbered: 0 .. k - 1 accelerators, k .. k + l - 1 CPUs.
    """

    workload: Workload = field(repr=False)
    solver: str
    devices: Ints = field(repr=False)
    """Device of each node [nodes]."""
    score: Score
    bound: float
    """Lower bound on the objective of the placements that the solver considers."""
    proven: bool
    """Whether the objective is the minimum over these placements, within `GAP`."""
    seconds: float
    note: str = ""
    """Reason why it is not proven, such as the time limit."""
    stats: Mapping[str, float] = field(default_factory=dict)
    slots: Ints | None = field(default=None, repr=False)
    """The accelerator call of each node [nodes], if the objective is the latency of one sample. All
    CPUs are device k."""

    @property
    def objective(self) -> float:
        """The largest load, which is the time per sample of a full pipeline; with `slots`, the
        latency of one sample."""
        return self.score.objective

    @property
    def gap(self) -> float:
        """Largest possible improvement as a share of the objective: 0 if proven, 1 if nothing is
        known."""
        return 0.0 if self.proven or not self.objective else 1 - self.bound / self.objective

    @property
    def contiguous(self) -> bool:
        """Whether no path of forward nodes leaves a device and comes back."""
        return is_contiguous(self.workload, self.devices)

    @property
    def ordered(self) -> bool:
        """Whether the devices can be ordered as a pipeline, so that forward edges only lead to
        later devices."""
        return is_ordered(self.workload, self.devices)

    def __str__(self) -> str:
        k = self.workload.num_accelerators
        used = len(set(self.devices.tolist()))
        if self.proven:
            quality = "proven optimal"
        else:
            quality = (
                f"bound {self.bound:.6g}, so at most {self.gap:.2%} above the best of its kind"
            )
        lines = [
            f"{self.solver}: {self.objective:.6g} ({quality}), {self.seconds:.2f} s"
            + (f"; {self.note}" if self.note else "")
        ]
        for d, load in enumerate(self.score.loads.tolist()):
            if count := int((self.devices == d).sum()):
                name = f"accelerator {d}" if d < k else f"CPU {d - k}"
                lines.append(
                    f"  {name:<16} load {load:<12.6g} transfers {self.score.transfers[d]:<12.6g} "
                    f"{self.score.memory[d] / 2**30:8.3f} GiB  {count} nodes"
                )
        return "\n".join([*lines, f"  {used} of {k + self.workload.num_cpus} devices used"])

    def document(self) -> dict[str, Any]:
        """Return the placement in the paper's format of splits (`fpgas`, `cpus`: lists of {load,
        nodes}), with its quality."""
        ids = np.array(self.workload.ids)
        machines = [
            {"load": float(load), "nodes": sorted(ids[self.devices == d].tolist())}
            for d, load in enumerate(self.score.loads)
        ]
        k = self.workload.num_accelerators
        return {
            "maxLoad" if self.slots is None else "totalLatency": self.objective,
            "fpgas": machines[:k],
            "cpus": machines[k:],
            "solver": self.solver,
            "bound": self.bound,
            "proven": self.proven,
            "seconds": self.seconds,
            "note": self.note,
            "stats": dict(self.stats),
        }


@dataclass(frozen=True, eq=False)
class SolverResult:
    """A placement that a solver has found, not scored yet.

    Attributes:
        devices: The device of each node.
        bound: Lower bound on the objective.
        exact: Whether the solver proves that the placement is optimal.
        note: Reason why it is not proven optimal.
        stats: Numbers about the search.
        slots: The accelerator call of each node; then the objective is the latency of one sample.
    """

    devices: Ints
    bound: float
    exact: bool = False
    note: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    slots: Ints | None = None


def make_assignment(
    workload: Workload, solver: str, found: SolverResult, seconds: float
) -> Assignment:
    """Score and check the placement that a solver has found in so many seconds.

    Raises:
        ConfigError: The placement breaks a rule. Only split files of the user can.
    """
    devices = np.asarray(found.devices, np.int64)
    if wrong := problems(workload, devices):
        raise config_error(
            "split", wrong[0].value, f"{solver}: {wrong[0].rule}", wrong[0].suggestion
        )
    result = score(workload, devices)
    if found.slots is not None:
        result = replace(result, objective=latency(workload, devices, found.slots))
    bound = float(min(result.objective, max(found.bound, result.objective if found.exact else 0.0)))
    proven = bool(found.exact or result.objective - bound <= GAP * result.objective)
    note = "" if proven else found.note
    return Assignment(
        workload,
        solver,
        devices,
        result,
        bound,
        proven,
        seconds,
        note,
        found.stats,
        found.slots,
    )


def write_assignment(placement: Assignment, path: str | Path) -> None:
    """Write `placement.document()` as JSON."""
    write_text(Path(path), json.dumps(placement.document(), indent=1) + "\n")


def read_split(workload: Workload, path: str | Path) -> Ints:
    """Return the device of each node from a split file in the paper's format, such as an expert's.

    Nodes that the file omits join the rest of their colour class, so splits of forward graphs work
    for training, too.

    Raises:
        DataError: The file is damaged.
        ConfigError: The split does not fit the workload.
    """
    check = Checker()
    top = check.mapping(read_document(path), "split")
    check.finish()
    position = {node: i for i, node in enumerate(workload.ids)}
    k = workload.num_accelerators
    devices = np.full(workload.num_nodes, -1, np.int64)
    for key, first, most in (("fpgas", 0, k), ("cpus", k, workload.num_cpus)):
        machines = check.items(top.get(key, []), key)
        index = 0
        for i, machine in enumerate(machines):
            nodes = check.items(
                check.mapping(machine, f"{key}[{i}]").get("nodes", []), f"{key}[{i}].nodes"
            )
            if nodes and index == most:
                check.add(
                    key,
                    len(machines),
                    f"has more machines in use than the workload's {most}",
                    str(most),
                )
                break
            for node in nodes:
                if isinstance(node, bool) or not isinstance(node, int) or node not in position:
                    check.add(
                        f"{key}[{i}].nodes", node, "must be ids of nodes", str(workload.ids[0])
                    )
                elif devices[position[node]] >= 0:
                    check.add(
                        f"{key}[{i}].nodes",
                        node,
                        "is on two machines, or there twice",
                        "each node once",
                    )
                else:
                    devices[position[node]] = first + index
            index += bool(nodes)
    check.finish()
    for colour in np.unique(workload.colour[devices < 0]):
        same = workload.colour == colour
        known = set(devices[same & (devices >= 0)].tolist())
        if len(known) != 1:
            node = workload.ids[int(np.flatnonzero(same & (devices < 0))[0])]
            raise config_error(
                "split",
                node,
                "this node is on no machine, and its colour class does not say which",
                "the node's id in the nodes of a machine",
            )
        devices[same & (devices < 0)] = known.pop()
    return devices
