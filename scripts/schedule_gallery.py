"""Writes docs/all_schedules.md: every schedule on one axis of time, and in one table what it costs.

python scripts/schedule_gallery.py [FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, make_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate

FILE = Path(__file__).resolve().parents[1] / "docs" / "all_schedules.md"
TABLES = (4, 8), (8, 32)
DRAWN = 3, 4
"""Ranks and micro-batches of the sizes that the table has, and of the drawings."""
# of half a forward; halves that are drawn
_COLUMNS = 4
_LONGEST = 40
_ZERO: dict[str, Any] = {"zero_bubble": True}
SCHEDULES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Naive", "naive", {}),
    ("GPipe", "gpipe", {}),
    ("1F1B", "1f1b", {}),
    ("ZB-H1", "1f1b", _ZERO),
    ("ZB-H2", "1f1b", {"warmup": "latency", **_ZERO}),
    ("Interleaved", "interleaved", {"virtual_stages": 2}),
    ("Interleaved ZB-H1", "interleaved", {"virtual_stages": 2, **_ZERO}),
    ("ZB-V", "1f1b", {"stage_layout": "v"}),
    ("There and back twice", "1f1b", {"stage_layout": "v", "virtual_stages": 4}),
    ("V-Half", "1f1b", {"stage_layout": "v", "activations": "half"}),
    ("V-Min", "1f1b", {"stage_layout": "v", "activations": "min"}),
    ("PipeDream", "pipedream", {}),
    ("2BW", "2bw", {}),
    ("2BW, longer warm-up", "2bw", {"warmup": "latency"}),
    ("2BW, interleaved", "2bw", {"virtual_stages": 2}),
    ("2BW on V-Half", "2bw", {"stage_layout": "v", "activations": "half"}),
    ("2BW on V-Min", "2bw", {"stage_layout": "v", "activations": "min"}),
)
"""Name, schedule and options."""
_HEAD = """# All schedules

Written by `scripts/schedule_gallery.py`. A forward of a rank takes 1, a backward 2 (I, for the input, and W, for the
weights, 1 each), a transfer nothing.

- idle: the share of a batch's time in which a rank does not work; without a drain, in the steady state. `simulate`,
  the pictures and the end of a run mean the same.
- activations: the most that a rank holds, in micro-batches of all its layers.
- versions: the most versions of the weights that a rank holds.
- messages: activations and gradients that go from rank to rank for each micro-batch.

`check` proves each of them, as it does a run's plan. `pipeline.schedule = "auto"` measures those that drain, and takes
the fastest.
"""


def sizes_for(options: dict[str, Any], schedule: str, p: int, m: int) -> PipelineShape:
    stage_layout = options.get("stage_layout", "loop")
    default = 2 if stage_layout == "v" or schedule == "interleaved" else 1
    return PipelineShape(p, m, options.get("virtual_stages", default), stage_layout)


def plan_for(schedule: Schedule, sizes: PipelineShape, num_batches: int) -> Any:
    lowered = schedule.with_options(
        split=sizes.is_v or schedule.options.zero_bubble, clip=schedule.name != "pipedream"
    )
    return make_plan(lowered, sizes, 0, num_batches)


def costs_for(sizes: PipelineShape) -> Costs:
    return Costs(1 / sizes.virtual_stages, 2 / sizes.virtual_stages)


def numbers(name: str, options: dict[str, Any], p: int, m: int) -> tuple[float, float, int, float]:
    """Idle share, activations, versions, messages."""
    schedule, sizes = (
        make_schedule(ScheduleOptions(name, **options)),
        sizes_for(options, name, p, m),
    )
    costs = costs_for(sizes)
    work = 3.0 * m
    report = check(plan_for(schedule, sizes, 3), sizes, schedule)
    time = (
        simulate(plan_for(schedule, sizes, 1), costs).makespan
        if schedule.flush
        else simulate(plan_for(schedule, sizes, 6), costs).step_time(m)
    )
    sends = sum(
        ACTION_SPECS[a.kind].matching_recv is not None
        for actions in plan_for(schedule, sizes, 1).values()
        for a in actions
    )
    return (
        1 - work / time,
        max(live.activations for live in report.peaks) / sizes.virtual_stages,
        max(live.versions for live in report.peaks),
        sends / m,
    )


def table() -> str:
    """A row for each schedule."""
    sizes = [f"p = {p}, m = {m}: idle | activations | versions | messages" for p, m in TABLES]
    lines = [
        f"| | settings of `[pipeline]` | {' | '.join(sizes)} |",
        "|---" * (2 + 4 * len(TABLES)) + "|",
    ]
    for title, name, options in SCHEDULES:
        cells = []
        for p, m in TABLES:
            idle, held, versions, messages = numbers(name, options, p, m)
            cells += [f"{100 * idle:.1f} %", f"{held:g}", str(versions), f"{messages:g}"]
        lines.append(f"| {title} | {settings(name, options)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def settings(name: str, options: dict[str, Any]) -> str:
    split = {"split_backward": True} if options.keys() & {"zero_bubble", "stage_layout"} else {}
    given = {"schedule": name, **options, **split}
    return ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in given.items())


def picture(name: str, options: dict[str, Any]) -> str:
    """The first batches, or one that drains, as far as the axis goes."""
    schedule = make_schedule(ScheduleOptions(name, **options))
    sizes = sizes_for(options, name, *DRAWN)
    timeline = simulate(plan_for(schedule, sizes, 1 if schedule.flush else 4), costs_for(sizes))
    lines = draw(timeline, unit=0.5, width=_COLUMNS).splitlines()
    return "\n".join(line[: 9 + _COLUMNS * _LONGEST].rstrip() for line in lines)


def page() -> str:
    p, m = DRAWN
    drawn = "\n\n".join(
        f"{title}: {settings(name, options)}\n\n```text\n{picture(name, options)}\n```"
        for title, name, options in SCHEDULES
    )
    return (
        f"{_HEAD}\n{table()}\n\n## On one axis\n\n{p} ranks, {m} micro-batches, {_COLUMNS} columns "
        "for half a "
        "forward; without a drain, the first batches. `F0b` is on the second stage of a rank, `*` "
        "an update."
        f"\n\n{drawn}\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(page())
