"""Shared by tests of runs in stretches: from checkpoint to checkpoint, what ranks hold then, and what they evaluate."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.train.engine import Engine, StepResult


def run(config: Config, root: Path, stop: int) -> tuple[list[StepResult], dict[str, Tensor], dict[str, float]]:
    """Trains from the last checkpoint to step `stop`, and saves: steps, this rank's state, and an evaluation."""
    parallel, m = config.parallel, config.pipeline.num_microbatches
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    engine = Engine(config, grid, torch.device("cpu"))
    loader = SyntheticLoader(config.model, config.train.micro_batch_size, m, grid.dp.rank, grid.dp.size)
    steps: list[StepResult] = []
    done = checkpoint.resume(root, engine, "corpus", print)
    engine.train(loader, stop - done, steps.append)
    checkpoint.save(root, engine, "corpus")
    return steps, {n: t.clone() for n, t in engine.state.tensors().items()}, engine.evaluate(loader, 2)


def state(results: list[tuple[list[StepResult], dict[str, Tensor], dict[str, float]]]) -> dict[str, Tensor]:
    """Of all ranks together; what two of them have is the same."""
    found: dict[str, Tensor] = {}
    for _, tensors, _ in results:
        for name, tensor in tensors.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found
