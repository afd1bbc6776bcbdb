"""The command that looks into the memory of a run, before or after: `memory`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.planning import cost_on_machine, resolved
from hybridpar.cli.values import ConfigFile, JobRanks, Overrides, Within
from hybridpar.config import Config, Launch
from hybridpar.errors import DataError, config_error
from hybridpar.reading import runs_near

if TYPE_CHECKING:
    from hybridpar.memory.account import Account
    from hybridpar.memory.behaviour import Behaviour
    from hybridpar.memory.events import Header, Span
    from hybridpar.memory.knobs import Saving
    from hybridpar.memory.planned import Counts
    from hybridpar.memory.sections import Section
    from hybridpar.memory.walk import StageMemory
    from hybridpar.pipeline.plan.costs import Costs

_TRACE = "trace.jsonl"
_SVG = "memory.svg"
_HTML = "memory.html"
_PERFETTO = "memory.perfetto.json"


@dataclass(frozen=True)
class Memory:
    """Say which blocks make up a rank's memory, when they are used, and what settings save;
    predicted or recorded."""

    path: ConfigFile
    config: Overrides
    measured: Annotated[str, arg(name="run")] = ""
    """A run folder: use what it recorded (train.record_memory), and its configuration."""
    trust: bool = False
    """With --run and no configuration file: import the code of a custom model that the run folder
    names."""
    rank: Annotated[int, Within(-1, 2**40)] = -1
    """A rank of the job; -1: the one with the largest peak, of all that recorded, or of the first
    pipeline."""
    ranks: JobRanks = 0
    """Processes of the job, none of which is started; 0: as many as the grid has."""
    batches: Annotated[int, Within(1, 1000)] = 4
    """Batches to predict; the first and the last one may differ from the others."""
    profile: str = ""
    """Predict with the times of a file of `hybridpar profile`."""
    cluster: str = ""
    """A cluster.toml: predict with estimated times on those machines (or those of the profile)."""
    output: str = ""
    """A folder for memory.html, memory.svg, memory.perfetto.json and, for predictions,
    trace.jsonl."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.memory import check_size
        from hybridpar.memory.account import examine
        from hybridpar.memory.sections import as_json, as_text, planned_section, report

        names = (_SVG, _HTML, _PERFETTO, *([] if self.measured else [_TRACE]))
        for name in names if self.output else ():
            check_outputs(
                [self.path, self.profile, self.cluster], output=str(Path(self.output, name))
            )
        config = resolved(self.config, self.ranks)
        costs = None
        if self.profile or self.cluster:
            cost = cost_on_machine(self.config, self.profile, self.cluster, launch)
            config = cost.config
            costs = cost.costs
        if self.measured:  # a run folder that somebody else may have made
            check_size(config)
        counts = self._planned(config) if self.measured else {}
        placed = (
            {"planned": {str(rank): asdict(one) for rank, one in counts.items()}} if counts else {}
        )
        if counts and not self._paths(config):
            print(
                json.dumps({"ok": True} | placed)
                if self.json
                else as_text([planned_section(counts)])
            )
            return 0
        trace = self._recorded(config) if self.measured else self._predicted(config, costs)
        account = examine(trace.header, trace.behaviour, trace.read, timed=trace.timed)
        memory, saved = _savings(config, trace.header)
        sections = [*report(account, memory, saved), *([planned_section(counts)] if counts else [])]
        if self.output:
            self._write(trace, account, sections)
        print(
            json.dumps(as_json(account, saved) | placed)
            if self.json
            else as_text([*trace.others, *sections])
        )
        return 0

    def _predicted(self, config: Config, costs: Costs | None) -> _Trace:
        from hybridpar.grid import lines_of, sizes_of
        from hybridpar.memory import predict
        from hybridpar.memory.behaviour import analyse
        from hybridpar.memory.excerpt import retimed, simulated_times
        from hybridpar.train.memory_trace import predict_trace
        from hybridpar.train.preview import preview

        if self.rank >= (number := config.parallel.num_ranks):
            raise config_error(
                "rank", self.rank, f"the grid has {number} ranks, from 0 on", str(number - 1)
            )
        rank = self.rank
        if rank < 0:
            peaks = [stage.total for stage in predict(config)]
            rank = lines_of(sizes_of(config.parallel))["pp"][0][peaks.index(max(peaks))]
        header, spans = predict_trace(config, rank, steps=self.batches)
        timeline = preview(config, self.batches, costs).timeline
        spans = list(retimed(spans, simulated_times(timeline, header.place["pp"])))
        return _Trace(header, analyse(spans), lambda: spans, costs is not None)

    def _recorded(self, config: Config) -> _Trace:
        from hybridpar.memory.behaviour import analyse
        from hybridpar.memory.sections import ranks_section
        from hybridpar.memory.trace_file import read_trace

        paths = self._paths(config)
        traces = [
            (_header(path, rank, config), analyse(read_trace(path)[1]))
            for rank, path in paths.items()
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

    def _planned(self, config: Config) -> dict[int, Counts]:
        """Counts of the run's planned memory, by rank; none where it had none."""
        from hybridpar.memory.planned import Counts
        from hybridpar.train.folder import MEMORY

        paths = {
            rank: Path(self.measured, MEMORY, f"planned{rank}.json")
            for rank in range(config.parallel.num_ranks)
        }
        return {rank: Counts.read(path) for rank, path in paths.items() if os.path.lexists(path)}

    def _paths(self, config: Config) -> dict[int, Path]:
        """Files that ranks of the run recorded, by rank: all, or the one that --rank names."""
        from hybridpar.train.folder import MEMORY

        run = Path(self.measured)
        if not run.is_dir():
            raise config_error(
                "run", self.measured, "is not a run folder", runs_near(run) or "runs/NAME"
            )
        # ranks beyond the grid are of an earlier job, on another grid
        paths = {
            rank: path
            for rank in range(config.parallel.num_ranks)
            if os.path.lexists(path := Path(self.measured, MEMORY, f"rank{rank}.jsonl"))
        }
        if not paths and not self._planned(config):
            raise config_error(
                "run", self.measured, "recorded no memory", "a run with train.record_memory = 3"
            )
        if self.rank < 0:
            return paths
        if self.rank not in paths:
            known = ", ".join(map(str, paths))
            raise config_error(
                "rank", self.rank, f"was not recorded, but {known} were", str(min(paths))
            )
        return {self.rank: paths[self.rank]}

    def _write(self, trace: _Trace, account: Account, sections: Sequence[Section]) -> None:
        from hybridpar.memory.drawing import pictures, stacked
        from hybridpar.memory.page import html_page, perfetto
        from hybridpar.memory.trace_file import header_line, span_line

        files = {
            _SVG: stacked(pictures(account)),
            _HTML: html_page(account, sections),
            _PERFETTO: perfetto(account),
        }
        if not self.measured:
            files[_TRACE] = header_line(trace.header) + "".join(map(span_line, trace.read()))
        for name, text in files.items():
            write_output("output", str(Path(self.output, name)), text)


@dataclass(frozen=True)
class _Trace:
    """Memory events of a rank. timed: times are seconds. others: what is to be said of other
    ranks."""

    header: Header
    behaviour: Behaviour
    read: Callable[[], Iterable[Span]]
    timed: bool
    others: Sequence[Section] = ()


def _header(path: Path, rank: int, config: Config) -> Header:
    """Raises: DataError for a trace of another rank, or on another grid."""
    from hybridpar.grid import place_of, sizes_of
    from hybridpar.memory.trace_file import read_trace

    header = read_trace(path)[0]
    place = place_of(rank, sizes_of(config.parallel))
    if (header.rank, header.place) != (rank, place):
        raise DataError(
            f"{path}: is of rank {header.rank} at {header.place}; rank {rank} of this run is at "
            f"{place}"
        )
    return header


def _savings(config: Config, header: Header) -> tuple[StageMemory, list[Saving]]:
    """The predicted peak of a rank, and the savings of all knobs."""
    import torch

    from hybridpar.memory import predict
    from hybridpar.memory.knobs import knobs, savings

    rank = header.place["pp"]
    device = torch.device("cuda" if header.device.startswith("cuda") else "cpu")
    memory = predict(config, device=device, ranks=[rank])[0]
    return memory, savings(config, rank, memory, knobs(config, rank, memory), device)
