"""Evaluate a run's newest weights in a job that leaves the run folder unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridpar import checkpoint
from hybridpar.config import Config, Launch
from hybridpar.data import Data
from hybridpar.errors import HybridparError, config_error
from hybridpar.flight import FAILED, LOST, Flight
from hybridpar.job import JobPlan
from hybridpar.train import folder as run_folder
from hybridpar.train.autotuning.autotune import autotune
from hybridpar.train.engine import Engine
from hybridpar.train.equal_plans import require_equal_data, require_equal_start
from hybridpar.train.evaluation import Evaluator, as_told
from hybridpar.train.faults.errors import LostContactError, describe_failure
from hybridpar.train.job import join, open_job_data
from hybridpar.validate import resolve


def evaluate(config: Config, launch: Launch, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the newest checkpoint of the run, or the starting weights if there is none yet.

    Returns:
        The numbers that `on_evaluation` is given, over train.eval_batches batches.

    Collectives: to be called by all processes of the job.
    Raises: HybridparError, as `train.job.train`; ConfigError without validation samples.
    """
    # early_switch does not affect evaluations, so that "auto" needs no measurement
    pipeline = config.pipeline
    if pipeline.early_switch == "auto":
        pipeline = replace(pipeline, early_switch="off")
    place, config = join(resolve(replace(config, pipeline=pipeline), launch.world_size), launch)
    job = place.job
    flight = job.flight
    with contextlib.ExitStack() as held:
        saved = job.decide(lambda: _find_newest(config, held))
        require_equal_start(config.model, job, resumes=bool(saved))
        # eval_interval = 0 keeps open_job_data from rejecting the configuration: without
        # validation samples, `_evaluate` raises an error about the data sets instead
        without = replace(config, train=replace(config.train, eval_interval=0))
        data = open_job_data(without, job, datasets)
        require_equal_data(data, job)
        grid = place.connect(config, flight)
        try:
            config = autotune(config, grid, place.device, lambda text: None)
            engine = Engine(JobPlan(config), grid, place.device)
            flight.phase("loading", config.faults.start_timeout_s)
            if saved:
                checkpoint.start_from(Path(saved), engine)
            numbers = _evaluate(engine, data, flight)
            engine.close()
        except HybridparError:
            raise
        except Exception as error:
            failure = describe_failure(error, grid.describe(), flight.read())
            flight.end(LOST if isinstance(failure, LostContactError) else FAILED, str(failure))
            raise failure from error
        job.end_group()
        flight.phase("finished")
    return numbers


def _find_newest(config: Config, held: contextlib.ExitStack) -> str:
    """Return the run's newest checkpoint, which `held` protects from pruning; empty if none."""
    if not checkpoint.saved_steps(config.run.folder / run_folder.CHECKPOINTS):
        return ""
    return str(held.enter_context(checkpoint.hold_start(config.run.folder, config.model)).folder)


def _evaluate(engine: Engine, data: Data, flight: Flight) -> dict[str, Any]:
    if not data.valid:
        works = 'datasets={"train": .., "valid": [{"x": .., "y": ..}, ..]}'
        raise config_error("datasets", "valid", "missing: evaluation needs samples", works)
    flight.phase("evaluating", engine.config.faults.start_timeout_s)
    return as_told(Evaluator(engine, data.valid, data.tokenizer).evaluate())
