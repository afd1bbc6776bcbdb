"""Claim: activations take far less memory where some are made again, or wait in a file, for little
time.

    python -m benchmarks.recompute        three minutes; on a quiet machine
    python -m benchmarks.recompute --offload 2 3 4      on so many stages instead: memory.offload_activations

The same step with pipeline.recompute = "none", "selective" and "all", by turns. `saved`: share of
the bytes that a micro-batch keeps between forward and backward (predicted, which the allocator
agrees with), beside what a step takes longer. Losses must be equal, to the bit.

--offload: so many stages of one thread each, gpipe and 1f1b with more micro-batches than stages; on
one side as many micro-batches wait in a file as can, on another as many as "auto" finds to cost no
time, on another each stage is recomputed; and one is the first once more, which says by how much
equal sides differ here. `peak_mib`: of the first rank, predicted. Where stages outnumber cores,
what is copied takes time of those that compute.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import product
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
from hybridpar.config import Config, MemoryConfig
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
from hybridpar.train.autotuning.autotune import autotune

MICROBATCHES = 2
WAYS = ("selective", "all")
IN_FILE = "offloaded"
FREE = "auto"
AGAIN = "recomputed"
SAME = "kept again"
PER_STAGE = 4


def kept(config: Config) -> int:
    """Bytes of activations in flight."""
    return predict(JobPlan(config), device=torch.device("cpu"))[0].activations


def recomputing(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Races steps that keep all activations, and that make them again."""
    shape = SHAPES[name]
    plain = engine_config(shape, num_microbatches=MICROBATCHES, dtype=dtype)
    configs = {OURS: plain} | {
        way: replace(plain, pipeline=replace(plain.pipeline, recompute=way)) for way in WAYS
    }
    result = race(
        {side: OurStep(config, shape, ProcessGrid()) for side, config in configs.items()},
        rounds,
        tolerance=0.0,
    )
    return case(
        f"{name} {dtype}", result, MICROBATCHES * shape.microbatch_tokens, shape=name, dtype=dtype
    ) | {"saved": {way: round(1 - kept(configs[way]) / kept(plain), 4) for way in WAYS}}


def offloading(shape_name: str, schedule: str, p: int, rounds: int, folder: str) -> dict[str, Any]:
    """Races steps whose activations stay, leave, and are made again. Collectives: called on all
    ranks."""
    shape = SHAPES[shape_name]
    config = engine_config(shape, pp=p, num_microbatches=PER_STAGE * p, schedule=schedule)
    configs = {
        OURS: config,
        IN_FILE: replace(config, memory=MemoryConfig(offload_activations=99, folder=folder)),
        FREE: autotune(
            replace(config, memory=MemoryConfig(offload_activations="auto", folder=folder)),
            ProcessGrid(pp=p),
            torch.device("cpu"),
            lambda line: None,
        ),
        SAME: config,
        AGAIN: replace(config, pipeline=replace(config.pipeline, recompute="stage")),
    }
    sides = {name: OurStep(config, shape, ProcessGrid(pp=p)) for name, config in configs.items()}
    result = race(sides, rounds, tolerance=0.0)
    peaks = {
        name: predict(JobPlan(config), device=torch.device("cpu"), ranks=[0])[0].total
        for name, config in configs.items()
    }
    engine = sides[IN_FILE].engine
    moved = engine.moves.activations.num_bytes // engine.batches_done
    return case(
        f"{shape_name} {schedule} p={p} m={PER_STAGE * p}",
        result,
        PER_STAGE * p * shape.microbatch_tokens,
        shape=shape_name,
        schedule=schedule,
        pp=p,
        num_microbatches=PER_STAGE * p,
    ) | {
        "peak_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
        "saved": {
            name: round(1 - peaks[name] / peaks[OURS], 4) for name in (IN_FILE, FREE, SAME, AGAIN)
        },
        "away": configs[FREE].memory.offload_activations,
        "moved_mib": round(moved / 2**20, 1),
    }


def show(entry: dict[str, Any]) -> None:
    for way, saved in entry["saved"].items():
        peaks = f"{peak[way]} of {peak[OURS]} MiB, " if (peak := entry.get("peak_mib")) else ""
        print(
            f"{entry['case']:<24} {way:<10} {peaks}{saved:.0%} less, for "
            f"{entry['ratio'][way]['median'] - 1:+.1%} of "
            "the time",
            flush=True,
        )


def main() -> None:
    parser = arguments(__doc__, rounds=7, shapes=["small", "ref"])
    parser.add_argument("--offload", nargs="+", type=int, default=[], help="numbers of stages")
    args = parse(parser)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        found = (
            run_ranks(offloading, p, name, schedule, p, args.rounds, folder)
            for name, p, schedule in product(args.shapes, args.offload, ("gpipe", "1f1b"))
        )
        if not args.offload:
            found = (recomputing(*key, args.rounds) for key in product(args.shapes, args.dtypes))
        report(
            what := "offload" if args.offload else "recompute",
            found,
            args,
            show=show,
            meaning=(
                f"ratio: time of a step that {what}s / that of one that keeps all, median of the "
                "ratios of each round, and "
                "their quartiles"
            ),
        )


if __name__ == "__main__":
    main()
