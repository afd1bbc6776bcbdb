"""costs.json: what the steps of a run's schedule cost, as measured; and what that says of this and other schedules.

Units: seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hybridpar.checkpoint.files import write_text
from hybridpar.config import Config
from hybridpar.errors import ConfigError, DataError, config_error, shown
from hybridpar.pipeline.plan.costs import Costs
from hybridpar.pipeline.plan.predict import Ordering
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.pipeline.plan.timeline import Timeline
from hybridpar.reading import nearest_path, read_limited, reason
from hybridpar.train.measure import CALLS, VARYING, Measured, Parts, measure
from hybridpar.train.trace import RankEvents

FORMAT = "hybridpar costs 3"
_MAX_BYTES, _LONGEST_S, _MOST_CORES = 256 << 20, 1e9, 1e6
_OF_STAGES = ("forward", "backward")
_OF_SPLIT = "backward_input"  # is there where backwards were split
_OF_RANKS = ("update", "reduce", "gather")
_OF_LINKS = ("transfer", "latency", "transfer_work")


@dataclass(frozen=True)
class RunCosts:
    """Content of costs.json."""

    ordering: Ordering
    sizes: Sizes
    measured: Measured
    hardware: Mapping[str, Any] = field(default_factory=dict)

    def timeline(self) -> Timeline:
        """The steady state that the costs imply."""
        return self.ordering.timeline(self.sizes, self.measured.costs)


def run_costs(config: Config, ranks: Sequence[RankEvents]) -> RunCosts | None:
    """Costs of the recorded actions of a run; None where they are too few."""
    sizes = Sizes.of(config)
    measured = measure(ranks, sizes, tied=config.model.tie_embeddings and sizes.num_ranks > 1)
    if measured is None:
        return None
    host = ranks[0].host
    return RunCosts(Ordering.of(config), sizes, measured, {
        "hosts": sorted({r.host.name for r in ranks}), "device": host.device, "cores": host.cores,
        "threads": host.threads, "ranks": len(ranks), "torch": torch.__version__,
    })


# -- the file ----------------------------------------------------------------------------------------------------------


def write_costs(run: RunCosts, path: Path) -> None:
    """Writes costs.json."""
    measured = run.measured
    costs = {f.name: getattr(measured.costs, f.name) for f in fields(Costs)}
    for name in ("calls", "variation"):
        costs[name] = {kind.value: cost for kind, cost in costs[name].items()}
    if costs[_OF_SPLIT] is None:
        del costs[_OF_SPLIT]
    document = {
        "format": FORMAT, "schedule": asdict(run.ordering), "sizes": asdict(run.sizes), "costs_s": costs,
        "measured": {
            "batches": measured.num_batches, "step_s": measured.step_time, "idle_share": measured.idle,
            "parts_s": [asdict(parts) for parts in measured.parts],
        },
        "hardware": dict(run.hardware),
    }
    write_text(path, json.dumps(_rounded(document), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Plain lists and dicts; numbers to the nanosecond."""
    if isinstance(value, Mapping):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(v) for v in value]
    return round(value, 9) if isinstance(value, float) else value


def read_costs(path: Path) -> RunCosts:
    """Reads what `write_costs` wrote.

    Raises: ConfigError if there is no such file; DataError, with the place, if it holds something else.
    """
    try:
        document = json.loads(read_limited(path, _MAX_BYTES))
    except FileNotFoundError:
        if path.parent.is_dir():
            rule = f"has no {path.name}: that is measured as a run trains"
            raise config_error("run", str(path.parent), rule) from None
        raise config_error("run", str(path.parent), "does not exist",
                           nearest_path(path.parent) or "runs/NAME") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)})") from None
    try:
        return _run_costs(_Reader(document))
    except (ConfigError, ValueError) as error:
        raise DataError(f"{path}: {error}") from None


class _Reader:
    """A JSON object, and where it stands in the document, for messages."""

    def __init__(self, value: Any, where: str = ""):
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'the document'} is not an object")
        self._value, self._where = value, where

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Raises: ValueError if it is not there, or not of that kind."""
        place = f"{self._where}.{key}".lstrip(".")
        if key not in self._value:
            raise ValueError(f"{place} is missing")
        value = self._value[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{place} is {shown(value)}")
        return value

    def section(self, key: str) -> _Reader:
        return _Reader(self.get(key, dict), f"{self._where}.{key}".lstrip("."))

    def seconds(self, key: str) -> float:
        return self._positive(self.get(key, (int, float)), key)

    def row(self, key: str, size: int) -> tuple[float, ...]:
        values = self.get(key, list)
        if len(values) != size:
            raise ValueError(f"{self._where}.{key} has {len(values)} numbers, not {size}")
        return tuple(self._positive(value, key) for value in values)

    def rows(self, key: str, size: int) -> tuple[tuple[float, ...], ...]:
        """So many rows of at least one number each."""
        rows = self.get(key, list)
        if len(rows) != size or not all(isinstance(row, list) and row for row in rows):
            raise ValueError(f"{self._where}.{key} is not {size} rows of numbers")
        return tuple(tuple(self._positive(value, key) for value in row) for row in rows)

    def cost(self, key: str, size: int) -> float | tuple[float, ...]:
        """One number, or one for each stage or link."""
        return self.row(key, size) if isinstance(self._value.get(key), list) else self.seconds(key)

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def _positive(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
            raise ValueError(f"{self._where}.{key} has {shown(value)}, which is no length of time")
        return float(value)


def _run_costs(document: _Reader) -> RunCosts:
    if (found := document.get("format", str)) != FORMAT:
        raise ValueError(f"format is {shown(found)}, not {FORMAT!r}: a run writes the file anew as it trains on")
    options, size = document.section("schedule"), document.section("sizes")
    sizes = Sizes(size.get("num_ranks", int), size.get("num_microbatches", int), size.get("chunks", int))
    ordering = Ordering(
        options.get("schedule", str), options.get("warmup", str), options.get("early_switch", (int, type(None))),
        options.get("gradient_buffers", int), options.get("clip", bool), options.get("gather", bool),
        "split" in options and options.get("split", bool))
    ordering.make().check_sizes(sizes)
    measured, p = document.section("measured"), sizes.num_ranks
    parts = measured.get("parts_s", list)
    if len(parts) != p:
        raise ValueError(f"measured.parts_s has {len(parts)} entries, not {p}")
    return RunCosts(ordering, sizes, Measured(
        _costs(document.section("costs_s"), sizes), measured.get("batches", int), measured.seconds("step_s"),
        measured.row("idle_share", p), tuple(_parts(_Reader(one, "measured.parts_s")) for one in parts),
    ), document.get("hardware", dict))


def _costs(section: _Reader, sizes: Sizes) -> Costs:
    p = sizes.num_ranks
    cores = section.get("cores", (int, float, type(None)))
    if cores is not None and not 0 < cores <= _MOST_CORES:
        raise ValueError(f"costs_s.cores is {shown(cores)}")
    calls, variation = section.section("calls"), section.section("variation")
    costs: dict[str, Any] = {name: section.cost(name, sizes.num_stages) for name in _OF_STAGES}
    if _OF_SPLIT in section:
        costs[_OF_SPLIT] = section.cost(_OF_SPLIT, sizes.num_stages)
    costs |= {name: section.cost(name, p) for name in _OF_RANKS}
    costs |= {name: section.cost(name, p if sizes.is_ring else p - 1) for name in _OF_LINKS}
    costs |= {name: section.get(name, bool) for name in ("tied", "blocking_norm", "serial_links")}
    return Costs(
        **costs, calls={kind: calls.cost(kind.value, p) for kind in CALLS}, norm=section.seconds("norm"), cores=cores,
        variation={kind: variation.rows(kind.value, sizes.num_stages) for kind in VARYING})


def _parts(section: _Reader) -> Parts:
    return Parts(*(section.seconds(f.name) for f in fields(Parts)))


# -- what it says ------------------------------------------------------------------------------------------------------


def describe(run: RunCosts) -> list[str]:
    """A few lines: the step time and idle shares that were measured and those that the costs imply, and where the time
    of a step goes on the slowest stage."""
    measured, costs, m = run.measured, run.measured.costs, run.sizes.num_microbatches
    timeline = run.timeline()
    since, until, num_batches = timeline.steady(m)
    step, simulated = measured.step_time, (until - since) / num_batches
    ranks = range(run.sizes.num_ranks)
    idle = [timeline.idle_share(rank, since, until) for rank in ranks]
    work = [sum(m * (_at(costs.forward, s) + _at(costs.backward, s)) for s in run.sizes.stages_of(r)) for r in ranks]
    slowest, name = work.index(max(work)), run.sizes.rank_name
    parts = measured.parts[slowest]
    shares = [
        (f"waiting for other {name}s", parts.waiting), ("communication calls", parts.calls),
        ("norm and optimizer", parts.optimizer), ("between actions", parts.between), ("without a core", parts.no_core)]
    rest = "".join(f", {what} {in_ms(part)} ({part / step:.0%})" for what, part in shares if part > 5e-4 * step)
    return [
        f"step time: {in_ms(step)} measured ({measured.num_batches} batches), {in_ms(simulated)} simulated from "
        f"the measured costs ({simulated / step:.0%})",
        f"idle by {name}: {percent(measured.idle)} measured, {percent(idle)} simulated",
        f"slowest {name} {slowest}: computing {in_ms(parts.compute)} ({parts.compute / step:.0%} of the step; the mean "
        f"{name} {in_ms(fmean(p.compute for p in measured.parts))}){rest}",
    ]


def _at(cost: float | Sequence[float], stage: int) -> float:
    return cost if isinstance(cost, int | float) else cost[stage]


def in_ms(seconds: float) -> str:
    """For people."""
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms"


def percent(shares: Sequence[float]) -> str:
    """For people, one after the other."""
    return ", ".join(f"{100 * share:.0f} %" for share in shares)
