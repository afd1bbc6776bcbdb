"""The command `simulate`, which draws and times a schedule."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from tyro.conf import arg

from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.planning import cost_on_machine, resolved
from hybridpar.cli.values import ConfigFile, Overrides, Within
from hybridpar.config import Config, Launch
from hybridpar.schedules.simulate.timeline import milliseconds

if TYPE_CHECKING:
    from hybridpar.train.forecasts.preview import Preview

_WIDEST = 400
"""Largest width in characters of a picture in a terminal."""


@dataclass(frozen=True)
class Simulate:
    """Draw the pipeline schedule of a configuration, and predict idle times and the step time."""

    path: ConfigFile
    config: Overrides
    measured: Annotated[str, arg(name="run")] = ""
    """A run folder: simulate with its measured costs and its configuration. Flags may select
    another schedule or number of micro-batches."""
    trust: bool = False
    """Import the code of a custom model from the folder that the run recorded. Needed only with
    --run and without a configuration file."""
    profile: str = ""
    """A file of `hybridpar profile`, whose times the simulation uses."""
    cluster: str = ""
    """A cluster.toml: simulate on those machines with estimated times, or with the times of the
    profile."""
    svg: str = ""
    """Also write a picture to this file."""
    perfetto: str = ""
    """Also write a trace for ui.perfetto.dev to this file."""
    batches: Annotated[int, Within(1, 10_000)] = 3
    """Number of batches to draw. The third batch of a 2bw run is the first with other weights than
    the first batch."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.data.document_length import with_document_length
        from hybridpar.job import JobPlan
        from hybridpar.planner.machines.stragglers import spread
        from hybridpar.prediction import check_size
        from hybridpar.train.forecasts.preview import costs_of_run, preview

        check_outputs(
            [self.path, self.profile, self.cluster],
            svg=self.svg or None,
            perfetto=self.perfetto or None,
        )
        config = with_document_length(resolved(self.config))
        costs = None
        late = None
        if self.measured:  # the run folder may come from another user
            check_size(config)
        run = costs_of_run(Path(self.measured), config) if self.measured else None
        if self.profile or self.cluster:
            described = with_document_length(self.config)
            cost = cost_on_machine(described, self.profile, self.cluster, launch)
            config = cost.config
            costs = cost.costs
            late = spread(cost)
        elif run:
            costs = run.measured.costs
        job = JobPlan(config)
        shown = preview(job, self.batches, costs)
        rank_name = job.shape.rank_name
        self._draw(config, shown, rank_name, timed=costs is not None)
        time = f"{shown.step_time:.2f} times the forward of the costliest {rank_name}"
        if run:
            time = (
                f"{milliseconds(shown.step_time)} ms, from the costs of {self.measured} (where one "
                "took "
                f"{milliseconds(run.measured.step_time)} ms with {run.schedule_options.schedule} and "
                f"{run.shape.num_microbatches} micro-batches)"
            )
        elif costs:
            time = (
                f"{milliseconds(shown.step_time)} ms on {config.parallel.num_ranks} ranks, "
                f"{config.batch_tokens / shown.step_time:,.0f} {config.model.counts}/s"
            )
        out = sys.stderr if self.json else sys.stdout
        print(f"steady state: a batch takes {time}{f'; {late}' if late else ''}", file=out)
        number = job.shape.virtual_stages
        each = f" (each counted on its {number} stages)" if number > 1 else ""
        for rank, bubble in enumerate(shown.bubble):
            versions = shown.peak_versions[rank]
            print(
                f"  {rank_name} {rank}: idle {100 * bubble:4.1f} %, at most "
                f"{shown.peak_activations[rank]} micro-batches in flight{each}, {versions} weight "
                f"version{'s' * (versions > 1)}",
                file=out,
            )
        if self.json:
            pipeline = config.pipeline
            print(
                json.dumps(
                    {
                        "ok": True,
                        "schedule": pipeline.schedule,
                        "stages": config.parallel.pp,
                        "virtual_stages": pipeline.num_virtual_stages,
                        "ranks": config.parallel.num_ranks,
                        "num_microbatches": pipeline.num_microbatches,
                        "step_time": shown.step_time,
                        "stragglers": [late.median, late.late] if late else None,
                        "bubble": shown.bubble,
                        "peak_activations": shown.peak_activations,
                        "peak_versions": shown.peak_versions,
                        "makespan": shown.timeline.makespan,
                        "unit": "s" if costs else f"forward of the costliest {rank_name}",
                        "measured_step_time": run.measured.step_time if run else None,
                        "svg": self.svg or None,
                    }
                )
            )
        return 0

    def _draw(self, config: Config, shown: Preview, rank_name: str, timed: bool) -> None:
        """Draw the pipeline to the terminal and to files.

        Args:
            timed: Whether its times are seconds.
        """
        from hybridpar.schedules.draw.draw_text import draw
        from hybridpar.schedules.draw.perfetto import trace_entries, trace_json
        from hybridpar.schedules.draw.svg import FORWARDS, draw_svg

        pipeline = config.pipeline
        ranks = config.parallel.pp
        # units of the simulation per second; without measurements one unit is drawn as 1 ms
        per_second = 1.0 if timed else 1e3
        in_ms = 1e3 / per_second
        held = f" on {ranks} ranks" if pipeline.num_virtual_stages > 1 else ""
        title = (
            f"{pipeline.schedule}, {ranks * pipeline.num_virtual_stages} stages{held}, "
            f"{pipeline.num_microbatches} "
            "micro-batches a batch"
        )
        if self.svg:
            unit = "milliseconds" if timed else FORWARDS
            write_output(
                "svg",
                self.svg,
                draw_svg(
                    shown.drawn().scaled(in_ms),
                    title=f"{title} (simulated)",
                    unit=unit,
                    steady_idle=shown.bubble,
                ),
            )
        if self.perfetto:
            each = config.parallel.num_ranks // ranks
            held_by = [
                f", ranks {rank * each}-{rank * each + each - 1}" if each > 1 else ""
                for rank in range(ranks)
            ]
            names = {
                rank: (rank, f"{rank_name} {rank}{processes}")
                for rank, processes in enumerate(held_by)
            }
            entries = trace_entries(shown.timeline, names, per_second=per_second)
            write_output("perfetto", self.perfetto, trace_json(entries))
        # a forward or backward takes at least two columns
        known_wide = timed and 2 * len(shown.timeline.batch_starts(1)) > _WIDEST
        picture = "" if known_wide else draw(shown.timeline.scaled(in_ms))
        fits = not known_wide and (max(map(len, picture.splitlines())) <= _WIDEST or not timed)
        out = sys.stderr if self.json else sys.stdout
        print(f"{title}\n\n{_cut(picture, out)}\n" if fits else title, file=out)


def _cut(picture: str, out: TextIO) -> str:
    """Return a text with lines cut to the width of the terminal; unchanged for a file or pipe."""
    if not out.isatty():
        return picture
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        line if len(line) <= columns else f"{line[: columns - 4]} ..."
        for line in picture.splitlines()
    )
