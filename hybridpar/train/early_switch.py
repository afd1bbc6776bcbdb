"""pipeline.early_switch = "auto": the value is measured on the machines that the run is on."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridpar.comm import gather_objects
from hybridpar.config import Config, OuterConfig
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.pipeline.plan.predict import smallest_early_switch
from hybridpar.train import trace
from hybridpar.train.costs import run_costs
from hybridpar.train.engine import Engine

_BATCHES = 8


def measure_early_switch(config: Config, grid: ProcessGrid, device: torch.device) -> Config:
    """Replaces "auto" in `config` by the smallest pipeline.early_switch that costs no time here.

    A few batches of random tokens are trained by the paper's rule on weights that are then thrown away, and their
    measured costs simulated with every L. Collectives: on all ranks of the grid.
    """
    trial = replace(config, pipeline=replace(config.pipeline, early_switch="off", sync_steps=0),
                    outer=OuterConfig(every=_BATCHES + 1))
    engine = Engine(trial, grid, device)
    loader = SyntheticLoader(
        config.model, config.train.micro_batch_size, config.pipeline.num_microbatches, grid.replica,
        grid.num_replicas)
    recorder = trace.Recorder(engine.executor, 0, _BATCHES)
    engine.train(loader, _BATCHES, lambda result: recorder.after_step(result.step))
    recorder.close()
    run = run_costs(trial, trace.gather(recorder, grid))
    assert run is not None, "too few batches were recorded"
    switch = smallest_early_switch(run.measured.costs, engine.sizes, run.ordering)
    agreed = gather_objects(switch, grid.world)[0]
    return replace(config, pipeline=replace(config.pipeline, early_switch=agreed))
