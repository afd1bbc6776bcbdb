"""Shared by tests of runs in stretches: from checkpoint to checkpoint, what ranks hold then, and
what they evaluate."""

from __future__ import annotations

from pathlib import Path

import torch
from engines import start
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.train.engine import StepResult


def run(
    config: Config, root: Path, stop: int
) -> tuple[list[StepResult], dict[str, Tensor], dict[str, float]]:
    """Trains from the last checkpoint to step `stop`, and saves: steps, this rank's state, and an
    evaluation."""
    engine, loader = start(config)
    steps: list[StepResult] = []
    done = checkpoint.resume(root, engine, "corpus", print)
    engine.train(loader, stop - done, steps.append)
    checkpoint.save(root, engine, "corpus")
    return (
        steps,
        {n: t.clone() for n, t in engine.state.tensors().items()},
        engine.evaluate(loader, 2),
    )


def state(
    results: list[tuple[list[StepResult], dict[str, Tensor], dict[str, float]]],
) -> dict[str, Tensor]:
    """Numbers of all ranks together; any two of them have the same."""
    found: dict[str, Tensor] = {}
    for _, tensors, _ in results:
        for name, tensor in tensors.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found
