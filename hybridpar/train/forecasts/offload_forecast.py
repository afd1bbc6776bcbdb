"""What activations that leave will save and cost a run, before it starts: its plan, with speeds
that are measured here.

The time of products is that of the fastest ones, and copies have cores of their own. What a run
measures, when it starts, may be more or, where cores are few, less.
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
from hybridpar.train.forecasts.preview import stage_costs
from hybridpar.train.reporting.peak import peak_flops

_MIB = 2**20
_SAMPLE = 16 * _MIB
_REPEATS = 3


@dataclass(frozen=True)
class OffloadForecast:
    """By rank of the pipeline. away: micro-batches that are away at once; moved: bytes of one of
    them, on a stage; saved: bytes of the peak. step_ms: of a step whose products take all of it;
    exposed_ms: what of it is waiting for the file. given: the numbers are the configuration's, and
    not found here. Units: bytes, milliseconds."""

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
        found = (
            ""
            if self.given
            else ", as many as should cost no time; the run measures it when it starts"
        )
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
    """Of one process. write, read: bytes a second to the file and from it; flops: FLOP/s of
    products."""

    write: float
    read: float
    flops: float


def forecast_offload(job: JobPlan, speeds: OffloadSpeeds | None = None) -> OffloadForecast | None:
    """The forecast for a job; None where no activations are to leave.

    speeds: None, measured here. Raises: HybridparError where the file has no room.
    """
    config = job.config
    given = config.memory.offload_activations
    if not given:
        return None
    sizes = job.shape
    speeds = speeds or measure_speeds(config)
    moved = [stage.moved for stage in predict(_with(config, sizes.num_microbatches * sizes.chunks))]
    counted = stage_costs(job)
    tokens = config.train.micro_batch_size * config.model.tokens_per_sample
    forward, backward = (
        expand(cost, sizes.num_stages) for cost in (counted.forward, counted.backward)
    )
    seconds = tokens * training_flops_per_token(config.model) / speeds.flops / config.parallel.tp
    unit = seconds / (3 * sum(forward))
    costs = Costs(
        [unit * one for one in forward],
        [unit * one for one in backward],
        offload=[one / speeds.write for one in moved],
        reload=[one / speeds.read for one in moved],
    )
    ordering = replace(job.options, host=0.0)
    away = (
        free_to_leave(costs, sizes, ordering)
        if given == "auto"
        else tuple(map(job.num_away, range(sizes.num_ranks)))
    )
    after, plain = (predict(_with(config, number)) for number in (away, 0))
    step, alone = (
        predict_timeline(replace(ordering, offload=number), sizes, costs).step_time(
            sizes.num_microbatches
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


def _with(config: Config, away: int | tuple[int, ...]) -> JobPlan:
    return JobPlan(replace(config, memory=replace(config.memory, offload_activations=away)))


def measure_speeds(config: Config) -> OffloadSpeeds:
    """Takes a second. Speeds of this machine, with the threads that torch has here."""
    flops, _ = peak_flops(config, torch.device("cpu"), Axis("world"))
    tier = FileTier(folder_to_measure(config))
    content = [torch.ones(_SAMPLE, dtype=torch.uint8)]
    try:
        for _ in range(_REPEATS):
            place, written = tier.write(content)
            written.result()
            tier.read(place, content).result()
        write, read = tier.seconds_per_move()
    finally:
        tier.close()
    return OffloadSpeeds(_SAMPLE / write, _SAMPLE / read, flops)
