"""Question: how much of what a small GPT learns do compressed messages between stages cost?

    python -m benchmarks.messages

A GPT on the source text of Python's standard library, at equal tokens: validation loss at the end
with each codec, schedule and number of stages. It trains in one process with the links in it
(verify.boundaries), which `hybridpar verify` compares with grids; validation is exact. Of one seed,
differences below about half a per cent say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.common import Shape, arguments, parse, report
from hybridpar.config import Config, from_mapping
from hybridpar.data import BatchLoader, open_data
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine, StepResult
from hybridpar.validate import resolve
from hybridpar.verify.boundaries import add_boundaries

CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"messages": "bf16"},
    "int8": {"messages": "int8"},
    "int4": {"messages": "int4"},
    "int4, gradients int8": {"messages": "int4", "messages_backward": "int8"},
    "dct 0.5": {"messages": "dct", "messages_kept": 0.5},
    "dct 0.2": {"messages": "dct", "messages_kept": 0.2},
    "dct 0.1": {"messages": "dct"},
    "dct 0.05": {"messages": "dct", "messages_kept": 0.05},
}
STUDY = Shape(4, 128, 4, 64, 2048, 4)
M = 8
EVAL_BATCHES = 32
_EVERY = 10
"""Steps from one loss in the result file to the next."""


def settings(schedule: str, codec: str, stages: int, seed: int, steps: int, cache: str) -> Config:
    """The pipeline whose training is imitated."""
    return from_mapping(
        {
            "model": STUDY.section | {"init_std": 0.05},
            "parallel": {"pp": stages, "dp": 1},
            "pipeline": {"schedule": schedule, "num_microbatches": M},
            "optim": {
                "lr": 2e-3,
                "min_lr": 2e-4,
                "warmup_steps": steps // 10,
                "betas": [0.9, 0.95],
            },
            "train": {
                "num_steps": steps,
                "micro_batch_size": STUDY.micro_batch,
                "device": "cpu",
                "seed": seed,
            },
            "data": {"split": 0.015, "cache": cache},
            "compression": CODECS[codec],
        }
    )


def alone(config: Config) -> tuple[Engine, BatchLoader, BatchLoader]:
    """The training in one process, without links; samples to train on, and others."""
    torch.set_num_threads(1)
    data = open_data(config)
    whole = M * STUDY.micro_batch  # micro-batches make no difference, and a large one is faster
    one = resolve(
        from_mapping(
            {
                "parallel": {"pp": 1},
                "pipeline": {"num_microbatches": 1},
                "train": {"micro_batch_size": whole},
            },
            config,
        ),
        1,
    )
    train, valid = (
        BatchLoader(of, micro_batch_size=whole, num_microbatches=1)
        for of in (data.train, data.valid[""])
    )
    return Engine(JobPlan(one), ProcessGrid(), torch.device("cpu")), train, valid


def train(config: Config) -> dict[str, Any]:
    """Trains in this process; losses by step, and the validation loss at the end."""
    engine, loader, held_out = alone(config)
    add_boundaries(
        {int(number): block for number, block in engine.stage.blocks.items()}, JobPlan(config)
    )
    losses: list[float] = []

    def note(result: StepResult) -> None:
        losses.append(round(result.loss, 4))

    start = time.perf_counter()
    engine.train(loader, config.train.num_steps, note)
    valid = engine.evaluate(held_out, EVAL_BATCHES)["lm"]
    return {
        "valid_loss": round(valid, 4),
        "seconds": round(time.perf_counter() - start, 1),
        "losses": losses[::_EVERY],
    }


def over_seeds(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines about trainings: loss over that of codec none with the same seed and steps: mean, least
    and most."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for each in cases:
        of = each["settings"]
        found.setdefault((of["schedule"], of["codec"], of["steps"]), {})[of["seed"]] = each[
            "valid_loss"
        ]
    for (schedule, codec, steps), losses in found.items():
        none = found.get((schedule, "none", steps), {})
        over = [loss / none[seed] for seed, loss in losses.items() if seed in none]
        if over:
            name = f"{schedule} {codec}, {steps} steps"
            yield (
                f"{name:<38} loss {statistics.fmean(losses.values()):.4f}, over none "
                f"{statistics.fmean(over):.4f} "
                f"({min(over):.4f} to {max(over):.4f}), {len(over)} seeds"
            )


def study(args: argparse.Namespace, cache: str) -> Iterator[dict[str, Any]]:
    """A case for each codec, schedule, number of stages and seed; without a codec stages make no
    difference.

    `cache`: folder of the prepared corpus.
    """
    for schedule, codec, stages, seed in product(
        args.schedules, args.codecs, args.stages, args.seeds
    ):
        if codec != "none" or stages == args.stages[0]:
            yield {
                "case": f"{schedule} pp={stages} {codec} seed {seed}",
                **train(settings(schedule, codec, stages, seed, args.steps, cache)),
                "settings": {
                    "shape": "study",
                    "schedule": schedule,
                    "pp": stages,
                    "codec": codec,
                    "seed": seed,
                    "steps": args.steps,
                    "tokens": args.steps * M * STUDY.microbatch_tokens,
                },
            }


def show(entry: dict[str, Any]) -> None:
    print(f"{entry['case']:<32} {entry['valid_loss']:.4f}  {entry['seconds']} s", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=1, shapes=["study"], choices=["study"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "2bw"])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234])
    args = parse(parser)
    with tempfile.TemporaryDirectory() as cache:
        cases = report(
            "messages",
            study(args, cache),
            args,
            show=show,
            shapes={"study": STUDY},
            meaning="valid_loss: at the end, of exact messages",
        )
    print(*over_seeds(cases), sep="\n")


if __name__ == "__main__":
    main()
