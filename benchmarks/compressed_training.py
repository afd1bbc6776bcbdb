"""Question: how much does a small GPT lose in a whole training if its replicas compress gradients?

    python -m benchmarks.compressed_training

A GPT of four layers learns the source text of Python's standard library on two replicas, 512 tokens
a batch, with a warm-up of a fiftieth of the steps and a cosine decay. At equal tokens: validation
loss at the end, over the loss of whole gradients with the same optimizer and seed, and its 95 %
confidence interval over the seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Shape, arguments, parse, report, run_ranks
from benchmarks.compression import shares_sent
from benchmarks.convergence.report import gap
from hybridpar.config import Config, from_mapping
from hybridpar.data import BatchLoader, open_data
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

STUDY = Shape(4, 128, 4, 64, 1024, 4)
REPLICAS = 2
EVAL_BATCHES = 64
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2e-3, "betas": [0.9, 0.95]},
    "muon": {"name": "muon", "lr": 8e-3, "betas": [0.9, 0.95], "momentum": 0.95, "nesterov": True},
}
"""Settings of [optim] by name; rates as in the convergence study, the best for whole gradients."""


@dataclass(frozen=True)
class Variant:
    """A row of the study.

    Attributes:
        optimizer: Name in OPTIMIZERS.
        compression: Settings of [compression].
        start: Share of the steps before the first compressed one.
        warmup: Share of the steps in which the sent share falls.
    """

    optimizer: str
    compression: Mapping[str, Any] = field(default_factory=dict)
    start: float = 0.0
    warmup: float = 0.0

    @property
    def whole(self) -> str:
        """The variant with whole gradients that it is compared with."""
        return self.optimizer


DCT = {"gradients": "dct", "gradients_smallest": 128}
VARIANTS: dict[str, Variant] = {
    "adamw": Variant("adamw"),
    "adamw-dct": Variant("adamw", DCT | {"gradients_kept": 0.01}),
    "muon": Variant("muon"),
    "muon-dct": Variant("muon", DCT | {"gradients_kept": 0.01}),
    "muon-dct-warmup": Variant("muon", DCT | {"gradients_kept": 0.008}, start=0.015, warmup=0.3),
    "muon-dct-short": Variant("muon", DCT | {"gradients_kept": 0.006}, start=0.001, warmup=0.02),
    "muon-dct-100": Variant("muon", DCT | {"gradients_kept": 0.008}, warmup=0.1),
    "adamw-dct-warmup": Variant("adamw", DCT | {"gradients_kept": 0.008}, start=0.015, warmup=0.3),
}


def settings(variant: Variant, seed: int, steps: int, cache: str) -> Config:
    """Return the configuration of a training. `cache`: folder of the prepared corpus."""
    of_steps = {
        "gradients_start": round(variant.start * steps),
        "gradients_warmup": round(variant.warmup * steps),
    }
    return from_mapping(
        {
            "model": STUDY.section,
            "parallel": {"dp": REPLICAS},
            "pipeline": {"num_microbatches": 1},
            "optim": OPTIMIZERS[variant.optimizer] | {"min_lr": 1e-4, "warmup_steps": steps // 50},
            "train": {
                "num_steps": steps,
                "micro_batch_size": STUDY.micro_batch,
                "device": "cpu",
                "seed": seed,
            },
            "data": {"split": 0.015, "cache": cache},
            "compression": of_steps | variant.compression,
        }
    )


def train(name: str, seed: int, steps: int, cache: str) -> dict[str, Any]:
    """Train a variant. Collectives: called on all ranks."""
    torch.set_num_threads(1)
    config = settings(VARIANTS[name], seed, steps, cache)
    grid = ProcessGrid(sizes_of(config.parallel))
    data = open_data(config, quiet=True)
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    train_loader, valid_loader = (
        BatchLoader(
            samples,
            micro_batch_size=STUDY.micro_batch,
            num_microbatches=1,
            dp_rank=grid.replica,
            dp_size=grid.num_replicas,
        )
        for samples in (data.train, data.valid[""])
    )
    start = time.perf_counter()
    engine.train(train_loader, steps, lambda step: None)
    seconds = time.perf_counter() - start
    valid = engine.evaluate(valid_loader, EVAL_BATCHES)["lm"]
    return {
        "case": f"{name}, {steps} steps, seed {seed}",
        "valid_loss": round(valid, 4),
        "seconds": round(seconds, 1),
        **shares_sent(engine, steps),
        "settings": {
            "shape": "study",
            "variant": name,
            "seed": seed,
            "steps": steps,
            "tokens": steps * dist.get_world_size() * STUDY.microbatch_tokens,
        },
    }


def study(args: argparse.Namespace, cache: str) -> Iterator[dict[str, Any]]:
    """Train each variant with each seed."""
    for seed, name in product(args.seeds, args.variants):
        yield run_ranks(train, REPLICAS, name, seed, args.steps, cache)


def table(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each variant: its loss, and how far that is above whole gradients'."""
    losses: dict[str, dict[int, float]] = {}
    sent: dict[str, list[float]] = {}
    for case in cases:
        name = case["settings"]["variant"]
        losses.setdefault(name, {})[case["settings"]["seed"]] = case["valid_loss"]
        sent.setdefault(name, []).append(case["elements"])
    for name, of_seeds in losses.items():
        line = f"{name:<32} {fmean(of_seeds.values()):.4f}  1 / {1 / fmean(sent[name]):.0f}"
        over = gap(of_seeds, losses.get(VARIANTS[name].whole, {}))
        if over is not None and VARIANTS[name].whole != name:
            interval = "" if over.interval is None else f" ± {over.interval:.2f}"
            line += f"  {over.percent:+.2f} %{interval}"
        yield line


def show(entry: dict[str, Any]) -> None:
    print(
        f"{entry['case']:<48} {entry['valid_loss']:.4f}  {entry['elements']:.5f} of the elements"
        f"  {entry['seconds']} s",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=1, shapes=["study"], choices=["study"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parse(parser)
    with tempfile.TemporaryDirectory() as cache:
        cases = report(
            "compressed_training",
            study(args, cache),
            args,
            show=show,
            shapes={"study": STUDY},
            meaning=(
                "valid_loss: at the end, of the whole model; elements, bytes: that a rank sent, "
                "as a share of whole gradients"
            ),
        )
    print(*table(cases), sep="\n")


if __name__ == "__main__":
    main()
