"""Forecast the savings and cost of offloaded activations, with speeds measured here.

Matrix products are assumed to run at peak speed, and copies to have their own cores. Autotuning at
the start of a run may find larger numbers, or smaller ones if cores are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.cost import training_flops_per_token
from hybridpar.prediction.predict import predict
from hybridpar.runtime.slow_tier import FileTier
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.predict import free_to_leave, predict_timeline
from hybridpar.state.residency.tiered import folder_to_measure
from hybridpar.train.forecasts.offload_room import everything, with_away
from hybridpar.train.forecasts.preview import stage_costs
from hybridpar.train.reporting.peak import peak_flops

_MIB = 2**20
_SAMPLE = 16 * _MIB
_REPEATS = 3


@dataclass(frozen=True)
class OffloadForecast:
    """Forecast by pipeline rank, in bytes and milliseconds.

    Attributes:
        away: Micro-batches that are offloaded at once.
        moved: Bytes of one micro-batch that are offloaded, by stage.
        saved: Reduction of peak memory.
        step_ms: Time of a step in which matrix products take all the time.
        exposed_ms: Part of the step that waits for the file.
        given: Whether the configuration sets the numbers; otherwise they were found here.
    """

    away: tuple[int, ...]
    moved: tuple[int, ...]
    saved: tuple[int, ...]
    step_ms: float
    exposed_ms: float
    given: bool

    def __str__(self) -> str:
        moved, saved = (
            ", ".join(f"{num_bytes / _MIB:,.1f}" for num_bytes in found)
            for found in (self.moved, self.saved)
        )
        found = ", as many as should cost no time; the run measures it when it starts"
        if self.given:
            found = ""
        return (
            f"activations in a file: of the ranks of a pipeline {', '.join(map(str, self.away))} "
            "micro-batches are "
            f"away at once{found}.\n  {moved} MiB of each leave; the peaks are {saved} MiB "
            "smaller. Of a step of "
            f"at least {self.step_ms:,.1f} ms, {self.exposed_ms:,.1f} ms are waiting for the file "
            "(speeds measured "
            "here, in one process)"
        )


@dataclass(frozen=True)
class OffloadSpeeds:
    """Speeds of one process: bytes per second to and from the file, FLOP/s of matrix products."""

    write: float
    read: float
    flops: float


def forecast_offload(job: JobPlan, speeds: OffloadSpeeds | None = None) -> OffloadForecast | None:
    """Return the forecast for a job, or None if it offloads no activations.

    speeds: default measured here. Raises: HybridparError if the disk has no room for the file.
    """
    config = job.config
    given = config.memory.offload_activations
    if not given:
        return None
    shape = job.shape
    speeds = speeds or measure_speeds(config)
    moved = [stage.moved for stage in predict(JobPlan(with_away(config, everything(job))))]
    counted = stage_costs(job)
    tokens = config.train.micro_batch_size * config.model.tokens_per_sample
    forward, backward = (
        expand(cost, shape.num_stages) for cost in (counted.forward, counted.backward)
    )
    shared_by = config.parallel.tp * config.parallel.cp
    seconds = tokens * training_flops_per_token(config.model) / speeds.flops / shared_by
    unit = seconds / (3 * sum(forward))
    costs = Costs(
        [unit * one for one in forward],
        [unit * one for one in backward],
        offload=[one / speeds.write for one in moved],
        reload=[one / speeds.read for one in moved],
    )
    schedule_options = replace(job.options, host=0.0)
    if given == "auto":
        away = free_to_leave(costs, shape, schedule_options)
    else:
        away = tuple(map(job.num_away, range(shape.num_ranks)))
    after, plain = (predict(JobPlan(with_away(config, number))) for number in (away, 0))
    step, alone = (
        predict_timeline(replace(schedule_options, offload=number), shape, costs).step_time(
            shape.num_microbatches
        )
        for number in (away, 0)
    )
    return OffloadForecast(
        away,
        tuple(moved),
        tuple(a.total - b.total for a, b in zip(plain, after, strict=True)),
        1e3 * step,
        1e3 * (step - alone),
        given != "auto",
    )


def measure_speeds(config: Config) -> OffloadSpeeds:
    """Measure this machine's speeds with torch's current threads; takes about a second."""
    flops, _ = peak_flops(config, torch.device("cpu"), Axis("world"))
    tier = FileTier(folder_to_measure(config))
    content = [torch.ones(_SAMPLE, dtype=torch.uint8)]
    try:
        for _ in range(_REPEATS):
            place, written = tier.write(content)
            written.result()
            tier.read(place, content).result()
        times = tier.times()
    finally:
        tier.close()
    return OffloadSpeeds(_SAMPLE / times.write, _SAMPLE / times.read, flops)
