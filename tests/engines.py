"""Small GPTs for tests, engines that train them on random samples, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import synthetic_loader
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine, StepResult

Sections = Mapping[str, dict[str, Any]]

PIPELINES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "2bw"},
    {"schedule": "pipedream"},
    {"schedule": "naive"},
    {"schedule": "1f1b", "split_backward": True},
    {"schedule": "2bw", "recompute": "stage", "gradient_buffers": 1},
)
"""Sections [pipeline] that keep, order and divide a rank's work in every way."""


def gpt(sizes: tuple[int, int, int, int, int], *each: Sections) -> Config:
    """A GPT of so many layers, features, heads, tokens and words, trained on batches of 3
    micro-batches of 2 samples where no section says otherwise; of several that name a key the last
    counts."""
    model = dict(
        zip(
            ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"),
            sizes,
            strict=True,
        )
    )
    every: list[Sections] = [
        {
            "model": model,
            "pipeline": {"num_microbatches": 3},
            "train": {"micro_batch_size": 2, "num_steps": 20},
            "optim": {"lr": 1e-2},
        },
        *each,
    ]
    names = dict.fromkeys(name for sections in every for name in sections)
    return from_mapping(
        {
            name: {k: v for sections in every for k, v in sections.get(name, {}).items()}
            for name in names
        }
    )


def samples(engine: Engine) -> BatchLoader:
    """Random samples of its rank."""
    return synthetic_loader(engine.config, engine.grid.replica, engine.grid.num_replicas)


def start(config: Config, device_type: str = "cpu", **of_engine: Any) -> tuple[Engine, BatchLoader]:
    """This rank's engine and its samples."""
    engine = Engine(
        JobPlan(config),
        ProcessGrid(sizes_of(config.parallel), device_type=device_type),
        torch.device("cpu"),
        **of_engine,
    )
    return engine, samples(engine)


@dataclass
class Outcome:
    """Results of a rank's training, and the bytes that have moved for it."""

    steps: list[StepResult]
    evaluated: dict[str, float]
    tensors: dict[str, Tensor]
    moved: Any = 0

    def check(self, other: Outcome) -> None:
        """Equal to the bit, also where it is NaN."""
        assert repr(self.steps) == repr(other.steps)
        assert self.evaluated == other.evaluated
        assert self.tensors.keys() == other.tensors.keys()
        assert not [
            key for key, x in self.tensors.items() if not torch.equal(x, other.tensors[key])
        ]


def train(
    engine: Engine, *stretches: int, steps: Sequence[StepResult] = (), gradients: bool = False
) -> Outcome:
    """Trains so many batches at a time. steps: before these. gradients: every batch's count, too,
    NaN as 0."""
    loader = samples(engine)
    results = list(steps)
    found = dict[str, Tensor]()

    def keep(batch: int, tensors: Mapping[str, Tensor]) -> None:
        found.update((f"{batch}/{name}", tensor.nan_to_num()) for name, tensor in tensors.items())

    for num_batches in stretches:
        engine.train(loader, num_batches, results.append, keep if gradients else None)
    memory = engine.state.memory
    found |= {key: memory.read(tensor).clone() for key, tensor in engine.state.tensors().items()}
    return Outcome(results, engine.evaluate(loader, 1), found)
