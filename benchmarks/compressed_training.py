"""Question: how much does a small GPT lose in a whole training if its ranks send less?

    python -m benchmarks.compressed_training

A GPT of four layers learns the source text of Python's standard library, 512 tokens a batch, with a
warm-up of a fiftieth of the steps and a cosine decay: on two replicas that compress gradients, on
two sites that train apart, or, where messages are compressed, in one process with the link of two
stages in it. Some variants have rules that hybridpar does not have (compression_rules). Validation
loss at the end, over the loss without compression and with the same optimizer and seed, and its
95 % confidence interval over the seeds. Tokens are equal, but half where a replica trains alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import Shape, arguments, parse, report, run_ranks
from benchmarks.compression import shares_sent
from benchmarks.compression_rules import RULES, MessageThreshold, after_step
from benchmarks.convergence.report import gap
from hybridpar.config import Config, from_mapping
from hybridpar.data import BatchLoader, open_data
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.state.compression.methods import dct
from hybridpar.state.compression.methods.dct import Thresholds
from hybridpar.train.engine import Engine
from hybridpar.validate import resolve
from hybridpar.verify.boundaries import add_boundaries

STUDY = Shape(4, 128, 4, 64, 1024, 4)
REPLICAS = 2
EVAL_SAMPLES = 512
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 2e-3, "betas": [0.9, 0.95]},
    "muon": {"name": "muon", "lr": 8e-3, "betas": [0.9, 0.95], "momentum": 0.95, "nesterov": True},
}
"""Settings of [optim] by name; rates as in the convergence study, the best for whole gradients."""


@dataclass(frozen=True)
class Variant:
    """A row of the study.

    Attributes:
        optimizer: Name in OPTIMIZERS, and of the variant without compression.
        compression: Settings of [compression].
        start: Share of the steps before the first compressed one.
        warmup: Share of the steps in which the sent share falls.
        rule: Name in RULES, or MESSAGE_THRESHOLD.
        optim: Settings of [optim] other than the optimizer's.
        outer: Settings of [outer], if the replicas are sites.
        replicas: Ranks that each train on a half of the batch; with one, the other half is left out.
        stages: Stages of the pipeline; with two, messages are compressed and gradients whole.
    """

    optimizer: str
    compression: Mapping[str, Any] = field(default_factory=dict)
    start: float = 0.0
    warmup: float = 0.0
    rule: str = ""
    optim: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] | None = None
    replicas: int = REPLICAS
    stages: int = 1


DCT = {"gradients": "dct", "gradients_smallest": 128}
FALLING = DCT | {"gradients_kept": 0.008}
MESSAGES = {"messages": "dct", "messages_kept": 0.1}
MESSAGE_THRESHOLD = "threshold of messages"
"""The rule that a message's features are chosen by the paper's threshold, not token by token."""
UNCLIPPED = {"clip_grad": 0.0}


def _rule(optimizer: str, rule: str, **settings: Any) -> Variant:
    """Return the variant of about 1 / 100 of the elements with another rule."""
    return Variant(optimizer, FALLING, warmup=0.1, rule=rule, **settings)


VARIANTS: dict[str, Variant] = {
    "adamw": Variant("adamw"),
    "adamw-alone": Variant("adamw", replicas=1),
    "adamw-dct": Variant("adamw", DCT | {"gradients_kept": 0.01}),
    "adamw-dct-100": Variant("adamw", FALLING, warmup=0.1),
    "adamw-dct-no-limit": _rule("adamw", "no limit"),
    "adamw-dct-one-threshold": _rule("adamw", "one threshold"),
    "adamw-dct-threshold-of-kind": _rule("adamw", "threshold of a kind"),
    "adamw-dct-rows": _rule("adamw", "rows of the embedding"),
    "adamw-dct-embedding": _rule("adamw", "whole embedding"),
    "adamw-dct-clipped": _rule("adamw", "clipped", optim=UNCLIPPED),
    "adamw-dct-masked": _rule("adamw", "masked momentum"),
    "adamw-dct-own-momentum": _rule(
        "adamw", "own momentum", optim=UNCLIPPED | {"betas": [0.0, 0.95]}
    ),
    "adamw-messages": Variant("adamw", MESSAGES, stages=2),
    "adamw-messages-threshold": Variant("adamw", MESSAGES, stages=2, rule=MESSAGE_THRESHOLD),
    "muon": Variant("muon"),
    "muon-alone": Variant("muon", replicas=1),
    "muon-sites-100": Variant("muon", outer={"every": 100, "lr": 1.0, "momentum": 0.0}),
    "muon-dct": Variant("muon", DCT | {"gradients_kept": 0.01}),
    "muon-dct-short": Variant("muon", DCT | {"gradients_kept": 0.006}, start=0.001, warmup=0.02),
    "muon-dct-warmup": Variant("muon", FALLING, start=0.015, warmup=0.3),
    "muon-dct-100": Variant("muon", FALLING, warmup=0.1),
}


def settings(variant: Variant, seed: int, steps: int, cache: str) -> Config:
    """Return the configuration of a training. `cache`: folder of the prepared corpus."""
    of_steps = {
        "gradients_start": round(variant.start * steps),
        "gradients_warmup": round(variant.warmup * steps),
    }
    if variant.stages > 1:
        parallel = {"pp": variant.stages, "dp": 1}
    elif variant.outer is not None:
        parallel = {"sites": REPLICAS, "dp": 1}
    else:
        parallel = {"dp": variant.replicas}
    return from_mapping(
        {
            "model": STUDY.section,
            "parallel": parallel,
            "pipeline": {"num_microbatches": REPLICAS if variant.stages > 1 else 1},
            "optim": OPTIMIZERS[variant.optimizer]
            | {"min_lr": 1e-4, "warmup_steps": steps // 50}
            | variant.optim,
            "train": {
                "num_steps": steps,
                "micro_batch_size": STUDY.micro_batch,
                "device": "cpu",
                "seed": seed,
            },
            "data": {"split": 0.015, "cache": cache},
            "compression": of_steps | variant.compression,
            "outer": variant.outer or {},
        }
    )


def train(name: str, seed: int, steps: int, cache: str) -> dict[str, Any]:
    """Train a variant. Collectives: called on all ranks."""
    torch.set_num_threads(1)
    variant = VARIANTS[name]
    dct.GRADIENTS = RULES.get(variant.rule, Thresholds)
    config = settings(variant, seed, steps, cache)
    if variant.stages > 1:
        engine, grid, shares = _with_links(config, variant.rule)
    else:
        grid = ProcessGrid(sizes_of(config.parallel))
        engine = Engine(JobPlan(config), grid, torch.device("cpu"))
        shares = partial(shares_sent, engine, steps)
    data = open_data(engine.config, quiet=True)
    train_loader, valid_loader = (
        BatchLoader(
            samples,
            micro_batch_size=STUDY.micro_batch,
            num_microbatches=config.pipeline.num_microbatches,
            dp_rank=grid.replica,
            dp_size=grid.num_replicas,
        )
        for samples in (data.train, data.valid[""])
    )
    start = time.perf_counter()
    engine.train(train_loader, steps, after_step(engine))
    seconds = time.perf_counter() - start
    of_batch = STUDY.micro_batch * config.pipeline.num_microbatches * grid.num_replicas
    valid = engine.evaluate(valid_loader, EVAL_SAMPLES // of_batch)["lm"]
    return {
        "case": f"{name}, {steps} steps, seed {seed}",
        "valid_loss": round(valid, 4),
        "seconds": round(seconds, 1),
        **shares(),
        "settings": {
            "shape": "study",
            "variant": name,
            "seed": seed,
            "steps": steps,
            "tokens": steps * of_batch * STUDY.seq_length,
        },
    }


def _with_links(
    config: Config, rule: str
) -> tuple[Engine, ProcessGrid, Callable[[], dict[str, float]]]:
    """Return an engine that trains a pipeline's job in one process with the links in it, and a
    function that returns the share of the features that were sent.
    """
    alone = {"parallel": {"pp": 1}, "compression": {"messages": "none"}}
    job = JobPlan(config)
    grid = ProcessGrid()
    engine = Engine(JobPlan(resolve(from_mapping(alone, config), 1)), grid, torch.device("cpu"))
    blocks = {int(number): block for number, block in engine.stage.blocks.items()}
    kept = config.compression.messages_kept
    if rule != MESSAGE_THRESHOLD:
        add_boundaries(blocks, job)
        return engine, grid, lambda: {"elements": kept}
    link = MessageThreshold(kept, config.pipeline.num_microbatches)
    blocks[job.split[0].stop - 1].register_forward_hook(link)
    return engine, grid, lambda: {"elements": round(link.sent / link.whole, 5)}


def study(args: argparse.Namespace, cache: str) -> Iterator[dict[str, Any]]:
    """Train each variant with each seed."""
    for seed, name in product(args.seeds, args.variants):
        num_ranks = 1 if VARIANTS[name].stages > 1 else VARIANTS[name].replicas
        yield run_ranks(train, num_ranks, name, seed, args.steps, cache)


def table(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each variant: its loss, and how far that is above the one without compression."""
    losses: dict[str, dict[int, float]] = {}
    sent: dict[str, list[float]] = {}
    for case in cases:
        name = case["settings"]["variant"]
        losses.setdefault(name, {})[case["settings"]["seed"]] = case["valid_loss"]
        sent.setdefault(name, []).append(case["elements"])
    for name, of_seeds in losses.items():
        line = f"{name:<32} {fmean(of_seeds.values()):.4f}  {fmean(sent[name]):.5f} of the elements"
        over = gap(of_seeds, losses.get(VARIANTS[name].optimizer, {}))
        if over is not None and VARIANTS[name].optimizer != name:
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
