"""Settings that are "auto" and depend on speeds: measured on the machines that the run is on, and from then on its own.

A few batches of random tokens are trained on weights that are then thrown away, and their measured costs simulated with
every value. What was found is written into the run's config.toml, which a run that goes on takes it from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from hybridpar.comm import gather_objects
from hybridpar.config import FOUND, Config, OuterConfig, PipelineConfig
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import config_error
from hybridpar.grid import ProcessGrid
from hybridpar.pipeline.plan.kinds import Kind
from hybridpar.pipeline.plan.predict import free_to_leave, smallest_early_switch
from hybridpar.pipeline.plan.sizes import Sizes
from hybridpar.train import trace
from hybridpar.train.auto_schedule import find_schedule_for, of_first_rank
from hybridpar.train.costs import RunCosts, run_costs
from hybridpar.train.engine import Engine

_BATCHES = 8


Build = Callable[[Callable[[], Engine]], Engine]
"""Builds an engine; where one rank cannot, none has it."""


def settle(config: Config, grid: ProcessGrid, device: torch.device, say: Callable[[str], None],
           build: Build = lambda make: make()) -> Config:
    """`config` with a value in the place of each "auto", which is said.

    pipeline.schedule: auto_schedule.py says which. pipeline.early_switch: the smallest that costs no time here.
    memory.offload_activations: for each rank of a pipeline how many may leave at no cost in time.
    Collectives: on all ranks of the grid.
    Raises: ConfigError where activations do not leave this device; SetupError on all ranks, where what is found fails;
    HybridparError where the file has no room.
    """
    if config.pipeline.schedule == "auto" and config.parallel.pp == 1:
        config = replace(config, pipeline=replace(config.pipeline, schedule="1f1b"))
    if config.pipeline.schedule == "auto":
        best, usual = find_schedule_for(
            config, grid, device, lambda trial: _tried(trial, grid, device, build)[0].measured.costs)
        config = replace(config, pipeline=best.pipeline)
        found = ", ".join(f"{name} = {getattr(best.pipeline, name)}" for name in ("schedule", *FOUND)
                          if name != "order" and getattr(best.pipeline, name) != getattr(PipelineConfig, name))
        say(f"pipeline: {found or 'schedule = 1f1b'}, the fastest here: {1e3 * best.step_time:.4g} ms a step by what "
            f"its actions cost, 1f1b {1e3 * usual.step_time:.4g} ms")
    if config.pipeline.early_switch == "auto":
        trial = replace(config, pipeline=replace(config.pipeline, early_switch="off"))
        run, engine = _tried(trial, grid, device, build)
        switch = of_first_rank(
            partial(smallest_early_switch, run.measured.costs, engine.sizes, run.ordering), grid.world)
        config = replace(config, pipeline=replace(config.pipeline, early_switch=switch))
        say(f"pipeline.early_switch: {switch}, the smallest that costs no time here")
    if config.memory.offload_activations == "auto":
        if device.type != "cpu":
            raise config_error("memory.offload_activations", "auto", "works on CPUs so far", "0")
        away = _free_to_leave(config, grid, device, build)
        config = replace(config, memory=replace(config.memory, offload_activations=away))
        say(f"memory.offload_activations: {list(away)}, by rank of a pipeline: as many as may leave at no cost in time "
            "here")
    return config


def _free_to_leave(config: Config, grid: ProcessGrid, device: torch.device, build: Build) -> tuple[int, ...]:
    """Tries with all away that can be: times are then those beside moves of all ranks, and no more memory is taken than
    with any other number. Where ranks and their moves are more than the cores, moves take time of the ranks."""
    sizes = Sizes.of(config)
    everything = sizes.num_microbatches * sizes.chunks
    run, engine = _tried(
        replace(config, memory=replace(config.memory, offload_activations=everything)), grid, device, build)
    of_rank = (0.0,) * 4
    if (stash := engine.executor.stash) is not None:
        of_rank = (*stash.tier.seconds_per_move(), *stash.tier.work_per_move())
    everyone = gather_objects((grid.pp.rank, *of_rank), grid.world)
    offload, reload, *work = ([max(times[way] for times in everyone if times[0] == rank)
                               for rank in range(grid.pp.size)] for way in range(1, 5))
    costs = run.measured.costs
    if costs.cores is not None and costs.cores < 2 * grid.pp.size:
        costs = replace(costs, calls={**costs.calls, Kind.OFFLOAD: work[0], Kind.RELOAD: work[1]})
    costs = replace(costs, offload=offload, reload=reload)
    return of_first_rank(partial(free_to_leave, costs, sizes, run.ordering), grid.world)


def _tried(config: Config, grid: ProcessGrid, device: torch.device, build: Build) -> tuple[RunCosts, Engine]:
    """What a few batches cost, and the engine that has made them, closed."""
    trial = replace(config, pipeline=replace(config.pipeline, sync_steps=0), outer=OuterConfig(every=_BATCHES + 1))
    engine = build(lambda: Engine(trial, grid, device))
    loader = SyntheticLoader(config.model, config.train.micro_batch_size, config.pipeline.num_microbatches,
                             grid.replica, grid.num_replicas)
    recorder = trace.Recorder(engine.executor, 0, _BATCHES)
    engine.train(loader, _BATCHES, lambda result: recorder.after_step(result.step))
    recorder.close()
    engine.close()
    run = run_costs(trial, trace.gather(recorder, grid))
    assert run is not None, "too few batches were recorded"
    return run, engine
