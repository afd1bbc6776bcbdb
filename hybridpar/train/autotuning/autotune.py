"""Autotuning: measure "auto" settings that depend on the speed of the run's machines.

A few batches of random tokens train weights that are then discarded, and every value is simulated
with the measured costs. The result is written to config.toml, so that a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from hybridpar.config import FOUND, Config, PipelineConfig
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.simulate.predict import smallest_early_switch
from hybridpar.schedules.simulate.timeline import milliseconds
from hybridpar.train.autotuning.auto_offload import find_numbers_for, require_room
from hybridpar.train.autotuning.auto_schedule import find_schedule_for, of_first_rank
from hybridpar.train.autotuning.trial import Build, Trial, try_out
from hybridpar.train.forecasts.offload_room import with_away


def autotune(
    config: Config,
    grid: ProcessGrid,
    device: torch.device,
    say: Callable[[str], None],
    build: Build = lambda make: make(),
) -> Config:
    """Return `config` with a measured value for each "auto", and report the values.

    pipeline.schedule: the fastest schedule (auto_schedule.py). pipeline.early_switch: the smallest
    that costs no time. memory.offload_activations: how many micro-batches each pipeline rank can
    offload at no cost.

    Collectives: on all ranks of the grid.

    Args:
        build: Builds a trial's engine on all ranks, or fails on all.

    Raises:
        SetupError: On all ranks: the search failed, or a host lacks memory for the activations
            that leave its GPUs.
        HybridparError: The disk has no room for the file of offloaded activations.
    """

    def tried(trial: Config, warmup: int = 0) -> Trial:
        return try_out(trial, grid, device, build, warmup=warmup)

    if config.pipeline.schedule == "auto" and config.parallel.pp == 1:
        config = replace(config, pipeline=replace(config.pipeline, schedule="1f1b"))
    if config.pipeline.schedule == "auto":
        best, usual = find_schedule_for(config, grid, device, lambda trial: tried(trial).costs)
        config = replace(config, pipeline=best.pipeline)
        found = ", ".join(
            f"{name} = {getattr(best.pipeline, name)}"
            for name in ("schedule", *FOUND)
            if name != "order" and getattr(best.pipeline, name) != getattr(PipelineConfig, name)
        )
        say(
            f"pipeline: {found or 'schedule = 1f1b'}, the fastest here: "
            f"{milliseconds(best.step_time)} ms a step by what its actions cost, 1f1b "
            f"{milliseconds(usual.step_time)} ms"
        )
    if config.pipeline.early_switch == "auto":
        trial = tried(replace(config, pipeline=replace(config.pipeline, early_switch="off")))
        switch = of_first_rank(
            partial(
                smallest_early_switch, trial.costs, JobPlan(config).shape, trial.schedule_options
            ),
            grid.world,
        )
        config = replace(config, pipeline=replace(config.pipeline, early_switch=switch))
        say(f"pipeline.early_switch: {switch}, the smallest that costs no time here")
    job = JobPlan(config)
    if config.memory.offload_activations == "auto":
        away, line = find_numbers_for(job, grid, device, tried)
        config = with_away(config, away)
        say(line)
    else:
        require_room(job, grid, device)
    return config
