"""Claim: the behaviours that Li et al. (ISPASS 2021) found are found here, and recording them costs
less than 5 %.

python -m benchmarks.memory_behaviour                     # all parts
python -m benchmarks.memory_behaviour --parts overhead    # two minutes; on a quiet machine

tables      MLP, and AlexNet- and ResNet-shaped users' models, of full size, on ghosts: breakdown by
            batch and depth
own         AlexNet and ResNets as models of hybridpar (ModelSpec), of full size, as
            `hybridpar memory` has them
intervals   the same models at sizes that a CPU trains in seconds: access time intervals and
            outliers
overhead    the engine's step with its memory events written to a file, over the same step without
memory      growth of a process that records 10,000 steps, and of one that analyses them
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import (
    OURS,
    SHAPES,
    OurStep,
    arguments,
    engine_config,
    parse,
    race,
    ratios,
    report,
)
from benchmarks.user_models import ITERATIONS, Images, alexnet, mlp, resnet, trained
from hybridpar.config import from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.memory_behaviour.analysis.behaviour import Behaviour, analyse
from hybridpar.memory_behaviour.analysis.swap import LINKS, swappable
from hybridpar.memory_behaviour.events import Category, Header, Span, lives
from hybridpar.memory_behaviour.recording.memory_trace import EngineRecorder, predict_trace
from hybridpar.memory_behaviour.trace_file import header_line, read_trace, span_line
from hybridpar.train.reporting.records import Records
from hybridpar.validate import resolve

BOUND = 1.05
SHORT = 25e-6
PARTS = ["tables", "own", "intervals", "overhead", "memory"]
RECORDED = "recorded"
MOST_GROWTH = 200 << 20

Model = tuple[Callable[[], nn.Module], tuple[int, ...]]
"""The model, and the shape of a sample."""


def models(size: int) -> dict[str, Model]:
    """Models of full width, for square images of so many pixels a side."""
    image = (3, size, size)
    found: dict[str, Model] = {
        "MLP 32-64-10": (mlp, (32,)),
        "AlexNet": (partial(alexnet, size=size), image),
    }
    for depth, blocks, bottleneck in (
        (18, (2, 2, 2, 2), False),
        (34, (3, 4, 6, 3), False),
        (50, (3, 4, 6, 3), True),
    ):
        found[f"ResNet-{depth}"] = partial(resnet, blocks=blocks, bottleneck=bottleneck), image
    return found


def tables(size: int) -> Iterator[dict[str, Any]]:
    """Breakdown of the peak of each model, by batch size. Nothing is computed."""
    for name, (make, shape) in models(size).items():
        for batch in (16, 32, 64, 128, 256):
            spans = trained(make, shape, batch, ghosts=True)
            entry = {
                "case": f"{name} batch {batch}",
                "settings": {"shape": "tiny", "part": "tables", "size": size},
            }
            entry |= breakdown(analyse(spans)) | blocks(spans)
            yield entry


def own(size: int) -> Iterator[dict[str, Any]]:
    """Record the model through the engine, one micro-batch a step, group normalization for batch
    normalization."""
    for name in ("alexnet", "resnet18", "resnet50"):
        for batch in (16, 64, 256):
            config = resolve(
                replace(
                    from_mapping(
                        {
                            "pipeline": {"num_microbatches": 1},
                            "optim": {"name": "sgd", "clip_grad": 0.0},
                            "train": {"micro_batch_size": batch, "device": "cpu"},
                        }
                    ),
                    model=Images(name, size=size),
                ),
                1,
            )
            _, spans = predict_trace(config, steps=ITERATIONS)
            settings = {"shape": "tiny", "part": "own", "size": size}
            yield {"case": f"own {name} batch {batch}", "settings": settings} | breakdown(
                analyse(spans)
            )


def breakdown(found: Behaviour) -> dict[str, Any]:
    """Shares of the peak. Intermediates are all that is no parameter, gradient, state of the
    optimizer or input."""
    peak = found.peak.by_category
    shares = {
        category.value: peak.get(category, 0)
        for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER, Category.BATCH)
    }
    shares["intermediates"] = found.peak.num_bytes - sum(shares.values())
    return {
        "stable_from": found.stable_from,
        "events_per_iteration": round(found.num_events / ITERATIONS),
        "peak_bytes": found.peak.num_bytes,
        "breakdown_bytes": shares,
        "breakdown": {name: round(n / found.peak.num_bytes, 4) for name, n in shares.items()},
    }


def blocks(spans: list[Span]) -> dict[str, Any]:
    """Blocks that the last iteration makes, and the largest blocks of all, one of each size."""
    found = list(lives(spans, ()))
    largest = {life.num_bytes: life for life in sorted(found, key=lambda life: life.num_bytes)}
    return {
        "blocks_per_iteration": sum(life.born_step == ITERATIONS for life in found),
        "largest_blocks": [
            {"bytes": size, "category": life.category.value, "op": life.op}
            for size, life in list(largest.items())[:-4:-1]
        ],
    }


def intervals(size: int) -> Iterator[dict[str, Any]]:
    """Access time intervals of real runs; a small batch, and images of at most `size` pixels a
    side."""
    link = LINKS["paper"]
    for name, (make, shape) in models(size).items():
        batch = 64 if len(shape) == 1 else 4
        spans = trained(make, shape, batch, ghosts=False)
        found = analyse(spans).intervals
        swaps = [
            one for one in found.outliers if one.life.num_bytes <= swappable(one.seconds, link)
        ]
        yield {
            "case": f"{name} batch {batch}",
            "settings": {"shape": "tiny", "part": "intervals", "size": size},
            "intervals_under_25us": round(share_under(found.distribution, SHORT), 4),
            "intervals_us": {
                f"p{p}": round(1e6 * found.distribution.percentile(p), 1)
                for p in (10, 50, 90, 99, 100)
            },
            "swappable_outliers": len(swaps),
            "largest_outliers": [
                {
                    "us": round(1e6 * one.seconds),
                    "bytes": one.life.num_bytes,
                    "category": one.life.category.value,
                    "could_leave": swappable(one.seconds, link),
                }
                for one in found.outliers[:3]
            ],
            "seconds_an_iteration": round(spans[-1].end - spans[-1].start, 4),
        }


def share_under(intervals: Any, seconds: float) -> float:
    """The share of values below a number of seconds, by bisection of the percentiles."""
    low = 0.0
    high = 100.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if intervals.percentile(middle) < seconds else (low, middle)
    return low / 100


# -- overhead


def overhead(shape: str, dtype: str, num_microbatches: int, rounds: int) -> dict[str, Any]:
    """The engine's step, recorded and not, by turns in one process, each its own engine."""
    torch.set_num_threads(1)
    config = engine_config(SHAPES[shape], dtype=dtype, num_microbatches=num_microbatches)
    plain, recorded = (OurStep(config, SHAPES[shape], ProcessGrid()) for _ in range(2))
    counts = {"events": 0, "bytes": 0, "steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder), print)
        records.begin("rank0.jsonl", 0)

        def write(span: Span) -> None:
            line = span_line(span).encode()
            counts["events"] += len(span.events)
            counts["bytes"] += len(line)
            records.append("rank0.jsonl", line)

        recorder = EngineRecorder(recorded.engine, write)
        recorded.loader = recorder.loader(recorded.loader)  # type: ignore[arg-type, assignment]

        def step() -> float:
            counts["steps"] += 1
            with recorder.active():
                return recorded()

        result = race({OURS: plain, RECORDED: step}, rounds, tolerance=0.0)
        recorder.close()
        records.close()
    steps = counts.pop("steps")
    return {
        "case": f"overhead {shape} {dtype}",
        "settings": {
            "shape": shape,
            "part": "overhead",
            "dtype": dtype,
            "microbatches": num_microbatches,
        },
        "rounds": rounds,
        "ratio": ratios(result, RECORDED),
        "ratio_cpu_time": ratios(result, RECORDED, times="cpu"),
        "wall_ms": {
            side: [round(1e3 * t, 3) for t in times] for side, times in result.wall.items()
        },
        **{f"{name}_a_step": n // steps for name, n in counts.items()},
    }


# -- memory


def grown(part: str, path: Path, steps: int) -> dict[str, Any]:
    """Growth of a process of its own that records so many steps, or analyses them. Units: bytes."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory_behaviour",
        "--child",
        part,
        str(path),
        str(steps),
    ]
    growth = int(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return {
        "case": f"{part} {steps} steps",
        "settings": {"shape": "tiny", "part": "memory", "steps": steps},
        "growth_bytes": growth,
        "file_bytes": path.stat().st_size,
    }


def child(part: str, path: Path, steps: int) -> None:
    """Prints the bytes by which the peak of this process grows after the first steps."""
    torch.set_num_threads(1)
    if part == "record":
        shape = SHAPES["tiny"]
        step = OurStep(engine_config(shape), shape, ProcessGrid())
        records = Records(path.parent, print)
        records.begin(path.name, 0)
        records.append(path.name, header_line(Header()).encode())
        step()
        recorder = EngineRecorder(
            step.engine, lambda span: records.append(path.name, span_line(span).encode())
        )
        step.loader = recorder.loader(step.loader)  # type: ignore[arg-type, assignment]
        before = peak_memory()
        with recorder.active():
            for _ in range(steps):
                step()
        recorder.close()
        records.close()
    else:
        before = peak_memory()
        found = analyse(read_trace(path)[1])
        assert found.num_steps >= steps
    print(peak_memory() - before)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(entry: dict[str, Any]) -> None:
    if "breakdown" in entry:
        text = f"peak {entry['peak_bytes'] >> 20} MiB, {entry['breakdown']}"
    elif "intervals_us" in entry:
        text = f"{entry['intervals_under_25us']:.0%} of intervals under 25 us"
    elif "ratio" in entry:
        wall = entry["ratio"]["median"]
        cpu = entry["ratio_cpu_time"]["median"]
        text = f"{wall:.3f} of the time without, {cpu:.3f} of its CPU time"
    else:
        text = f"{entry['growth_bytes'] >> 20} MiB more"
    print(f"{entry['case']:<28} {text}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    parser = arguments(__doc__, rounds=7, shapes=["ref"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long trace")
    parser.add_argument("--microbatches", type=int, default=2)
    args = parse(parser)
    entries = report(
        "memory_behaviour",
        cases(args),
        args,
        show=show,
        meaning=(
            "breakdown: shares of the peak, on ghosts; intervals: between accesses of a block, in "
            "real runs; swappable: by "
            "6.3 and 6.4 GB/s; ratio: time of a recorded step over one that is not"
        ),
    )
    worst = [
        one["case"]
        for one in entries
        if one.get("ratio", {}).get("median", 0) > BOUND or one.get("growth_bytes", 0) > MOST_GROWTH
    ]
    if worst:
        raise SystemExit(f"over the bound: {', '.join(worst)}")
    return None


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if "tables" in args.parts:
        yield from tables(args.size)
    if "own" in args.parts:
        yield from own(args.size)
    if "intervals" in args.parts:
        yield from intervals(args.size)
    if "overhead" in args.parts:
        for shape in args.shapes:
            for dtype in args.dtypes:
                yield overhead(shape, dtype, args.microbatches, args.rounds)
    if "memory" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            for part in ("record", "analyse"):
                yield grown(part, Path(folder, "rank0.jsonl"), args.steps)


if __name__ == "__main__":
    main()
