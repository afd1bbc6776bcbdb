"""Launch a pipeline rank's kernels once, before ranks depend on each other.

CUDA loads a kernel at its first launch, and may wait for all work on the GPU to finish first. A
plan posts NCCL receives ahead, which finish once another rank has sent. So a rank that has yet to
load its first backward may wait for a neighbour that waits for this very backward.
tests/device_model.py shows this deadlock with naive, interleaved, zero-bubble and V schedules.

So each rank first trains two batches alone, on random weights: neighbours are simulated, received
tensors are zeros, and collectives change nothing. It launches the same kernels on the same shapes.
Then it frees all memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from hybridpar.config import Config, OuterConfig
from hybridpar.data.synthetic import synthetic_loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.train.autotuning.trial import Build, free_memory
from hybridpar.train.engine import Engine

_BATCHES = 2
"""Two, because a schedule with two weight versions uses only one of them in the first batch."""


def is_needed(grid: ProcessGrid, device: torch.device) -> bool:
    """Return whether pipeline receives are kernels on the GPU, so that a deadlock is possible."""
    return device.type == "cuda" and grid.pp.size > 1 and not grid.pp.via_host


def warm_up(config: Config, grid: ProcessGrid, device: torch.device, build: Build) -> None:
    """Train a few micro-batches on discarded weights, without the other ranks.

    Args:
        config: Resolved; settings may be "auto".
        grid: The job's grid. Nothing is sent over it except by `build`.
    """
    config = _shortened(config)
    alone = silent_grid(config, grid.world.rank, _send_zeros)
    engine = build(lambda: Engine(JobPlan(config), alone, device))
    loader = synthetic_loader(config, grid.replica, grid.num_replicas)
    engine.train(loader, _BATCHES, lambda result: None)
    engine.close()
    del engine
    free_memory(device)


def _send_zeros(op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Zero what other ranks would send, so that numbers stay finite and no step is skipped."""
    if writes is not reads:  # an in-place collective keeps this rank's values
        for tensor in writes:
            tensor.zero_()


def _shortened(config: Config) -> Config:
    """Return the configuration with fewer micro-batches, and defaults for "auto" settings."""
    pipeline = config.pipeline
    memory = config.memory
    if pipeline.schedule == "auto":
        pipeline = replace(pipeline, schedule="1f1b")
    if pipeline.early_switch == "auto":
        pipeline = replace(pipeline, early_switch="off")
    if pipeline.schedule != "own":  # a custom order is written for its number of micro-batches
        pipeline = replace(
            pipeline, num_microbatches=min(pipeline.num_microbatches, 2 * config.parallel.pp)
        )
    if memory.offload_activations == "auto":
        memory = replace(memory, offload_activations=0)
    return replace(
        config,
        pipeline=pipeline,
        memory=memory,
        outer=OuterConfig(every=_BATCHES + 1),
        train=replace(config.train, cuda_graphs=False),
    )
