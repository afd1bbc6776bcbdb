"""The command `memory`, which reports a run's memory, predicted or recorded. Its flags are in
hybridpar/cli/memory.py."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.planning import cost_on_machine, resolved
from hybridpar.config import Config, Launch
from hybridpar.errors import DataError, config_error
from hybridpar.grid import lines_of, place_of, sizes_of
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.analysis.account import Account, examine
from hybridpar.memory_behaviour.analysis.behaviour import Behaviour, analyse
from hybridpar.memory_behaviour.analysis.excerpt import simulated_times
from hybridpar.memory_behaviour.events import Header, Span
from hybridpar.memory_behaviour.pictures.drawing import pictures, stacked
from hybridpar.memory_behaviour.pictures.page import html_page, perfetto
from hybridpar.memory_behaviour.pictures.sections import (
    Section,
    as_json,
    as_text,
    ranks_section,
    report,
)
from hybridpar.memory_behaviour.recording.memory_trace import predict_timed_trace
from hybridpar.memory_behaviour.trace_file import header_line, read_trace, span_line
from hybridpar.prediction import check_size, predict
from hybridpar.prediction.garbage import without_collections
from hybridpar.prediction.knobs import Saving, knobs, savings
from hybridpar.prediction.walk import StageMemory
from hybridpar.reading import runs_near
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.folder import MEMORY
from hybridpar.train.forecasts.preview import preview
from hybridpar.train.forecasts.tier_forecast import require_limit

if TYPE_CHECKING:
    from hybridpar.cli.memory import Memory

_TRACE = "trace.jsonl"
_SVG = "memory.svg"
_HTML = "memory.html"
_PERFETTO = "memory.perfetto.json"
_LARGE_TRACE = 1 << 23
"""Bytes of a predicted trace from which on it is written compressed."""


@without_collections()
def report_memory(flags: Memory, launch: Launch) -> int:
    """Print what makes up a rank's memory, predicted or recorded. Return the exit code."""
    names = (_SVG, _HTML, _PERFETTO, *([] if flags.measured else [_TRACE]))
    for name in names if flags.output else ():
        check_outputs(
            [flags.path, flags.profile, flags.cluster], output=str(Path(flags.output, name))
        )
    config = resolved(flags.config, flags.ranks)
    costs = None
    if flags.profile or flags.cluster:
        cost = cost_on_machine(flags.config, flags.profile, flags.cluster, launch)
        config = cost.config
        costs = cost.costs
    if flags.measured:  # the run folder may come from another user
        check_size(config)
    trace = _recorded(flags, config) if flags.measured else _predicted(flags, config, costs)
    account = examine(trace.header, trace.behaviour, trace.read, timed=trace.timed)
    memory, saved = _savings(config, trace.header)
    sections = report(account, memory, saved)
    if flags.output:
        _write(flags, trace, account, sections)
    print(
        json.dumps(as_json(account, saved)) if flags.json else as_text([*trace.others, *sections])
    )
    return 0


def _predicted(flags: Memory, config: Config, costs: Costs | None) -> _Trace:
    if flags.rank >= (number := config.parallel.num_ranks):
        raise config_error(
            "rank",
            flags.rank,
            f"must be from 0 to {number - 1}: the grid has {number} ranks",
            str(number - 1),
        )
    rank = flags.rank
    job = JobPlan(config)
    require_limit(job)
    if rank < 0:
        peaks = [stage.total for stage in predict(job)]
        rank = lines_of(sizes_of(config.parallel))["pp"][0][peaks.index(max(peaks))]
    place = place_of(rank, sizes_of(config.parallel))["pp"]
    times = simulated_times(preview(job, flags.batches, costs).timeline, place)
    header, spans = predict_timed_trace(config, rank, times, steps=flags.batches)
    return _Trace(header, analyse(spans), lambda: spans, costs is not None)


def _recorded(flags: Memory, config: Config) -> _Trace:
    paths = _paths(flags, config)
    traces = [
        (_header(path, rank, config), analyse(read_trace(path)[1])) for rank, path in paths.items()
    ]
    header, behaviour = max(traces, key=lambda trace: trace[1].peak.num_bytes)
    path = paths[header.rank]
    return _Trace(
        header,
        behaviour,
        lambda: read_trace(path)[1],
        True,
        [ranks_section(traces)] if len(traces) > 1 else [],
    )


def _paths(flags: Memory, config: Config) -> dict[int, Path]:
    """Return the files that ranks of the run recorded, by rank: all, or the rank of --rank."""
    run = Path(flags.measured)
    if not run.is_dir():
        raise config_error("run", flags.measured, "not a run folder", runs_near(run) or "runs/NAME")
    # ranks beyond the grid are of an earlier job, on another grid
    paths = {
        rank: path
        for rank in range(config.parallel.num_ranks)
        if os.path.lexists(path := Path(flags.measured, MEMORY, f"rank{rank}.jsonl"))
    }
    if not paths:
        raise config_error(
            "run", flags.measured, "has no record of memory", "a run with train.record_memory = 3"
        )
    if flags.rank < 0:
        return paths
    if flags.rank not in paths:
        known = ", ".join(map(str, paths))
        raise config_error(
            "rank", flags.rank, f"was not recorded; the run recorded {known}", str(min(paths))
        )
    return {flags.rank: paths[flags.rank]}


def _write(flags: Memory, trace: _Trace, account: Account, sections: Sequence[Section]) -> None:
    files: dict[str, str | bytes] = {
        _SVG: stacked(pictures(account)),
        _HTML: html_page(account, sections),
        _PERFETTO: perfetto(account),
    }
    if not flags.measured:
        lines = header_line(trace.header) + "".join(map(span_line, trace.read()))
        if len(lines) <= _LARGE_TRACE:
            files[_TRACE] = lines
        else:  # equal micro-batches take little room
            files[f"{_TRACE}.gz"] = gzip.compress(lines.encode(), mtime=0)
    for name, content in files.items():
        write_output("output", str(Path(flags.output, name)), content)


@dataclass(frozen=True)
class _Trace:
    """Memory events of a rank. `timed`: times are seconds. `others`: sections about other ranks."""

    header: Header
    behaviour: Behaviour
    read: Callable[[], Iterable[Span]]
    timed: bool
    others: Sequence[Section] = ()


def _header(path: Path, rank: int, config: Config) -> Header:
    """Return the header of a rank's trace.

    Raises: DataError if the trace is of another rank, or of another grid.
    """
    header = read_trace(path)[0]
    place = place_of(rank, sizes_of(config.parallel))
    if (header.rank, header.place) != (rank, place):
        raise DataError(
            f"{path}: belongs to rank {header.rank} at {header.place}, which does not match rank "
            f"{rank} of this run at {place}"
        )
    return header


def _savings(config: Config, header: Header) -> tuple[StageMemory, list[Saving]]:
    """Return the predicted peak of a rank, and the savings of all knobs."""
    rank = header.place["pp"]
    device = torch.device("cuda" if header.device.startswith("cuda") else "cpu")
    memory = predict(JobPlan(config), device=device, ranks=[rank])[0]
    return memory, savings(config, rank, memory, knobs(config, rank, memory), device)
