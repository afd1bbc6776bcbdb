"""Memory: what the allocator hands out in a run against what was predicted before it, and what two
versions cost.

    predicted   hybridpar.prediction.predict(config): every stage's own code on tensors without memory,
                along the plan
    measured    the most bytes that torch's allocator had handed out on that rank, from before the
                engine was built

All combinations of model, precision, stages and schedule; recomputation, dropout and tensor
parallelism take turns over them. Then the bytes that 2bw holds over 1f1b when the pipeline is
drained: a working copy of the weights, and a second gradient buffer where it has one.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, groupby, product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import SHAPES, arguments, engine_config, parse, report, run_ranks
from hybridpar.comm import gather_objects
from hybridpar.config import Config, from_mapping
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import measure, predict
from hybridpar.prediction.predict import batches_to_peak
from hybridpar.schedules.schedule_table import SCHEDULES
from hybridpar.train.engine import Engine

BOUND = 0.05
MICROBATCHES = 4
RECOMPUTE = ("none", "all", "stage")
CPU = torch.device("cpu")


def config_of(settings: Mapping[str, Any]) -> Config:
    """The benchmarks' shape with tied embeddings, and these settings."""
    given = {
        "tp": 1,
        "dtype": "fp32",
        "schedule": "1f1b",
        "kind": "gpt",
        "recompute": "none",
        "dropout": 0.0,
        "gradient_buffers": 0,
        **settings,
    }
    base = engine_config(
        SHAPES[given["shape"]],
        tp=given["tp"],
        pp=given["pp"],
        num_microbatches=MICROBATCHES,
        schedule=given["schedule"],
        dtype=given["dtype"],
    )
    dropout = {"dropout": given["dropout"], "attention_dropout": given["dropout"]}
    return from_mapping(
        {
            "model": {"kind": given["kind"], "tie_embeddings": True, **dropout},
            "pipeline": {
                "recompute": given["recompute"],
                "gradient_buffers": given["gradient_buffers"],
            },
        },
        base,
    )


def settings_of(
    shape: str,
    kinds: Sequence[str],
    dtypes: Sequence[str],
    schedules: Sequence[str],
    stages: Sequence[int],
) -> list[dict[str, Any]]:
    """The cases, those on as many ranks next to each other."""
    found: list[dict[str, Any]] = []
    for i, (kind, dtype, pp, schedule) in enumerate(product(kinds, dtypes, stages, schedules)):
        turn = i // len(schedules) + i  # else a schedule would always have the same recomputation
        found.append(
            {
                "shape": shape,
                "kind": kind,
                "dtype": dtype,
                "schedule": schedule,
                "pp": pp,
                "tp": 2 if pp <= 2 and turn % 2 else 1,
                "recompute": RECOMPUTE[turn % 3],
                "dropout": 0.1 * (turn // 2 % 2),
            }
        )
    return sorted(found, key=lambda s: s["tp"] * s["pp"])


@dataclass(frozen=True)
class Run:
    """Measurements of one rank. `drained`: bytes handed out when nothing was in flight; `copy`: of a
    working copy of the weights; `gradients`: of all gradient buffers. Units: bytes."""

    stage: int
    peak: int
    drained: int
    copy: int
    gradients: int


def run(config: Config) -> Run:
    """Trains until the peak must have been reached."""
    parallel = config.parallel
    m = config.pipeline.num_microbatches
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp)
    loader = BatchLoader(
        SyntheticSamples(config.model, padding=False),
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=m,
    )
    gc.collect()
    with measure(CPU) as meter:
        engine = Engine(JobPlan(config), grid, CPU)
        engine.train(loader, batches_to_peak(JobPlan(config)), lambda step: None)
        engine.executor.losses.clear()
        usage = meter.read()
    return Run(
        grid.pp.rank,
        usage.peak,
        usage.current,
        engine.state.weights.buffers[0].nbytes,
        sum(buffer.nbytes for buffer in engine.state.gradients.buffers),
    )


def runs(configs: Sequence[Config]) -> list[list[Run]]:
    """Return what all ranks measured, by configuration. Collectives: called on all ranks."""
    world = ProcessGrid(pp=dist.get_world_size()).world
    return [
        [Run(*numbers) for numbers in gather_objects(astuple(run(config)), world)]
        for config in configs
    ]


def compare(settings: dict[str, Any], measured: Sequence[Run]) -> dict[str, Any]:
    """One entry of the result file."""
    stages = []
    for stage, predicted in enumerate(predict(JobPlan(config_of(settings)))):
        peak = max(run.peak for run in measured if run.stage == stage)
        stages.append(
            {
                "measured": peak,
                "predicted": predicted.total,
                "error": round(predicted.total / peak - 1, 5),
                "parts": predicted.as_json(),
            }
        )
    name = " ".join(f"{key}={value}" for key, value in settings.items() if key != "shape")
    return {"case": name, "settings": settings, "stages": stages}


def predictions(all_settings: Sequence[dict[str, Any]], at_once: int) -> Iterator[dict[str, Any]]:
    """Measured against predicted, `at_once` cases in one job: what they leave behind adds up."""
    for num_ranks, group in groupby(all_settings, lambda s: s["tp"] * s["pp"]):
        for settings in batched(list(group), at_once):
            for one, measured in zip(
                settings, run_ranks(runs, num_ranks, list(map(config_of, settings))), strict=True
            ):
                yield compare(one, measured)


def batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def versions(shape: str, dtypes: Sequence[str], stages: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Return what 2bw holds over 1f1b, with two gradient buffers and with one."""
    for pp, dtype in product(stages, dtypes):
        settings: dict[str, Any] = {"shape": shape, "dtype": dtype, "pp": pp}
        schedules: list[dict[str, Any]] = [
            {"schedule": "1f1b"},
            *({"schedule": "2bw", "gradient_buffers": n} for n in (2, 1)),
        ]
        flush, *doubles = run_ranks(
            runs, pp, [config_of(settings | schedule) for schedule in schedules]
        )
        for double, schedule in zip(doubles, schedules[1:], strict=True):
            rows = [
                {
                    "extra": two.drained - one.drained,
                    "working_copy": one.copy,
                    "gradient_buffer": two.gradients - one.gradients,
                }
                for one, two in zip(flush, double, strict=True)
            ]
            rest = max(
                abs(row["extra"] - row["working_copy"] - row["gradient_buffer"]) for row in rows
            )
            name = f"2bw over 1f1b {dtype} pp={pp}, gradient buffers {schedule['gradient_buffers']}"
            yield {
                "case": name,
                "settings": settings | schedule,
                "stages": rows,
                "unexplained_bytes": rest,
            }


def show(entry: dict[str, Any]) -> None:
    if "unexplained_bytes" in entry:
        text = f"copy and buffer, and {entry['unexplained_bytes']} bytes"
    else:
        text = f"{100 * max((stage['error'] for stage in entry['stages']), key=abs):+.2f} %"
    print(f"{entry['case']:<86} {text}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=1, shapes=["small"])
    parser.add_argument("--kinds", nargs="+", choices=["gpt", "bert"], default=["gpt", "bert"])
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=["gpipe", "1f1b", "2bw"]
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument(
        "--at-once", type=int, default=4, help="cases in one job: each leaves its memory behind"
    )
    args = parse(parser)
    todo = chain(
        *(
            chain(
                predictions(
                    settings_of(shape, args.kinds, args.dtypes, args.schedules, args.stages),
                    args.at_once,
                ),
                versions(shape, args.dtypes, args.stages),
            )
            for shape in args.shapes
        )
    )
    cases = report(
        "memory", todo, args, show=show, meaning="error: predicted bytes over measured, less one"
    )
    errors = [
        abs(stage["error"]) for entry in cases for stage in entry["stages"] if "error" in stage
    ]
    within = sum(error <= BOUND for error in errors)
    print(
        f"{within} of {len(errors)} stages within {BOUND:.0%}, median error "
        f"{statistics.median(errors):.2%}, largest "
        f"{max(errors):.2%}"
    )


if __name__ == "__main__":
    main()
