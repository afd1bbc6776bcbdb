"""Trials: train a few batches of random tokens on discarded weights to measure action costs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hybridpar.config import Config, OuterConfig
from hybridpar.data.synthetic import synthetic_loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.runtime.slow_tier import MoveTimes
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.costs_file import run_costs

_BATCHES = 8

Build = Callable[[Callable[[], Engine]], Engine]
"""Builds an engine on all ranks; if one rank cannot, it fails on all."""


@dataclass(frozen=True)
class Trial:
    """Costs of all ranks; of this rank copy times, and whether it replayed CUDA graphs."""

    costs: Costs
    schedule_options: ScheduleOptions
    moves: MoveTimes
    replays: bool


def try_out(
    config: Config, grid: ProcessGrid, device: torch.device, build: Build, *, warmup: int = 0
) -> Trial:
    """Train a few batches, then free all memory that they took.

    warmup: number of unmeasured batches before them. Collectives: on all ranks of the grid.
    """
    trial = _train(config, grid, device, build, warmup)
    free_memory(device)
    return trial


def free_memory(device: torch.device) -> None:
    """Free the memory of an engine: engine and executor form a reference cycle."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _train(
    config: Config, grid: ProcessGrid, device: torch.device, build: Build, warmup: int
) -> Trial:
    num_batches = warmup + _BATCHES
    config = replace(
        config,
        pipeline=replace(config.pipeline, sync_steps=0),
        outer=OuterConfig(every=num_batches + 1),
    )
    job = JobPlan(config)
    engine = build(lambda: Engine(job, grid, device))
    loader = synthetic_loader(config, grid.replica, grid.num_replicas)
    slow = engine.moves.activations.tier
    graphs = engine.executor.graphs
    recorder = trace.Recorder(engine.executor, 0, num_batches, skip=warmup)

    def after_step(result: StepResult) -> None:
        began_before = recorder.is_active
        recorder.after_step(result.step)
        if recorder.is_active and not began_before:
            slow.restart()  # earlier copies also allocated, and competed with compilers

    engine.train(loader, num_batches, after_step)
    recorder.close()
    engine.close()
    run = run_costs(job, trace.gather(recorder, grid))
    assert run is not None, "too few batches were recorded"
    replays = graphs is not None and graphs.num_replayed > 0
    return Trial(run.measured.costs, run.schedule_options, slow.times(), replays)
