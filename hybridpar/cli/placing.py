"""Commands of operator placement (the extra [placement]): `place` a graph, and `graph`, which makes
one of our models."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.planning import resolved
from hybridpar.cli.values import ConfigFile, Devices, Overrides
from hybridpar.config import Launch, ParallelConfig
from hybridpar.errors import config_error

if TYPE_CHECKING:
    from rich.table import Table

    from hybridpar.planner.machine import Machine
    from hybridpar.planner.placement.piper import Instance, StagePlan

GraphFile = Positional[Annotated[Path, arg(metavar="GRAPH.json")]]


@dataclass(frozen=True)
class Place:
    """Place a graph of operators on accelerators and CPUs, and say how far from the best the
    placement may be."""

    path: GraphFile
    """A workload of Tarnawski et al., such as `hybridpar graph` writes, or an instance of Piper's
    planner."""
    solver: str = ""
    """dp: the best pipeline. dpl (the default): the best split of one order of the operators. milp:
    the best placement of all, in which a device may hold several chunks of the model, as in
    interleaved pipelines (--whole-blocks: such as `hybridpar train` runs). milp-contiguous: the
    best with one chunk each. Baselines: pipedream, greedy, local-search, one-accelerator, expert
    (with --split). latency-milp, latency-greedy: for the time of one sample. Piper instances:
    piper, or its baseline equi."""
    accelerators: int = 0
    """0: as many as the file says."""
    cpus: int = -1
    """-1: as many as the file says."""
    memory_gb: float = 0.0
    """Memory of each accelerator, in 1e9 bytes; 0: as the file says."""
    whole_blocks: bool = False
    """All operators of a block (the nodes' layerId) share a device, as in `hybridpar train`. A
    placement that is a pipeline is then its pipeline.split; one that goes round the devices more
    than once, its pipeline.chunks, too."""
    time_limit: float = 60.0
    """Seconds, after which the best that was found counts, with a bound. dp may take one second
    more, the milps half.
    """
    max_ideals: int = 0
    """dp and piper: most ideals (sets of operators that may come first). With more they try some
    orders of the operators, and give the best with a bound. Their memory and time grow with it; 0:
    60,000."""
    slots: int = 1
    """latency-milp: how often each accelerator may be called for a sample."""
    split: str = ""
    """expert: a file of the paper's format, which --output writes too."""
    output: str = ""
    """Write the placement to this file, in the paper's format of splits."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("place")
        from hybridpar.planner.placement import read_document
        from hybridpar.planner.placement.piper import is_instance

        check_outputs([self.path, self.split], output=self.output or None)
        document = read_document(self.path)
        return self._stages(document) if is_instance(document) else self._place(document)

    def _place(self, document: Any) -> int:
        from hybridpar.planner.placement import Options, make_workload, place, read_split, report
        from hybridpar.planner.placement.ideals import MAX_IDEALS

        if self.solver == "expert" and not self.split:
            raise config_error(
                "split", "", "the expert's placement must be given", "--split SPLIT.json"
            )
        if self.split and self.solver != "expert":
            raise config_error(
                "split",
                self.split,
                "is a placement that only the solver expert takes",
                "--solver expert",
            )
        workload = make_workload(document)
        if self.accelerators or self.cpus != -1 or self.memory_gb:
            workload = workload.with_devices(
                num_accelerators=self.accelerators or None,
                num_cpus=None if self.cpus == -1 else self.cpus,
                memory=1e9 * self.memory_gb or None,
            )
        if self.whole_blocks:
            workload = workload.in_blocks()
        split = read_split(workload, self.split) if self.split else None
        options = Options(
            time_limit=self.time_limit,
            max_ideals=self.max_ideals or MAX_IDEALS,
            slots=self.slots,
            split=split,
        )
        placement = place(workload, self.solver or "dpl", options)
        others = report.compare(placement)
        about = _about(document.get("about"))
        self._write(placement.document())
        if self.json:
            print(json.dumps(report.as_json(placement, others)))
        else:
            _show([*about, *report.lines(placement, others)], report.device_table(placement))
        return 0

    def _stages(self, document: Mapping[str, Any]) -> int:
        from hybridpar.planner.placement import Options, report
        from hybridpar.planner.placement.ideals import MAX_IDEALS
        from hybridpar.planner.placement.piper import make_instance, plan_equal_stages, plan_stages

        planners: dict[str, Callable[[Instance], StagePlan]] = {
            "piper": partial(
                plan_stages, max_downsets=self.max_ideals or MAX_IDEALS, time_limit=self.time_limit
            ),
            "equi": plan_equal_stages,
        }
        solver = self.solver or "piper"
        if solver not in planners:
            raise config_error(
                "solver",
                solver,
                f"{self.path} is an instance of Piper's, planned by piper or equi",
                "piper",
            )
        if self.cpus > 0:
            raise config_error("cpus", self.cpus, "Piper places on accelerators only", "0")
        Options(time_limit=self.time_limit, max_ideals=self.max_ideals or MAX_IDEALS).check()
        instance = make_instance(document).with_devices(
            num_devices=self.accelerators or None, memory=1e9 * self.memory_gb or None
        )
        plan, *others = [
            planners[name](instance) for name in (solver, *(["equi"] if solver == "piper" else []))
        ]
        self._write(plan.document())
        if self.json:
            print(
                json.dumps(
                    {
                        "ok": plan.fits,
                        **plan.document(),
                        "others": {one.planner: one.time if one.fits else None for one in others},
                    }
                )
            )
        else:
            _show(report.stage_lines(plan, others), report.stage_table(plan) if plan.fits else None)
        return 0 if plan.fits else 1

    def _write(self, document: Mapping[str, Any]) -> None:
        if self.output:
            write_output("output", self.output, json.dumps(document, indent=1) + "\n")


@dataclass(frozen=True)
class Graph:
    """Write the operator graph of a model, with times and memory of its operators, for
    `hybridpar place`."""

    path: ConfigFile
    config: Overrides
    output: str = "graph.json"
    """File for the graph."""
    training: bool = False
    """Whether the graph has backward nodes, gradients and optimizer state."""
    profile: str = ""
    """A file of `hybridpar profile`, whose times of a block its operators share out. Empty:
    estimates."""
    cluster: str = ""
    """A cluster.toml: the devices, and the slowest of its links. With a profile: its blocks, and
    these links."""
    device: str = "a100-80gb"
    """Device to estimate for, without profile and cluster."""
    link: str = "nvlink3"
    """Link between these devices."""
    accelerators: Devices = 0
    """Number of devices; 0: all of the profile or cluster, else 8."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        _require_extra("graph")
        from hybridpar.planner.placement.operator_graph import operator_graph

        check_outputs([self.path, self.profile, self.cluster], output=self.output)
        resolved(
            replace(
                self.config,
                parallel=ParallelConfig(dp=1),
                memory=self.config.memory.on_another_grid(),
                pipeline=replace(self.config.pipeline, split=(), recompute="none"),
            )
        )
        document = operator_graph(self.config, self._machine(launch), training=self.training)
        write_output("output", self.output, json.dumps(document, indent=1) + "\n")
        nodes = document["nodes"]
        edges = document["edges"]
        total = {
            way: sum(n["fpgaLatency"] for n in nodes if n["isBackwardNode"] == way)
            for way in (False, True)
        }
        size = sum(n["size"] for n in nodes)
        if self.json:
            print(
                json.dumps(
                    {
                        "ok": True,
                        "graph": self.output,
                        "nodes": len(nodes),
                        "edges": len(edges),
                        "forward_ms": total[False],
                        "backward_ms": total[True],
                        "bytes": size,
                        **document["about"],
                    }
                )
            )
            return 0
        backward = f", backward {total[True]:.6g} ms" if self.training else ""
        print("\n".join(_about(document["about"])))
        print(
            f"{self.output}: {len(nodes)} nodes, {len(edges)} edges; forward {total[False]:.6g} "
            f"ms{backward}; "
            f"{size / 1e9:.3f} GB"
        )
        return 0

    def _machine(self, launch: Launch) -> Machine:
        from hybridpar.planner.cluster import estimated
        from hybridpar.planner.hardware import Cluster, find_device, find_link
        from hybridpar.planner.local_profile import machine_for

        if self.profile or self.cluster:
            return machine_for(self.config, launch, self.profile, self.cluster, self.accelerators)
        link = find_link(self.link)
        cluster = Cluster(find_device(self.device), self.accelerators or 8, 1, link, link)
        return estimated(self.config, cluster)


def _require_extra(command: str) -> None:
    """Raises: ConfigError if the libraries of the extra [placement] are not installed."""
    if absent := [name for name in ("scipy", "networkx") if importlib.util.find_spec(name) is None]:
        raise config_error(
            "command",
            command,
            f"needs {' and '.join(absent)}",
            "pip install 'hybridpar[placement]'",
        )


def _about(about: object) -> list[str]:
    """Description of a graph of ours, in a line; nothing of other graphs."""
    if not isinstance(about, Mapping) or "estimated" not in about:
        return []
    what = "training" if about.get("training") else "inference"
    times = "estimated" if about["estimated"] else "measured"
    return [
        f"{about.get('kind')}, {about.get('layers')} layers, {what}, micro-batch "
        f"{about.get('micro_batch')}, "
        f"{about.get('dtype')} on {about.get('device')}; {times} times of blocks, in "
        f"{about.get('unit')}"
    ]


def _show(lines: Sequence[str], table: Table | None) -> None:
    from rich.console import Console

    if table is not None:
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    print("\n".join(lines))
