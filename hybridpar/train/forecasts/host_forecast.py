"""Forecast the cost of an optimizer on the host, with speeds measured here.

A step never waits for the host if (Source: the inequality that 2bw's slack sets)

    norm + max(update, copy to the host, copy from it) + a group of the others  <=  slack / m of the
    time of a batch

This requires a number of tokens per batch that hardly depends on the model's size. The norm is
left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.models.cost import training_flops_per_token
from hybridpar.nn.placement import Init, Placement
from hybridpar.ops.update import Weights
from hybridpar.optim import ParameterSlot, build_optimizer
from hybridpar.schedules.passes.segments import Division
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.hosts import HostEngines
from hybridpar.schedules.simulate.predict import exposed_on_host
from hybridpar.state.parameters import LOW_PRECISION
from hybridpar.train.forecasts.ghost_rank import GhostRank
from hybridpar.train.reporting.peak import peak_flops

_SAMPLE = 1 << 22
_REPEATS = 3


@dataclass(frozen=True)
class Speeds:
    """Speeds of one process.

    Attributes:
        parameters: Parameters that the host updates per second.
        num_bytes: Bytes copied per second.
        flops: FLOP/s of matrix products.
    """

    parameters: float
    num_bytes: float
    flops: float


@dataclass(frozen=True)
class HostForecast:
    """Forecast for the rank with the most parameters, and the effect of all hosts on a step.

    Attributes:
        parameters: Parameters of that rank.
        update_ms, to_host_ms, from_host_ms: Time per batch.
        step_ms: Time of a step in which matrix products take all the time.
        exposed_ms: Part of the step that waits for hosts.
        tokens: Tokens per batch and pipeline.
        needed_tokens: Tokens from which on nothing waits; 0: never, as the schedule has no slack.
    """

    parameters: int
    update_ms: float
    to_host_ms: float
    from_host_ms: float
    step_ms: float
    exposed_ms: float
    tokens: int
    needed_tokens: int

    def __str__(self) -> str:
        needed = "this schedule has no slack to hide it in"
        if self.needed_tokens:
            needed = (
                f"hidden from about {self.needed_tokens:,} tokens in a batch of a pipeline on, and "
                f"there are {self.tokens:,}"
            )
        return (
            f"the optimizer on the host: {self.parameters:,} parameters take {self.update_ms:,.1f} "
            "ms, their "
            f"gradients {self.to_host_ms:,.1f} ms to get there, the weights "
            f"{self.from_host_ms:,.1f} ms back; "
            f"{needed}.\n  Of a step of at least {self.step_ms:,.1f} ms, {self.exposed_ms:,.1f} ms "
            "are waiting "
            "for it (speeds measured here, in one process)"
        )


def forecast_host(job: JobPlan, speeds: Speeds | None = None) -> HostForecast | None:
    """Return the forecast, or None without memory.host_optimizer. speeds: default measured here."""
    config = job.config
    if not config.memory.host_optimizer:
        return None
    speeds = speeds or measure_speeds(config)
    shape = job.shape
    parallel = config.parallel
    ranks = GhostRank.pipeline(job)
    groups = [rank.hosted for rank in ranks]
    parts = _division(ranks)
    schedule = job.schedule
    weight_bytes = 2 if DTYPES[config.train.dtype] in LOW_PRECISION else 4
    totals = [sum(of_rank) for of_rank in groups]
    copied = [
        total * rank.state.weights.copies / speeds.num_bytes
        for total, rank in zip(totals, ranks, strict=True)
    ]
    update = [total / speeds.parameters for total in totals]
    there = [4 * each for each in copied]
    back = [weight_bytes * each for each in copied]
    m = shape.num_microbatches
    tokens = config.batch_tokens // parallel.dp_cp
    tokens_per_second = (
        speeds.flops * parallel.tp * parallel.pp / training_flops_per_token(config.model)
    )
    pair = tokens / tokens_per_second / m / shape.virtual_stages
    costs = Costs(
        pair / 3, pair * 2 / 3, to_host=there, host=update, from_host=back, host_shares=groups
    )
    step, exposed = exposed_on_host(job.options, shape, costs, parts)
    largest = totals.index(max(totals))
    host = HostEngines((there[largest], update[largest], back[largest]), groups[largest])
    slack = schedule.slack(shape)
    host.send(0.0)
    needed = 0
    if slack:
        needed = round(host.begin(0.0) * tokens_per_second * schedule.pairs(shape) / slack)
    return HostForecast(
        round(totals[largest]),
        1e3 * update[largest],
        1e3 * there[largest],
        1e3 * back[largest],
        1e3 * step,
        1e3 * exposed,
        tokens,
        needed,
    )


def _division(ranks: Sequence[GhostRank]) -> Division:
    """Return the segments of a pipeline's ranks, and the groups that they update."""
    parts = {
        stage: len(of_stage)
        for rank in ranks
        for stage, of_stage in rank.state.segments.of_stage.items()
    }
    return Division(parts, {rank: len(of_rank.hosted) for rank, of_rank in enumerate(ranks)})


def measure_speeds(config: Config) -> Speeds:
    """Measure this machine's speeds with torch's current threads; takes about a second."""
    flops, _ = peak_flops(config, torch.device("cpu"), Axis("world"))
    return Speeds(*host_speeds(config), flops)


def host_speeds(config: Config) -> tuple[float, float]:
    """Return parameters updated and bytes copied per second by a host with torch's threads."""
    dtype = DTYPES[config.train.dtype]
    master, gradient, target = (torch.zeros(_SAMPLE) for _ in range(3))
    working = (torch.zeros(_SAMPLE, dtype=dtype),) if dtype in LOW_PRECISION else ()
    slot = ParameterSlot("sample", Placement((_SAMPLE,), Init("zeros")))
    optimizer = build_optimizer(config.optim, [slot], Axis("tp"), config.kernels.optimizer)
    update = _seconds(
        lambda: optimizer.step(Weights([master], [master], working), [gradient], lr=1e-3)
    )
    copy = _seconds(lambda: target.copy_(gradient))
    return _SAMPLE / update, gradient.nbytes / copy


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of some calls, after one to warm up."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])
