"""Launches the kernels of a rank of a pipeline once before ranks depend on each other.

CUDA loads a kernel at its first launch, and may wait with that until everything on the GPU is done.
A plan posts NCCL receives ahead, and those are done once another rank has sent. So a rank whose
first backward is yet to be loaded may wait for a neighbour that waits for this very backward.
tests/device_model.py finds that with naive, interleaved, zero-bubble and V schedules.

So each rank first trains two batches by itself, with random weights: its neighbours are imagined,
what they send is zeros, and sums over ranks change nothing. It launches the same kernels on the
same shapes. Then it gives everything back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from hybridpar.config import Config, OuterConfig
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.schedules.action import Action
from hybridpar.train.engine import Actions, Engine

_BATCHES = 2
"""The first batch of a schedule with two versions of the weights has one of them alone."""

Build = Callable[[Callable[[], Engine]], Engine]
"""Builds an engine; where one rank cannot, none has it."""


def is_needed(grid: ProcessGrid, device: torch.device) -> bool:
    """Whether receives of this job's pipeline are kernels on the GPU."""
    return device.type == "cuda" and grid.pp.size > 1 and not grid.pp.via_host


def warm_up(
    config: Config,
    grid: ProcessGrid,
    device: torch.device,
    build: Build,
    watch: Callable[[Action], object] | None = None,
) -> None:
    """Train a few micro-batches on weights that are then thrown away, without the other ranks.

    Args:
        config: Resolved; settings may be "auto".
        grid: That of the job. Nothing is sent over it, but by `build`.
        device: Of this rank.
        build: Builds the engine.
        watch: Called with each action, before it is executed.
    """
    config = _shortened(config)

    def watched(actions: Actions) -> Actions:
        for action in actions:
            if watch is not None:
                watch(action)
            yield action

    alone = silent_grid(config, grid.world.rank, _send_zeros)
    engine = build(lambda: Engine(JobPlan(config), alone, device, wrap_plan=watched))
    loader = SyntheticLoader(
        config.model,
        config.train.micro_batch_size,
        config.pipeline.num_microbatches,
        grid.replica,
        grid.num_replicas,
    )
    engine.train(loader, _BATCHES, lambda result: None)
    engine.close()
    del engine
    gc.collect()  # an engine and its executor refer to each other, and hold a run's worth of memory
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _send_zeros(op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Fill what would come from other ranks, so that numbers stay finite and nothing is skipped."""
    if writes is not reads:  # else a sum in place
        for tensor in writes:
            tensor.zero_()


def _shortened(config: Config) -> Config:
    """The configuration with few micro-batches a batch, and usual values for what is yet to be
    measured."""
    pipeline = config.pipeline
    memory = config.memory
    if pipeline.schedule == "auto":
        pipeline = replace(pipeline, schedule="1f1b")
    if pipeline.early_switch == "auto":
        pipeline = replace(pipeline, early_switch="off")
    if pipeline.schedule != "own":  # whose order is written down for so many
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
