"""Claims: with two pipeline stages, hybridpar's 1f1b and gpipe are faster than
torch.distributed.pipelining's, and its 2bw comes close to two independent cores.

    python -m benchmarks.pipeline

The peers are Schedule1F1B and ScheduleGPipe over the plain GPT, cut into the same blocks, AdamW on
both sides. One thread a rank, Gloo. 'bf16': hybridpar with bf16 weights and activations, fp32
masters; the peer with fp32 weights under bf16 autocast (so it sends fp32 activations).

The ideal that 2bw is held against: both ranks at once run forward and backward of their own stage,
m times, with neither communication nor waiting, nor optimizer; the slower one counts.
`ideal with update` adds what one rank must do for each batch besides: gradient norm and optimizer.
Its rounds alternate with those of 2bw, on the very same stage and weights, and its ratio is the
share of the ideal that 2bw reaches: 1 is all of it. Where the rest goes is itemised from one more
round whose actions are recorded (`where the time goes`, on the slower stage, as shares of its
step).

2bw is timed in its steady state, from the update of one batch to that of another `batches` later;
its start and its drain, which a run pays once, are left out (the time of a batch with them:
`including fill and drain`). With --others, 1f1b and gpipe, ours and torch's, run in the same
rounds; they drain in every step and reach about m / (m + 1). --warmups: pipeline.warmup of 2bw;
where there are several, they run in the same rounds, and the first is itemised.

`--schedules drains`: those that shorten the drain, ours and torch's, interleaved and with zero
bubbles: two stages on each rank, or one. `predicted`: the ratios of our step times that `simulate`
gets from the costs each has measured, and `simulated over measured` these times themselves. --ranks
4: more than there may be cores, which they then share. Large shapes take long: --seconds limits
rounds, and recordings, of a case, which is written as it ends; --add keeps others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from benchmarks import common
from benchmarks.common import (
    OURS,
    SHAPES,
    FixedLoader,
    OurStep,
    Race,
    Shape,
    case,
    engine_config,
    over_ranks,
    race,
)
from benchmarks.plain import PlainGPT, adamw, clip, cross_entropy
from hybridpar.grid import ProcessGrid
from hybridpar.job.stage_split import stage_split
from hybridpar.ops.update import Weights
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import WARMUPS
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.measure import Measured
from hybridpar.train.reporting.measure import measure as measure_parts

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
PEERS: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved, zero bubble": pipelining.ScheduleInterleavedZeroBubble,
    "v": pipelining.ScheduleZBVZeroBubble,
}
SINGLE = ("1f1b", "gpipe")
MULTI = ("1f1b", "interleaved", "interleaved, zero bubble", "v")
IDEAL = "ideal"
UPDATE = "update"
IDEAL_UPDATE = "ideal with update"
WITH_DRAIN = "including fill and drain, wall_ms"
SHARE = "share of the ideal"
ITEMS = "where the time goes"
PREDICTED = "predicted"
SIMULATED = "simulated over measured"
DRAINS: dict[str, dict[str, Any]] = {
    OURS: {"schedule": "interleaved", "zero_bubble": True},
    f"{OURS} 1f1b": {"schedule": "1f1b"},
    f"{OURS} 1f1b, zero bubble": {"schedule": "1f1b", "zero_bubble": True},
    f"{OURS} interleaved": {"schedule": "interleaved"},
    f"{OURS} v": {"schedule": "1f1b", "stage_layout": "v"},
}
"""Our schedules that drain, with their options."""
RECORDED = 8
"""Batches that are recorded, at least; about as many micro-batches where they have four or eight
each."""
_FEWEST = 3
PREDICTIONS = 5
"""Recordings of each side, in turn; their median counts."""


def default_split(shape: Shape, num_stages: int, m: int, dtype: str) -> tuple[range, ...]:
    """The blocks of each stage, one on a rank, as hybridpar divides them; its peers get the
    same."""
    return stage_split(engine_config(shape, pp=num_stages, num_microbatches=m, dtype=dtype))


class TorchPipelineStep:
    """One optimizer step of torch.distributed.pipelining on this rank's blocks: one stage, or two,
    in a loop or a V."""

    def __init__(self, shape: Shape, schedule: str, m: int, dtype: str):
        rank = dist.get_rank()
        size = dist.get_world_size()
        numbers = (
            [rank]
            if schedule in SINGLE
            else [rank, 2 * size - 1 - rank if schedule == "v" else rank + size]
        )
        num_stages = size * len(numbers)
        split = default_split(shape, num_stages, m, dtype)
        self.first = 0 in numbers
        self.last = num_stages - 1 in numbers
        models = [PlainGPT(shape, split[number], autocast=dtype == "bf16") for number in numbers]
        stages = [
            pipelining.PipelineStage(model, number, num_stages, torch.device("cpu"))
            for model, number in zip(models, numbers, strict=True)
        ]
        self.schedule = PEERS[schedule](
            stages[0] if schedule in SINGLE else stages, m, loss_fn=cross_entropy
        )
        self.optimizer = adamw(parameter for model in models for parameter in model.parameters())
        self.batches = [
            tuple(torch.cat(column) for column in zip(*FixedLoader(shape, m).pairs(t), strict=True))
            for t in range(FixedLoader.num_distinct)
        ]
        self.step = 0

    def __call__(self) -> float:
        tokens, labels = self.batches[self.step % len(self.batches)]
        self.step += 1
        losses: list[Tensor] = []
        arguments = (tokens,) if self.first else ()
        self.schedule.step(
            *arguments,
            **({"target": labels, "losses": losses} if self.last else {}),
            return_outputs=False,
        )
        clip(self.optimizer, across_ranks=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)  # hybridpar's step ends with every rank knowing the loss
        return float(loss)


def measure(shape_name: str, dtype: str, m: int, schedule: str, rounds: int) -> dict[str, Any]:
    """Races hybridpar and torch.distributed.pipelining. Collectives: called on all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    config = engine_config(shape, pp=size, num_microbatches=m, schedule=schedule, dtype=dtype)
    sides: dict[str, common.Step] = {
        OURS: OurStep(config, shape, ProcessGrid(pp=size)),
        PEERS[schedule].__name__: TorchPipelineStep(shape, schedule, m, dtype),
    }
    result = race(sides, rounds, tolerance=TOLERANCE[dtype])
    return case(
        f"{shape_name} {dtype} pp={size} {schedule} m={m}",
        result,
        m * shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        pp=size,
        num_microbatches=m,
        schedule=schedule,
        threads=1,
        blocks_of_each_stage=[*map(len, default_split(shape, size, m, dtype))],
    )


def measure_drains(
    shape_name: str, dtype: str, m: int, rounds: int, limit: float
) -> dict[str, Any]:
    """Races the schedules that drain in the shortest time, and what the simulator says of ours.
    `limit`: seconds after which no round begins, and no turn of recordings. Collectives: called on
    all ranks."""
    shape = SHAPES[shape_name]
    size = dist.get_world_size()
    steps = {
        name: OurStep(
            engine_config(shape, pp=size, num_microbatches=m, dtype=dtype, **options),
            shape,
            ProcessGrid(pp=size),
        )
        for name, options in DRAINS.items()
    }
    peers = {PEERS[name].__name__: TorchPipelineStep(shape, name, m, dtype) for name in MULTI}
    result = race(
        {**steps, **peers},
        rounds,
        warmup=2 if m < 8 else 1,
        compared=2,
        tolerance=TOLERANCE[dtype],
        seconds=limit,
    )
    sizes = {name: step.engine.shape for name, step in steps.items()}
    predictions: dict[str, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for i in range(PREDICTIONS):
        if i and over_ranks([time.perf_counter() - start], "max")[0] > limit:
            break
        for name, step in steps.items():
            recorded = record(step, max(_FEWEST, RECORDED // max(m // 2, 1))).costs
            predictions[name].append(
                predict_timeline(
                    ScheduleOptions.of(step.engine.config), sizes[name], recorded
                ).step_time(m)
            )
    simulated = {name: statistics.median(seconds) for name, seconds in predictions.items()}
    entry = case(
        f"{shape_name} {dtype} pp={size} drains m={m}",
        result,
        m * shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        pp=size,
        num_microbatches=m,
        schedules=DRAINS,
        threads=1,
        blocks_of_each_stage={
            chunks: [*map(len, default_split(shape, size * chunks, m, dtype))] for chunks in (1, 2)
        },
    )
    return entry | {
        PREDICTED: {
            name: round(seconds / simulated[OURS], 4)
            for name, seconds in simulated.items()
            if name != OURS
        },
        "simulated_ms": {name: round(1e3 * seconds, 3) for name, seconds in simulated.items()},
        SIMULATED: {
            name: round(seconds / statistics.median(result.wall[name]), 4)
            for name, seconds in simulated.items()
        },
    }


class StageAlone:
    """Run one rank of the ideal: its own engine's stage, on inputs that are simply there."""

    def __init__(self, ours: OurStep, shape: Shape, m: int, dtype: str):
        self.engine = ours.engine
        self.m = m
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        stages = self.engine.grid.pp
        hidden = (shape.micro_batch, shape.seq_length, shape.hidden)
        self.input = None if stages.is_first else torch.randn(hidden, dtype=kind)
        self.gradient = None if stages.is_last else torch.randn(hidden, dtype=kind) * 1e-3
        self.batch = ours.loader.microbatch(0, 0) | {
            "num_targets": torch.tensor(float(m * shape.microbatch_tokens), dtype=torch.float64)
        }

    def compute(self) -> None:
        """m times forward and backward."""
        engine = self.engine
        for _ in range(self.m):
            x = self.input.clone().requires_grad_() if self.input is not None else None
            out = engine.stage(x, self.batch, None)
            (sum(out.values()) if isinstance(out, dict) else out).backward(self.gradient)

    def update(self) -> None:
        """The gradient norm and one update, which changes nothing: gradients are emptied before,
        the rate is 0."""
        engine = self.engine
        for chunk in engine.state.gradients.buffers[0].tensors:
            chunk.zero_()
        gradients = list(engine.state.gradients.views(0).values())
        torch.nn.utils.get_total_norm(gradients)
        weights = Weights.in_place(list(engine.state.weights.parameters_of_optimizer().values()))
        engine.state.optimizer.step(0, weights, gradients, lr=0.0)


Side = Callable[[], tuple[float, float, float]]
"""Runs some batches: wall time and CPU time of one (seconds), and wall time where start and drain
count as well."""


def steady_side(ours: OurStep, batches: int) -> Side:
    """2bw, from the update of one batch to that of another `batches` later: batch t is updated when
    batch t + 2 begins, the last two in the drain."""
    num_batches = batches + 3

    def run() -> tuple[float, float, float]:
        ends: list[float] = []
        start = time.perf_counter()
        cpu = time.process_time()
        ours.engine.train(ours.loader, num_batches, lambda _: ends.append(time.perf_counter()))
        stop = time.perf_counter()
        stop_cpu = time.process_time()
        return (
            (ends[batches] - ends[0]) / batches,
            (stop_cpu - cpu) / num_batches,
            (stop - start) / num_batches,
        )

    return run


def repeated(step: Callable[[], Any], batches: int) -> Side:
    """`batches` times the same."""

    def run() -> tuple[float, float, float]:
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(batches):
            step()
        wall = (time.perf_counter() - start) / batches
        return wall, (time.process_time() - cpu) / batches, wall

    return run


def measure_2bw(
    shape_name: str,
    dtype: str,
    m: int,
    batches: int,
    rounds: int,
    warmups: Sequence[str],
    others: bool,
) -> dict[str, Any]:
    """Times 2bw's steady state and the ideal by turns, and, with `others`, the schedules that
    drain.

    Collectives: called on all ranks.
    """
    shape, size = SHAPES[shape_name], dist.get_world_size()

    def engine(schedule: str, warmup: str = "depth") -> OurStep:
        config = engine_config(
            shape, pp=size, num_microbatches=m, schedule=schedule, dtype=dtype, warmup=warmup
        )
        return OurStep(config, shape, ProcessGrid(pp=size))

    ours = engine("2bw", warmups[0])
    losses = [ours(), ours()]
    alone = StageAlone(ours, shape, m, dtype)
    sides: dict[str, Side] = {
        OURS: steady_side(ours, batches),
        IDEAL: repeated(alone.compute, batches),
        UPDATE: repeated(alone.update, 1),
    }
    for warmup in warmups[1:]:
        sides[f"{OURS} 2bw, {warmup}"] = steady_side(engine("2bw", warmup), batches)
    for schedule in SINGLE if others else ():
        sides[f"{OURS} {schedule}"] = repeated(engine(schedule), batches)
        sides[PEERS[schedule].__name__] = repeated(
            TorchPipelineStep(shape, schedule, m, dtype), batches
        )
    result = Race({n: [] for n in sides}, {n: [] for n in sides}, {OURS: losses})
    with_drain: list[float] = []
    for i in range(-1, rounds):
        for name in sides if i % 2 == 0 else reversed(sides):
            dist.barrier()
            wall, cpu, whole = sides[name]()
            if i >= 0:  # the first round warms up
                result.wall[name].append(wall)
                result.cpu[name].append(cpu)
                with_drain += [whole] if name == OURS else []
    for name in sides:
        result.wall[name] = over_ranks(result.wall[name], "max")
        result.cpu[name] = over_ranks(result.cpu[name], "sum")
    for times in (result.wall, result.cpu):
        times[IDEAL_UPDATE] = [a + b for a, b in zip(times[IDEAL], times.pop(UPDATE), strict=True)]
    entry = case(
        f"{shape_name} {dtype} pp={size} 2bw m={m}",
        result,
        m * shape.microbatch_tokens,
        shape=shape_name,
        dtype=dtype,
        pp=size,
        num_microbatches=m,
        schedule="2bw",
        warmup=warmups[0],
        threads=1,
        batches_of_a_round=batches,
        blocks_of_each_stage=[*map(len, default_split(shape, size, m, dtype))],
    )
    return entry | {
        WITH_DRAIN: [round(1e3 * t, 3) for t in over_ranks(with_drain, "max")],
        SHARE: {name: common.ratios(result, IDEAL, name) for name in result.wall if name != IDEAL},
        ITEMS: itemise(ours, batches + 3),
    }


def record(ours: OurStep, num_batches: int) -> Measured:
    """Return the cost of the actions of so many more batches. Collectives: called on all ranks."""
    engine = ours.engine
    # of the fewest none is left out as a warm-up: they come behind a race
    recorder = trace.Recorder(
        engine.executor, engine.batches_done, num_batches, skip=-(num_batches == _FEWEST)
    )
    engine.train(ours.loader, num_batches, lambda result: recorder.after_step(result.step))
    recorder.close()
    found = measure_parts(trace.gather(recorder, engine.grid), engine.shape, tied=False)
    assert found is not None, "too few batches were recorded"
    return found


def itemise(ours: OurStep, num_batches: int) -> dict[str, float]:
    """Return a step's time by cause on the stage that computes longest, as shares of the step.

    imbalance: how much less the mean stage computes. communication threads: CPU time beside the
    rank's own.
    Collectives: called on all ranks.
    """
    found = record(ours, max(num_batches, RECORDED))
    slowest = max(found.parts, key=lambda parts: parts.compute)
    mean = sum(parts.compute for parts in found.parts) / len(found.parts)
    seconds = {
        "forward and backward": slowest.compute,
        "imbalance": slowest.compute - mean,
        "norm and optimizer": slowest.optimizer,
        "communication calls": slowest.calls,
        "communication threads": slowest.beside,
        "Python between actions": slowest.between,
        "waiting for the other stage": slowest.waiting,
        "without a core": slowest.no_core,
    }
    return {name: round(part / found.step_time, 4) for name, part in seconds.items()}


def measured(
    shape: str, dtype: str, schedule: str, m: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One entry of the result file."""
    if schedule == "2bw":
        return common.run_ranks(
            measure_2bw, 2, shape, dtype, m, args.batches, args.rounds, args.warmups, args.others
        )
    if schedule == "drains":
        return common.run_ranks(
            measure_drains, args.ranks, shape, dtype, m, args.rounds, args.seconds
        )
    return common.run_ranks(measure, 2, shape, dtype, m, schedule, args.rounds)


def show(entry: dict[str, Any]) -> None:
    common.print_case(entry)
    for label in (PREDICTED, SIMULATED, SHARE, ITEMS):
        for name, part in entry.get(label, {}).items():
            print(f"    {label}: {name:<40} {part['median'] if label == SHARE else part:.3f}")


def main() -> None:
    parser = common.arguments(__doc__, rounds=9, shapes=["balanced", "small"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument(
        "--schedules", nargs="+", choices=[*SINGLE, "drains", "2bw"], default=[*SINGLE, "2bw"]
    )
    parser.add_argument("--ranks", type=int, default=2, help="of drains")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="of the rounds of a case of drains"
    )
    parser.add_argument("--warmups", nargs="+", choices=list(WARMUPS), default=["latency"])
    parser.add_argument(
        "--others",
        action="store_true",
        help="also hold the schedules that drain against 2bw's ideal",
    )
    parser.add_argument("--batches", type=int, default=2, help="batches of a timed round of 2bw")
    args = common.parse(parser)
    common.report(
        "pipeline",
        (
            measured(*key, args)
            for key in product(args.shapes, args.dtypes, args.schedules, args.microbatches)
        ),
        args,
        show=show,
    )


if __name__ == "__main__":
    main()
