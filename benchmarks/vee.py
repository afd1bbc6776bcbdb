"""Claims: 2BW on V-Half keeps at most 0.65 of 2BW's activations on eight ranks, at 0.98 of its
speed or more.

    python -m benchmarks.vee                 (--rounds 0: the memory alone)

Eight ranks, more than there are cores: a stage computes little and then waits as long as an
accelerator would take, for forward, I and W alike. All sides take turns in the same processes.
Speed is that of the steady state.

peak: the most bytes that torch's allocator had handed out on a rank while it trained, less those
that it holds where nothing is in flight: activations, what is on its way, scratch space. Of the
fullest rank; predicted beside it, as `hybridpar check` does, and of that what activations take
alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    FixedLoader,
    Shape,
    arguments,
    over_ranks,
    parse,
    report,
    run_ranks,
    summary,
)
from benchmarks.link_sides import pace
from hybridpar.config import Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import measure, predict
from hybridpar.train.engine import Engine

SHAPES = {"deep": Shape(32, 64, 2, 64, 64, 2)}
"""Four layers on each of eight ranks."""
CPU = torch.device("cpu")
_BOTH = {"schedule": "2bw"}
SIDES: dict[str, dict[str, Any]] = {
    "2bw": _BOTH,
    "V-Half": _BOTH | {"stage_layout": "v", "activations": "half", "split_backward": True},
    "V-Min": _BOTH | {"stage_layout": "v", "activations": "min", "split_backward": True},
}


def config_of(shape: Shape, pp: int, m: int, pipeline: dict[str, Any]) -> Config:
    stages = pp * (1 + ("stage_layout" in pipeline))
    each = shape.num_layers // stages
    split = [each + 1, *[each] * (stages - 2), each + 1]  # the embedding and the head
    return from_mapping(
        {
            "pipeline": {"num_microbatches": m, "split": split, **pipeline},
            "parallel": {"pp": pp, "dp": 1},
            "train": {"micro_batch_size": shape.micro_batch, "device": "cpu", "dtype": "fp32"},
        },
        Config(model=shape.model),
    )


def measure_sides(
    shape_name: str, m: int, seconds: float, rounds: int, batches: int
) -> dict[str, Any]:
    """Trains by turns. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    loader = FixedLoader(shape, m)
    peaks = {}
    engines = {}
    losses = {}
    for name, pipeline in SIDES.items():
        gc.collect()
        with measure(CPU) as meter:
            engine = Engine(JobPlan(config_of(shape, size, m, pipeline)), ProcessGrid(pp=size), CPU)
            losses[name] = list[float]()
            engine.train(loader, 4, lambda result, name=name: losses[name].append(result.loss))
            usage = meter.read()
        peaks[name] = max(over_ranks([usage.peak - usage.current], "max"))
        pace(engine, seconds)
        engines[name] = engine
    first = next(iter(losses.values()))
    for name, found in losses.items():
        assert all(abs(a - b) <= 1e-4 * a for a, b in zip(first, found, strict=True)), (
            f"{name}: {found}, {first}"
        )
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for i in range(rounds):
        for name in list(SIDES)[:: 1 if i % 2 == 0 else -1]:
            ends: list[float] = []
            dist.barrier()
            engines[name].train(
                loader, batches + 3, lambda result, ends=ends: ends.append(time.perf_counter())
            )
            times[name].append((ends[batches] - ends[0]) / batches)
    wall = {name: over_ranks(each, "max") for name, each in times.items()}
    stages = {
        name: predict(JobPlan(config_of(shape, size, m, pipeline)))
        for name, pipeline in SIDES.items()
    }
    predicted = {
        name: max(stage.total - stage.static for stage in each) for name, each in stages.items()
    }
    base = next(iter(SIDES))
    return {
        "case": f"{shape_name} pp={size} m={m} pace={1e3 * seconds:.0f} ms",
        "settings": {
            "shape": shape_name,
            "pp": size,
            "num_microbatches": m,
            "pace_ms": 1e3 * seconds,
            "sides": SIDES,
        },
        "peak_bytes": peaks,
        "predicted_bytes": predicted,
        "predicted_activation_bytes": {
            name: max(stage.activations for stage in each) for name, each in stages.items()
        },
        "peak_share": {name: round(peak / peaks[base], 4) for name, peak in peaks.items()},
        "speed": {
            name: summary([a / b for a, b in zip(wall[base], wall[name], strict=True)])
            for name in SIDES
            if rounds
        },
        "ideal_ms": round(1e3 * m * seconds, 3),
        "losses": losses,
        "wall_ms": {name: [round(1e3 * t, 3) for t in each] for name, each in wall.items()},
    }


def show(entry: dict[str, Any]) -> None:
    for name, peak in entry["peak_bytes"].items():
        print(
            f"{entry['case']}  {name:<11} peak {peak / 2**20:6.2f} MiB "
            f"({entry['peak_share'][name]:.3f})"
        )
    for name, speed in entry["speed"].items():
        print(
            f"{entry['case']}  {name:<11} speed {speed['median']:.3f} [{speed['q1']:.3f}, "
            f"{speed['q3']:.3f}], "
            f"batch {statistics.median(entry['wall_ms'][name]):.0f} ms, ideal "
            f"{entry['ideal_ms']:.0f}"
        )


def main() -> None:
    parser = arguments(__doc__, rounds=3, shapes=["deep"], choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=10)
    parser.add_argument(
        "--pace-ms", type=float, default=300.0, help="of forward and backward of a micro-batch"
    )
    parser.add_argument("--batches", type=int, default=2, help="batches of a timed round")
    args = parse(parser)
    report(
        "vee",
        (
            run_ranks(
                measure_sides,
                args.ranks,
                shape,
                args.microbatches,
                1e-3 * args.pace_ms,
                args.rounds,
                args.batches,
            )
            for shape in args.shapes
        ),
        args,
        show=show,
        shapes=SHAPES,
        meaning=(
            "peak_share: bytes over those of 2bw; speed: 2bw's time over the side's, median of "
            "rounds, quartiles"
        ),
    )


if __name__ == "__main__":
    main()
