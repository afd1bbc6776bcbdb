"""Claim: a rank's blocks lie in a planned arena that is hardly larger than what is alive at once,
at no cost of time.

    python -m benchmarks.planned_memory        three minutes; on a quiet machine

train.planned_memory off and on, on two ranks of one thread each. `arena`: of each rank, over the
largest set of its blocks that are alive at once, as the allocator was asked for them. `cache`: what
a modelled caching allocator (torch's for CUDA) reserves for the predicted blocks, over the same of
these. `resident`: MiB of memory that a process of each rank has at most in three steady steps,
state and program included, without a plan and with one, in processes of their own; glibc keeps what
is freed, as in a run. Losses must be equal, to the bit.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    OURS,
    SHAPES,
    OurStep,
    arguments,
    case,
    engine_config,
    parse,
    race,
    report,
    run_ranks,
)
from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.train.launch import keep_freed_memory
from hybridpar.train.planned_memory import PlannedMemory, forecast_planned
from hybridpar.validate import resolve

RANKS = 2
MICROBATCHES = 4
STEPS = 4
PLANNED = "planned"
CASES: dict[str, dict[str, Any]] = {
    "interleaved, recomputed": {"schedule": "interleaved", "recompute": "all"},
    "interleaved": {"schedule": "interleaved"},
    "1f1b": {"schedule": "1f1b"},
    "2bw": {"schedule": "2bw"},
}


def config_of(shape: str, name: str, dtype: str) -> Config:
    config = engine_config(SHAPES[shape], pp=RANKS, num_microbatches=MICROBATCHES, dtype=dtype)
    config = replace(
        config,
        pipeline=replace(config.pipeline, **CASES[name]),
        train=replace(config.train, planned_memory=True, num_steps=1000),
    )
    return resolve(config, RANKS)


class Stretch(OurStep):
    """Some steps without a drain a call, in planned memory or not."""

    def __init__(self, config: Config, shape: str, *, planned: bool):
        super().__init__(config, SHAPES[shape], ProcessGrid(pp=RANKS))
        self.memory = PlannedMemory(self.engine, lambda line: None) if planned else None

    def __call__(self, steps: int = STEPS) -> float:
        if self.memory is None:
            self.engine.train(self.loader, steps, self._note)
        else:
            with self.memory.active():
                self.engine.train(self.loader, steps, self._note)
        return self._last


def raced(config: Config, shape: str, name: str, rounds: int) -> dict[str, Any]:
    """Collectives: called on all ranks."""
    keep_freed_memory()
    sides = {
        OURS: Stretch(config, shape, planned=False),
        PLANNED: Stretch(config, shape, planned=True),
    }
    for side in sides.values():
        side(14)
    result = race(sides, rounds, tolerance=0.0)
    memory = sides[PLANNED].memory
    assert memory is not None
    counts = gather_objects(memory.counts, sides[OURS].engine.grid.world)
    tokens = STEPS * MICROBATCHES * SHAPES[shape].microbatch_tokens
    return case(name, result, tokens, shape=shape, **CASES[name]) | {
        "counts": [asdict(one) for one in counts]
    }


def resident(config: Config, shape: str, planned: bool) -> list[float]:
    """MiB that each rank has at most. Collectives: called on all ranks."""
    keep_freed_memory()
    step = Stretch(config, shape, planned=planned)
    step(14)
    Path("/proc/self/clear_refs").write_text("5")
    step(3)
    (most,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return gather_objects(int(most) / 2**10, step.engine.grid.world)


def measured(shape: str, name: str, dtype: str, rounds: int) -> dict[str, Any]:
    config = config_of(shape, name, dtype)
    entry: dict[str, Any] = run_ranks(raced, RANKS, config, shape, name, rounds)
    forecasts = [forecast_planned(config, rank) for rank in range(RANKS)]
    entry |= {
        "arena": [round(one["num_bytes"] / one["most_living"], 4) for one in entry["counts"]],
        "cache": [
            round(one.reserved / one.largest_live, 4) for one in forecasts if one is not None
        ],
        "resident": {
            side: [
                round(mib, 1) for mib in run_ranks(resident, RANKS, config, shape, side == PLANNED)
            ]
            for side in (OURS, PLANNED)
        },
    }
    return entry


def show(entry: dict[str, Any]) -> None:
    print(
        f"{entry['case']:<24} arena {entry['arena']} cache {entry['cache']} resident "
        f"{entry['resident']} "
        f"time {entry['ratio'][PLANNED]['median']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=7, shapes=["small"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    args = parse(parser)
    torch.set_num_threads(1)
    report(
        "planned_memory",
        (
            measured(shape, name, dtype, args.rounds)
            for shape, dtype, name in product(args.shapes, args.dtypes, args.cases)
        ),
        args,
        show=show,
        meaning=(
            "ratio: time of some steps in planned memory / that without, median of the ratios of "
            "each round, "
            "and their quartiles; arena, cache: bytes / those of the largest set alive at once; "
            "resident: MiB"
        ),
    )


if __name__ == "__main__":
    main()
