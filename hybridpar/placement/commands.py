"""The commands of operator placement (the extra [placement]): `place` places a graph, and `graph`
makes one from a configuration. Their flags are in hybridpar/cli/placing.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.planning import resolved
from hybridpar.config import Launch, ParallelConfig
from hybridpar.errors import config_error
from hybridpar.placement import (
    Options,
    make_workload,
    place,
    placement_report,
    read_document,
    read_split,
)
from hybridpar.placement.ideals import MAX_IDEALS
from hybridpar.placement.operator_graph import operator_graph
from hybridpar.placement.piper import (
    Instance,
    StagePlan,
    is_instance,
    make_instance,
    plan_equal_stages,
    plan_stages,
)
from hybridpar.planner.machines.cluster import estimated
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.local_profile import machine_for

if TYPE_CHECKING:
    from hybridpar.cli.placing import Graph, Place


def place_graph(flags: Place) -> int:
    """Place the graph of a file, and print the placement. Return the exit code."""
    check_outputs([flags.path, flags.split], output=flags.output or None)
    document = read_document(flags.path)
    return (
        _plan_stages(flags, document)
        if is_instance(document)
        else _place_operators(flags, document)
    )


def _place_operators(flags: Place, document: Any) -> int:
    if flags.solver == "expert" and not flags.split:
        raise config_error(
            "split", "", "the solver expert requires the expert's placement", "--split SPLIT.json"
        )
    if flags.split and flags.solver != "expert":
        raise config_error(
            "split",
            flags.split,
            "supported with --solver expert only",
            "--solver expert",
        )
    workload = make_workload(document)
    if flags.accelerators or flags.cpus != -1 or flags.memory_gb:
        workload = workload.with_devices(
            num_accelerators=flags.accelerators or None,
            num_cpus=None if flags.cpus == -1 else flags.cpus,
            memory=1e9 * flags.memory_gb or None,
        )
    if flags.whole_blocks:
        workload = workload.in_blocks()
    split = read_split(workload, flags.split) if flags.split else None
    options = Options(
        time_limit=flags.time_limit,
        max_ideals=flags.max_ideals or MAX_IDEALS,
        slots=flags.slots,
        split=split,
        objective=flags.objective,
    )
    placement = place(workload, flags.solver or "dpl", options)
    others = placement_report.compare(placement)
    about = _about(document.get("about"))
    _write(flags, placement.document())
    if flags.json:
        print(json.dumps(placement_report.as_json(placement, others)))
    else:
        _show(
            [*about, *placement_report.lines(placement, others)],
            placement_report.device_table(placement),
        )
    return 0


def _plan_stages(flags: Place, document: Mapping[str, Any]) -> int:
    planners: dict[str, Callable[[Instance], StagePlan]] = {
        "piper": partial(
            plan_stages, max_downsets=flags.max_ideals or MAX_IDEALS, time_limit=flags.time_limit
        ),
        "equi": plan_equal_stages,
    }
    solver = flags.solver or "piper"
    if solver not in planners:
        raise config_error(
            "solver",
            solver,
            f"{flags.path} is a Piper instance, which only the solvers piper and equi take",
            "piper",
        )
    if flags.objective != "serial":
        raise config_error(
            "objective", flags.objective, "not supported by Piper, which has its own", "serial"
        )
    if flags.cpus > 0:
        raise config_error(
            "cpus", flags.cpus, "not supported by Piper, which places on accelerators only", "0"
        )
    Options(time_limit=flags.time_limit, max_ideals=flags.max_ideals or MAX_IDEALS).check()
    instance = make_instance(document).with_devices(
        num_devices=flags.accelerators or None, memory=1e9 * flags.memory_gb or None
    )
    plan, *others = [
        planners[name](instance) for name in (solver, *(["equi"] if solver == "piper" else []))
    ]
    _write(flags, plan.document())
    if flags.json:
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
        _show(
            placement_report.stage_lines(plan, others),
            placement_report.stage_table(plan) if plan.fits else None,
        )
    return 0 if plan.fits else 1


def _write(flags: Place, document: Mapping[str, Any]) -> None:
    if flags.output:
        write_output("output", flags.output, json.dumps(document, indent=1) + "\n")


def write_graph(flags: Graph, launch: Launch) -> int:
    """Write the operator graph of a configuration, and print its size. Return the exit code."""

    check_outputs([flags.path, flags.profile, flags.cluster], output=flags.output)
    resolved(
        replace(
            flags.config,
            parallel=ParallelConfig(dp=1),
            memory=flags.config.memory.on_another_grid(),
            pipeline=replace(flags.config.pipeline, split=(), recompute="none"),
        )
    )
    document = operator_graph(flags.config, _machine(flags, launch), training=flags.training)
    write_output("output", flags.output, json.dumps(document, indent=1) + "\n")
    nodes = document["nodes"]
    edges = document["edges"]
    total = {
        way: sum(n["fpgaLatency"] for n in nodes if n["isBackwardNode"] == way)
        for way in (False, True)
    }
    size = sum(n["size"] for n in nodes)
    if flags.json:
        print(
            json.dumps(
                {
                    "ok": True,
                    "graph": flags.output,
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
    backward = f", backward {total[True]:.6g} ms" if flags.training else ""
    print("\n".join(_about(document["about"])))
    print(
        f"{flags.output}: {len(nodes)} nodes, {len(edges)} edges; forward {total[False]:.6g} "
        f"ms{backward}; "
        f"{size / 1e9:.3f} GB"
    )
    return 0


def _machine(flags: Graph, launch: Launch) -> Machine:
    if flags.profile or flags.cluster:
        return machine_for(flags.config, launch, flags.profile, flags.cluster, flags.accelerators)
    link = find_link(flags.link)
    cluster = Cluster(find_device(flags.device), flags.accelerators or 8, 1, link, link)
    return estimated(flags.config, cluster)


def _about(about: object) -> list[str]:
    """Return a line that describes a graph made by `hybridpar graph`; no line for other graphs."""
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
    if table is not None:
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    print("\n".join(lines))
