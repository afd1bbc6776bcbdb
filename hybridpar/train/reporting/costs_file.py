"""costs.json: measured costs of the actions of a run's schedule, in seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch

from hybridpar.checkpoint.format.files import write_text
from hybridpar.config import Within, from_plain
from hybridpar.errors import ConfigError, DataError, config_error, shown
from hybridpar.job import JobPlan
from hybridpar.reading import errors_as, read_json, runs_near
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.train.reporting.measure import CALLS, VARYING, Measured, StepParts, measure
from hybridpar.train.reporting.trace import RankEvents

FORMAT = "hybridpar costs 3"
_MAX_BYTES = 256 << 20
_MOST_CORES = 1e6
_TIME = Within(0, 1e9)
_OF_SPLIT = "backward_input"  # present if backwards were split
_OF_STAGES = ("forward", "backward", _OF_SPLIT)
_OF_TIERS = ("fetch", "release", "offload", "reload", "to_host", "host", "from_host")  # optional
_OF_RANKS = ("update", "reduce", "gather", *_OF_TIERS)
# not stored: a run measures wall time over all groups
_OF_PLANS = ("host_shares", "host_works")
_OF_WAY = "transfer_back"  # present if links were measured in both directions
_OF_LINKS = ("transfer", _OF_WAY, "latency", "transfer_work")


@dataclass(frozen=True)
class RunCosts:
    """Content of costs.json."""

    schedule_options: ScheduleOptions
    shape: PipelineShape
    measured: Measured
    hardware: Mapping[str, Any] = field(default_factory=dict)

    def timeline(self) -> Timeline:
        """Simulate the steady state with these costs."""
        return predict_timeline(self.schedule_options, self.shape, self.measured.costs)


def run_costs(job: JobPlan, ranks: Sequence[RankEvents]) -> RunCosts | None:
    """Return the costs of a run's recorded actions, or None if there are too few."""
    shape = job.shape
    measured = measure(
        ranks,
        shape,
        tied=job.config.model.tie_embeddings and shape.num_ranks > 1 and not shape.is_v,
    )
    if measured is None:
        return None
    host = ranks[0].host
    return RunCosts(
        job.options,
        shape,
        measured,
        {
            "hosts": sorted({r.host.name for r in ranks}),
            "device": host.device,
            "cores": host.cores,
            "threads": host.threads,
            "ranks": len(ranks),
            "torch": torch.__version__,
        },
    )


# -- the file


def write_costs(run: RunCosts, path: Path) -> None:
    """Write costs.json."""
    measured = run.measured
    costs = {f.name: getattr(measured.costs, f.name) for f in fields(Costs)}
    for name in ("calls", "variation"):
        costs[name] = {kind.value: cost for kind, cost in costs[name].items()}
    for name in (_OF_SPLIT, _OF_WAY):
        if costs[name] is None:
            del costs[name]
    for name in _OF_PLANS:
        del costs[name]
    document = {
        "format": FORMAT,
        "schedule": asdict(run.schedule_options),
        "shape": asdict(run.shape),
        "costs_s": costs,
        "measured": {
            "batches": measured.num_batches,
            "step_s": measured.step_time,
            "idle_share": measured.idle,
            "parts_s": [asdict(parts) for parts in measured.parts],
        },
        "hardware": dict(run.hardware),
    }
    write_text(path, json.dumps(_rounded(document), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Convert to plain lists and dicts, with numbers rounded to nanoseconds."""
    if isinstance(value, Mapping):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(v) for v in value]
    return round(value, 9) if isinstance(value, float) else value


def read_costs(path: Path, most: int = _MAX_BYTES) -> RunCosts:
    """Read a file of `write_costs`, of at most `most` bytes.

    Raises:
        ConfigError: There is no such file.
        DataError: The content is invalid; the message names the place.
    """
    if not os.path.lexists(path):
        if path.parent.is_dir():
            raise config_error(
                "run", str(path.parent), f"has no {path.name}, which a run measures while it trains"
            )
        raise config_error(
            "run", str(path.parent), "does not exist", runs_near(path.parent) or "runs/NAME"
        )
    with errors_as(DataError, path, "cannot be read", ConfigError):
        return _run_costs(read_json(path, most, within=path.parent))


@dataclass(frozen=True)
class _Measured:
    """JSON form of a Measured."""

    batches: int
    step_s: Annotated[float, _TIME]
    idle_share: Annotated[tuple[float, ...], _TIME]
    parts_s: tuple[StepParts, ...]


@dataclass(frozen=True)
class _Document:
    """JSON form of costs.json."""

    format: str
    schedule: ScheduleOptions
    shape: PipelineShape
    costs_s: Costs
    measured: _Measured
    hardware: dict[str, Any]


def _with_new_names(document: Any) -> Any:
    """Return a document with the names that older files (sizes, chunks) have today."""
    if not isinstance(document, dict) or not isinstance(shape := document.get("sizes"), dict):
        return document
    renamed = {{"chunks": "virtual_stages"}.get(name, name): n for name, n in shape.items()}
    others = {name: value for name, value in document.items() if name != "sizes"}
    return others | {"shape": renamed}


def _run_costs(document: Any) -> RunCosts:
    """Convert a JSON document. Raises: ValueError, ConfigError."""
    if isinstance(document, dict) and (found := document.get("format")) != FORMAT:
        raise ValueError(
            f"format is {shown(found)}, not {FORMAT!r}; a run rewrites the file when it "
            f"continues to train"
        )
    read: _Document = from_plain(_Document, _with_new_names(document), "it")
    shape = read.shape
    measured = read.measured
    p = read.shape.num_ranks
    make_schedule(read.schedule).check_shape(shape)
    optional = {_OF_SPLIT, _OF_WAY, *_OF_TIERS, *_OF_PLANS}
    if missing := {f.name for f in fields(Costs)} - optional - document["costs_s"].keys():
        raise ValueError(f"costs_s.{min(missing)} is missing")
    _check_costs(read.costs_s, shape)
    _check_row("measured.idle_share", measured.idle_share, p)
    if len(measured.parts_s) != p:
        raise ValueError(f"measured.parts_s has {len(measured.parts_s)} entries, not {p}")
    for parts in measured.parts_s:
        _check_row("measured.parts_s", astuple(parts))
    return RunCosts(
        read.schedule,
        shape,
        Measured(
            read.costs_s, measured.batches, measured.step_s, measured.idle_share, measured.parts_s
        ),
        read.hardware,
    )


def _check_costs(costs: Costs, shape: PipelineShape) -> None:
    """Check that every cost exists for each place, and is a valid time. Raises: ValueError."""
    p = shape.num_ranks
    if costs.cores is not None and not 0 < costs.cores <= _MOST_CORES:
        raise ValueError(f"costs_s.cores is {shown(costs.cores)}")
    lengths = (
        {"norm": 1} | dict.fromkeys(_OF_STAGES, shape.num_stages) | dict.fromkeys(_OF_RANKS, p)
    )
    lengths |= dict.fromkeys(_OF_LINKS, shape.num_links)
    for name, size in lengths.items():
        if (cost := getattr(costs, name)) is not None:
            _check_row(f"costs_s.{name}", cost, size)
    for name, found, kinds in (
        ("calls", costs.calls, CALLS),
        ("variation", costs.variation, VARYING),
    ):
        if missing := [kind.value for kind in kinds if kind not in found]:
            raise ValueError(f"costs_s.{name}.{missing[0]} is missing")
    for kind, cost in costs.calls.items():
        _check_row(f"costs_s.calls.{kind.value}", cost, p)
    for kind, rows in costs.variation.items():
        if len(rows) != shape.num_stages or not all(rows):
            raise ValueError(
                f"costs_s.variation.{kind.value} is not {shape.num_stages} rows of numbers"
            )
        _check_row(f"costs_s.variation.{kind.value}", [time for row in rows for time in row])


def _check_row(place: str, cost: float | Sequence[float], size: int | None = None) -> None:
    """Check that `cost` is one valid time, or `size` of them. Raises: ValueError."""
    values = [cost] if isinstance(cost, float) else cost
    if not isinstance(cost, float) and size not in (None, len(cost)):
        raise ValueError(f"{place} has {len(cost)} numbers, not {size}")
    if wrong := [value for value in values if not _TIME.allows(value)]:
        raise ValueError(f"{place} has {shown(wrong[0])}, which is not a duration")


# -- summary


def describe(run: RunCosts, folder: Path | None = None) -> list[str]:
    """Summarize costs: step time and idle shares as measured and as simulated from the costs.

    One line says how the slowest stage spends the time of a step.

    folder: folder of the slow tier.
    """
    measured = run.measured
    costs = run.measured.costs
    m = run.shape.num_microbatches
    step = measured.step_time
    simulated, idle = run.timeline().steady_step(m)
    forward, backward = (
        expand(cost, run.shape.num_stages) for cost in (costs.forward, costs.backward)
    )
    work = [
        sum(m * (forward[s] + backward[s]) for s in run.shape.stages_of(r))
        for r in range(run.shape.num_ranks)
    ]
    slowest = work.index(max(work))
    name = run.shape.rank_name
    parts = measured.parts[slowest]
    shares = [
        (f"waiting for other {name}s", parts.waiting),
        ("waiting for the host optimizer", parts.host),
        ("waiting for state to come and go" + (f" ({folder})" if folder else ""), parts.state),
        ("communication calls", parts.calls),
        ("norm and optimizer", parts.optimizer),
        ("between actions", parts.between),
        ("without a core", parts.no_core),
    ]
    rest = "".join(
        f", {what} {in_ms(part)} ({part / step:.0%})" for what, part in shares if part > 5e-4 * step
    )
    mean = fmean(p.compute for p in measured.parts)
    return [
        f"step time: {in_ms(step)} measured ({measured.num_batches} batches), {in_ms(simulated)} "
        f"simulated from the measured costs ({simulated / step:.0%})",
        f"idle by {name}: {percent(measured.idle)} measured, {percent(idle)} simulated",
        f"slowest {name} {slowest}: computing {in_ms(parts.compute)} ({parts.compute / step:.0%} "
        f"of the step; the mean {name} {in_ms(mean)}){rest}",
    ]


def in_ms(seconds: float) -> str:
    """Format a time with three significant digits at most: 0.25 -> "250 ms"."""
    digits = 2
    if seconds >= 0.1:
        digits = 0
    elif seconds >= 0.01:
        digits = 1
    return f"{1e3 * seconds:.{digits}f} ms"


def percent(shares: Sequence[float]) -> str:
    """Format shares: "25 %, 30 %"."""
    return ", ".join(f"{100 * share:.0f} %" for share in shares)
