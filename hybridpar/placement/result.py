"""Answer of a solver: a device for every operator, what that costs, and how good it is known to
be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar.checkpoint.files import write_text
from hybridpar.errors import config_error
from hybridpar.placement.fields import Checker
from hybridpar.placement.scoring import Score, is_contiguous, is_ordered, latency, problems, score
from hybridpar.placement.workload import Ints, Workload, read_document

GAP = 1e-6
"""Relative: an objective this little above the bound counts as proven."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """A valid placement, scored by `scoring.score` and not by the solver that found it. Units:
    those of the workload.

    Devices are numbered: 0 .. k - 1 accelerators, k .. k + l - 1 CPUs.
    """

    workload: Workload = field(repr=False)
    solver: str
    devices: Ints = field(repr=False)
    """[nodes] the device of each."""
    score: Score
    bound: float
    """No placement of the kind that the solver looks for has a smaller objective."""
    proven: bool
    """The objective is the least there is (of its kind), within `GAP`."""
    seconds: float
    note: str = ""
    """Why it is not proven: that the time ran out, for instance."""
    stats: Mapping[str, float] = field(default_factory=dict)
    slots: Ints | None = field(default=None, repr=False)
    """Call of its accelerator that each node is in, where the objective is the time of one sample.
    CPUs are one: k."""

    @property
    def objective(self) -> float:
        """The largest load, time per sample of the pipeline when it is full; with `slots`, the time
        of one sample."""
        return self.score.objective

    @property
    def gap(self) -> float:
        """How much of the objective could still be saved at most: 0 if proven, 1 if nothing is
        known."""
        return 0.0 if self.proven or not self.objective else 1 - self.bound / self.objective

    @property
    def contiguous(self) -> bool:
        """No path of forward nodes leaves a device and comes back."""
        return is_contiguous(self.workload, self.devices)

    @property
    def ordered(self) -> bool:
        """The devices can be put in a row so that forward edges lead only onwards: a pipeline."""
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
        """It in the paper's format of splits (`fpgas`, `cpus`: lists of {load, nodes}), with its
        quality."""
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


def make_assignment(
    workload: Workload,
    solver: str,
    devices: Ints,
    bound: float,
    seconds: float,
    *,
    note: str = "",
    exact: bool = False,
    stats: Mapping[str, float] | None = None,
    slots: Ints | None = None,
) -> Assignment:
    """Scores and checks a solver's answer. `exact`: the solver proves that its answer is the best
    of its kind.

    With `slots` the objective is the time of one sample.

    Raises: ConfigError if the answer breaks a rule, which is for expert's splits; our solvers'
        never do.
    """
    devices = np.asarray(devices, np.int64)
    if wrong := problems(workload, devices):
        raise config_error(
            "split", wrong[0].value, f"{solver}: {wrong[0].rule}", wrong[0].suggestion
        )
    result = score(workload, devices)
    if slots is not None:
        result = replace(result, objective=latency(workload, devices, slots))
    bound = float(min(result.objective, max(bound, result.objective if exact else 0.0)))
    proven = bool(exact or result.objective - bound <= GAP * result.objective)
    note = "" if proven else note
    return Assignment(
        workload, solver, devices, result, bound, proven, seconds, note, stats or {}, slots
    )


def write_assignment(placement: Assignment, path: str | Path) -> None:
    """Writes `placement.document()` as JSON."""
    write_text(Path(path), json.dumps(placement.document(), indent=1) + "\n")


def read_split(workload: Workload, path: str | Path) -> Ints:
    """The devices of the nodes from a split file of the paper's format, such as an expert's.

    Nodes that it leaves out go where the rest of their colour class is: splits of forward graphs
    serve training too.
    Raises: DataError, ConfigError.
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
