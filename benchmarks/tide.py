"""Claim: in equal memory, a limit moves fewer bytes than the best constant budget.

    python -m benchmarks.tide

GPT of the shape of GPT-345M, four micro-batches of four sequences, on one process. For each limit:
the bytes that a steady step reads and writes with `memory.limit`, and with the largest
`memory.budget` that fits the same memory. Both follow from the plan that a run would have, on
ghosts: nothing is computed. `small` is a model that trains, and its bytes are counted.

`ratio`: bytes moved with the limit over bytes moved with the budget.

State that an action of every micro-batch needs (weights, gradients) gains from memory that
activations leave. State that is needed once a step (moments, master copy) does not: to be there at
the next update it has to stay through the peak of activations, which both leave the same room.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.common import FixedLoader, Shape, engine_config, write_results
from benchmarks.files import write_svg
from hybridpar.config import Config, MemoryConfig
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.predict import predict
from hybridpar.schedules.action import PER_ITEM, Kind
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.passes.residency import add_residency
from hybridpar.train.engine import Engine
from hybridpar.train.forecasts.ghost_rank import GhostRank
from hybridpar.train.forecasts.tier_forecast import forecast

MICROBATCHES = 4
PLENTY = 1 << 50
SHAPES = {
    "345M": Shape(24, 1024, 16, 1024, 50304, 4),
    "small": Shape(4, 128, 4, 128, 2048, 4),
}
CASES = [
    (name, schedule, dtype)
    for name in SHAPES
    for schedule in ("gpipe", "1f1b", "2bw")
    for dtype in ("fp32", "bf16")
]
MEANING = (
    "limit, budget: bytes of all memory, and of state alone, that a process may take; moved: bytes "
    "that a step reads and writes, with the limit and with the budget; counted: the same of a run"
)


@dataclass(frozen=True)
class Bounds:
    """Bytes of a training: `most` without moves, `besides` of it no state, `least` to run with
    either."""

    most: int
    besides: int
    least: int


def config_of(shape: Shape, schedule: str, dtype: str, **memory: Any) -> Config:
    base = engine_config(shape, schedule=schedule, num_microbatches=MICROBATCHES, dtype=dtype)
    return replace(base, memory=MemoryConfig(**memory))


def bounds_of(config: Config) -> Bounds:
    plenty = JobPlan(replace(config, memory=MemoryConfig(limit=PLENTY)))
    budget = JobPlan(replace(config, memory=MemoryConfig(budget=PLENTY)))
    (peak,) = predict(plenty)
    besides = peak.total - peak.state
    least = max(forecast(plenty).least, besides + forecast(budget).least)
    return Bounds(forecast(budget).state + besides, besides, least)


def counted(config: Config, shape: Shape) -> int:
    """Bytes that a steady step of a run moves."""
    engine = Engine(JobPlan(config), ProcessGrid(), torch.device("cpu"))
    tiers = engine.state.memory.tiers
    loader = FixedLoader(shape, MICROBATCHES)
    totals: list[int] = []

    def note(result: object) -> None:
        totals.append(tiers.traffic.read + tiers.traffic.written)

    engine.train(loader, 10, note)
    engine.close()
    return (totals[7] - totals[3]) // 4


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, schedule, dtype in CASES:
        shape = SHAPES[name]
        config = config_of(shape, schedule, dtype)
        bounds = bounds_of(config)
        for share in args.shares:
            limit = int(bounds.least + share * (bounds.most - bounds.least))
            with_limit = replace(config, memory=MemoryConfig(limit=limit))
            with_budget = replace(config, memory=MemoryConfig(budget=limit - bounds.besides))
            found = [forecast(JobPlan(each)) for each in (with_limit, with_budget)]
            moved = [each.read + each.written for each in found]
            case = {
                "case": f"{name}, {schedule}, {dtype}, {share:.0%}",
                "settings": {"shape": name, "schedule": schedule, "dtype": dtype},
                "limit": limit,
                "budget": limit - bounds.besides,
                "moved": moved,
                "ratio": round(moved[0] / max(moved[1], 1), 4),
            }
            if name == "small":
                with tempfile.TemporaryDirectory() as folder:
                    case["counted"] = [
                        counted(replace(each, memory=replace(each.memory, folder=folder)), shape)
                        for each in (with_limit, with_budget)
                    ]
            print(case["case"], case["ratio"], case.get("counted", ""), flush=True)
            yield case


def draw(path: Path) -> None:
    """Draw the memory of two steps: state below, and everything else above."""
    config = config_of(SHAPES["345M"], "gpipe", "fp32")
    config = replace(config, pipeline=replace(config.pipeline, recompute="all"))
    bounds = bounds_of(config)
    limit = int(bounds.least + 0.4 * (bounds.most - bounds.least))
    job = JobPlan(replace(config, memory=MemoryConfig(limit=limit)))
    rank = GhostRank.of(job, 0)
    pool = rank.accesses(job.shape).tiers(rank.room(job.shape))
    fast = FastTiers([pool])
    (tier,) = fast.tiers
    state: list[float] = []
    room: list[float] = []
    updates: list[int] = []
    for action in add_residency(rank.actions(job.options, job.shape, 6), [pool]):
        fast.follow(action)
        if action.kind in PER_ITEM:
            continue
        if action.kind is Kind.UPDATE and action.part == 0:
            updates.append(len(state))
        state.append(tier.num_bytes / 2**30)
        room.append(tier.room / 2**30)
    shown = slice(updates[2], updates[4])
    time = range(len(state[shown]))
    top = limit / 2**30
    figure = Figure(figsize=(9, 3.2))
    axes = figure.subplots()
    axes.fill_between(time, 0, state[shown], step="post", color="#4878cf", label="state")
    axes.fill_between(
        time, room[shown], top, step="post", color="#f0a05a", label="activations and the rest"
    )
    axes.axhline(top, color="black", linewidth=1, label="memory.limit")
    axes.axhline(
        (limit - bounds.besides) / 2**30,
        color="#4878cf",
        linestyle=":",
        label="the largest memory.budget",
    )
    axes.set(
        xlim=(0, len(time) - 1),
        ylim=(0, 1.05 * top),
        xlabel="actions of two steps (GPT-345M, gpipe, four micro-batches, layers recomputed)",
        ylabel="GiB",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncol=4, frameon=False)
    figure.tight_layout()
    write_svg(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    parser.add_argument("--picture", default="docs/tide.svg", help="empty: draw none")
    args = parser.parse_args()
    if args.picture:
        draw(Path(args.picture))
    found = list(cases(args))
    args.picture = ""
    print(write_results("tide", found, args, meaning=MEANING, shapes=SHAPES))


if __name__ == "__main__":
    main()
