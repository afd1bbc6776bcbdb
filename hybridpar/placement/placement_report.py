"""Report of a placement: a table of its devices, a bound on its quality, and the results of
baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.table import Table

from hybridpar.errors import ConfigError
from hybridpar.placement.piper import StagePlan
from hybridpar.placement.result import Assignment
from hybridpar.placement.scoring import chunks, in_order
from hybridpar.placement.solve import Options, place

BESIDE = ("dpl", "greedy", "pipedream", "one-accelerator")
BESIDE_LATENCY = ("latency-greedy",)
SECONDS_BESIDE = 5.0
_WHAT = {
    "serial": "largest load",
    "overlapped": "largest load, transfers beside computing,",
    "gpipe": "largest forward plus largest backward load",
}
"""The objective in words."""
_ENGINE = "`hybridpar train` runs chunks of whole blocks that go round the devices"


@dataclass(frozen=True)
class Other:
    """Result of another solver, or None with the reason."""

    solver: str
    placement: Assignment | None
    reason: str = ""


def compare(placement: Assignment) -> list[Other]:
    """Run the quick solvers and baselines on the same workload."""
    found = []
    for solver in BESIDE if placement.slots is None else BESIDE_LATENCY:
        if solver != placement.solver:
            try:
                found.append(
                    Other(
                        solver,
                        place(
                            placement.workload,
                            solver,
                            Options(
                                time_limit=SECONDS_BESIDE, objective=placement.workload.objective
                            ),
                        ),
                    )
                )
            except ConfigError as error:
                found.append(Other(solver, None, error.problems[0].rule))
    return found


# -- for a terminal


def device_table(placement: Assignment) -> Table:
    """Return a table of the devices in use, in pipeline order if they form a pipeline."""
    k = placement.workload.num_accelerators
    layer_of = placement.workload.blocks
    times = [("load", placement.score.loads), ("of it transfers", placement.score.transfers)]
    held = chunks(placement.workload, placement.devices)
    columns = [
        "device",
        "nodes",
        *(["layers"] if layer_of is not None else []),
        *(name for name, _ in times),
        "memory GB",
        "chunks",
    ]
    shown = _table(columns, left=("device", "layers"))
    for d in (
        in_order(placement.workload, placement.devices) or np.unique(placement.devices).tolist()
    ):
        here = placement.devices == d
        layers = [] if layer_of is None else [_ranges(sorted(set(layer_of[here].tolist())))]
        shown.add_row(
            f"accelerator {d}" if d < k else f"CPU {d - k}",
            str(int(here.sum())),
            *layers,
            *(f"{values[d]:.6g}" for _, values in times),
            f"{placement.score.memory[d] / 1e9:.3f}",
            str(held[d]),
        )
    return shown


def lines(placement: Assignment, others: Sequence[Other]) -> list[str]:
    """Return lines about the objective, its bound, whether the placement is a pipeline, and other
    solvers."""
    what = "time of one sample"
    if placement.slots is None:
        what = _WHAT[placement.workload.objective]
    if placement.proven:
        quality = "proven to be the least of its kind"
    else:
        quality = (
            f"not proven: at most {placement.gap:.2%} could be saved (bound {placement.bound:.6g})"
        )
    note = f"; {placement.note}" if placement.note else ""
    used = len(np.unique(placement.devices))
    devices = len(placement.score.loads)
    told = [
        f"{placement.solver}: {what} {placement.objective:.6g}, {quality}; {placement.seconds:.2f} "
        f"s{note}",
        f"{used} of {devices} devices used",
    ]
    if placement.slots is None:
        told.append(_shape(placement, others))
    for other in others:
        if other.placement is None:
            told.append(f"  {other.solver:<16} none: {other.reason}")
        else:
            told.append(
                f"  {other.solver:<16} {other.placement.objective:<12.6g} "
                f"{_over(other.placement, placement)}"
            )
    return told


def _shape(placement: Assignment, others: Sequence[Other]) -> str:
    if placement.contiguous:
        if stages := split(placement):
            return (
                f"stages of whole blocks: hybridpar train CONFIG.toml --parallel.pp {len(stages)} "
                "--pipeline.split "
                f"{' '.join(map(str, stages))}"
            )
        if placement.ordered:
            return "contiguous: the devices are a pipeline, in this order"
        return "contiguous, but no pipeline: devices wait for each other in a circle"
    if stages := split(placement):
        used = len(np.unique(placement.devices))
        text = (
            f"chunks of whole blocks: hybridpar train CONFIG.toml --parallel.pp {used} "
            "--pipeline.schedule "
            f"interleaved --pipeline.virtual_stages {len(stages) // used} --pipeline.split "
            f"{' '.join(map(str, stages))}"
        )
    else:
        held = chunks(placement.workload, placement.devices)[np.unique(placement.devices)]
        text = (
            f"not contiguous: the devices would hold {', '.join(map(str, held))} chunks ({_ENGINE})"
        )
    lined_up = [o.placement for o in others if o.placement is not None and o.placement.contiguous]
    if lined_up:
        best = min(lined_up, key=lambda p: p.objective)
        text += f"; the best contiguous one here, {best.solver}'s: {best.objective:.6g} {_over(best, placement)}"
    return text


def split(placement: Assignment) -> list[int]:
    """Return the number of blocks of each stage, if the placement is a pipeline of full blocks in
    their order.

    Devices may have several turns, if each has the same number of turns in the same order.
    Otherwise the result is empty.
    """
    blocks = placement.workload.blocks
    devices = placement.devices
    if blocks is None or devices.max() >= placement.workload.num_accelerators:
        return []
    held = [
        np.unique(devices[blocks == number]).tolist() for number in range(int(blocks.max()) + 1)
    ]
    if any(len(where) != 1 for where in held):
        return []
    stages = [(device, len(list(run))) for device, run in groupby(where[0] for where in held)]
    turns = [device for device, _ in stages]
    used = len(np.unique(devices))
    if len(turns) % used or turns != turns[:used] * (len(turns) // used):
        return []
    return [size for _, size in stages]


def _over(placement: Assignment, best: Assignment) -> str:
    return f"({placement.objective / best.objective - 1:+.2%})" if best.objective else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as 0-3, 7."""
    starts = [i for i, n in enumerate(numbers) if not i or numbers[i - 1] != n - 1]
    parts = [numbers[a:b] for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _table(columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    shown = Table()
    for name in columns:
        shown.add_column(name, justify="left" if name in left else "right")
    return shown


def stage_table(plan: StagePlan) -> Table:
    """Return a table of Piper's stages."""
    shown = _table(
        (
            "stage",
            "layers",
            "data",
            "tensor",
            "devices",
            "ms a micro-batch",
            "in flight",
            "memory GB",
            "not the first way",
        )
    )
    parts = zip(plan.stages, plan.score.times, plan.score.in_flight, plan.score.memory, strict=True)
    for i, (stage, seconds, in_flight, memory) in enumerate(parts):
        other = sum(
            name != plan.instance.ways[v][stage.tensor][0].name for v, name in stage.ways.items()
        )
        shown.add_row(
            *map(str, (i, len(stage.ways), stage.data, stage.tensor, stage.data * stage.tensor)),
            f"{1e3 * seconds:.6g}",
            str(in_flight),
            f"{memory / 1e9:.3f}",
            str(other),
        )
    return shown


def stage_lines(plan: StagePlan, others: Sequence[StagePlan]) -> list[str]:
    """Return lines about the time of Piper's plan and of others, and the grid that runs the plan,
    if there is one."""
    times = [one.quality if one.fits else one.failure for one in (plan, *others)]
    sizes = {(stage.tensor, stage.data) for stage in plan.stages}
    if len(sizes) > 1:
        return [
            *times,
            "stages differ in replicas or tensor ranks: `hybridpar train` runs equal ones alone",
        ]
    return [
        *times,
        *(
            f"`hybridpar train` runs such stages: parallel.tp={tp} parallel.pp={len(plan.stages)} "
            f"parallel.dp={dp}"
            for tp, dp in sizes
        ),
    ]


# -- for programs


def as_json(placement: Assignment, others: Sequence[Other]) -> Mapping[str, Any]:
    """Return plain values: the paper's format of splits, and the content of `lines`."""
    return {
        "ok": True,
        **placement.document(),
        "objective": placement.objective,
        "minimized": "latency" if placement.slots is not None else placement.workload.objective,
        "gap": placement.gap,
        "contiguous": placement.contiguous,
        "ordered": placement.ordered,
        "split": split(placement),
        "chunks": chunks(placement.workload, placement.devices).tolist(),
        "memory": placement.score.memory.tolist(),
        "transfers": placement.score.transfers.tolist(),
        "others": {
            o.solver: None if o.placement is None else o.placement.objective for o in others
        },
    }
