"""memory.offload_activations = "auto": how many micro-batches each rank can offload at no cost.

One trial offloads as many as possible on all ranks at once, so that copies are timed while all
ranks copy both ways over the links they share. On CPUs this is the only trial, and every run has
room for it.

On a GPU a second trial offloads none. Offloading excludes CUDA graphs, and makes the launch thread
wait for copies instead of running ahead. The difference of the two trials is the cost of that, rank
by rank.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch

from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.limit import limit_here
from hybridpar.prediction.predict import predict
from hybridpar.runtime.slow_tier import MoveTimes, in_host_memory
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.offload import most_away
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import free_to_leave, time_with_away
from hybridpar.train.autotuning.auto_schedule import of_first_rank
from hybridpar.train.autotuning.trial import Trial
from hybridpar.train.forecasts.offload_room import OffloadRoom, with_away
from hybridpar.train.reporting.costs_file import in_ms

TryOut = Callable[[Config, int], Trial]
"""Runs a configuration after a number of unmeasured batches. Collectives: on all ranks of the
grid."""
Away = tuple[int, ...]
"""Number of micro-batches that are offloaded at once, by pipeline rank."""


def find_numbers_for(
    job: JobPlan, grid: ProcessGrid, device: torch.device, try_out: TryOut
) -> tuple[Away, str]:
    """Return the numbers for "auto", and a line that reports them.

    Collectives: on all ranks of the grid.
    """
    shape = job.shape
    on_gpu = in_host_memory(device)
    bounds = tuple(most_away(job.schedule, shape, rank) for rank in range(shape.num_ranks))
    most = OffloadRoom(job, grid).most() if on_gpu and any(bounds) else bounds
    away = most
    if not any(bounds):
        why = "no rank has more than two in flight, and two stay"
    elif not any(most):
        why = "the hosts of this run have no memory for more"
    else:
        trial = try_out(with_away(job.config, most), 0)
        costs = _with_moves(trial.costs, _slowest(trial.moves, grid), in_file=not on_gpu)
        none_away = with_away(job.config, 0)
        fits = on_gpu and _fits(JobPlan(none_away), grid, device)
        # CUDA graphs are captured at second use, one for each of two weight buffers and each
        # position of a micro-batch; these batches capture all of them
        resident = try_out(none_away, 2 * shape.num_ranks + 2) if fits else None
        resident_costs = None if resident is None else resident.costs
        found = of_first_rank(
            partial(_choose, costs, resident_costs, shape, trial.schedule_options, most),
            grid.world,
        )
        away = found.away
        replays = any(gather_objects(resident is not None and resident.replays, grid.world))
        reasons = _reasons(found, bounds, most, fits=fits or not on_gpu, replays=replays)
        why = "; ".join(reasons)
    return away, f"memory.offload_activations: {list(away)}, by rank of a pipeline: {why}"


def require_room(job: JobPlan, grid: ProcessGrid, device: torch.device) -> None:
    """Raise SetupError on all ranks if a host lacks memory for the activations `job` offloads.

    Collectives: on all ranks of the grid.
    """
    numbers = job.config.memory.num_away
    if numbers != 0 and in_host_memory(device):
        OffloadRoom(job, grid).require(numbers)


def _slowest(mine: MoveTimes, grid: ProcessGrid) -> list[MoveTimes]:
    """Return the longest copy times over replicas, by pipeline rank.

    Collectives: on all ranks of the grid.
    """
    everyone = gather_objects((grid.pp.rank, mine), grid.world)
    found = []
    for rank in range(grid.pp.size):
        of_replicas = [astuple(moves) for place, moves in everyone if place == rank]
        found.append(MoveTimes(*map(max, zip(*of_replicas, strict=True))))
    return found


def _with_moves(costs: Costs, moves: Sequence[MoveTimes], *, in_file: bool) -> Costs:
    """Return the costs of a trial with its copies.

    If ranks and the threads that copy to a file exceed the cores, copying takes time of the ranks;
    the costs of OFFLOAD and RELOAD include it then.
    """
    calls = dict(costs.calls)
    if in_file and costs.cores is not None and costs.cores < 2 * len(moves):
        calls[Kind.OFFLOAD] = [one.write_work for one in moves]
        calls[Kind.RELOAD] = [one.read_work for one in moves]
    return replace(
        costs,
        calls=calls,
        offload=[one.write for one in moves],
        reload=[one.read for one in moves],
    )


@dataclass(frozen=True)
class _Found:
    """Result of the trials.

    Attributes:
        away: Numbers that cost no time.
        without_graphs: Numbers that cost no time if no rank uses CUDA graphs.
        step_time: Seconds per step with `away`.
        none_time: Seconds per step without offloading.
        most_time: Seconds per step with as much offloading as possible.
    """

    away: Away
    without_graphs: Away
    step_time: float
    none_time: float
    most_time: float


def _fits(job: JobPlan, grid: ProcessGrid, device: torch.device) -> bool:
    """Return whether the GPUs of all ranks have memory for this job, as predicted.

    Collectives: on all ranks of the grid.
    """
    (memory,) = predict(job, device=torch.device("cuda"), ranks=[grid.pp.rank])
    names = gather_objects(platform.node(), grid.world)
    here = memory.needed <= limit_here(device.type, names.count(platform.node()))
    return all(gather_objects(here, grid.world))


def _choose(
    costs: Costs,
    resident: Costs | None,
    shape: PipelineShape,
    schedule_options: ScheduleOptions,
    most: Away,
) -> _Found:
    def takes(away: Sequence[int]) -> float:
        return time_with_away(costs, shape, schedule_options, away, resident=resident)

    away = free_to_leave(costs, shape, schedule_options, resident=resident, at_most=most)
    without_graphs = away
    if resident is not None:
        without_graphs = free_to_leave(costs, shape, schedule_options, at_most=most)
    return _Found(away, without_graphs, takes(away), takes([0] * len(most)), takes(most))


def _reasons(found: _Found, bounds: Away, most: Away, *, fits: bool, replays: bool) -> list[str]:
    """Return the comparison as text, and the setting for users who need more memory."""
    said = [
        f"as many as may leave at no cost in time here: {in_ms(found.step_time)} a step by what "
        "its actions cost"
    ]
    if any(found.away):
        said[0] += f", {in_ms(found.none_time)} with none away"
    if found.away != most:
        said.append(f"with {list(most)} it would be {in_ms(found.most_time)}")
    if most != bounds:
        said.append(
            f"the hosts of this run have memory for {list(most)}, and {list(bounds)} could be away"
        )
    if not fits:
        said.append(
            "with none away this run is not predicted to fit its GPUs, so that was not tried"
        )
    if replays and any(found.away):
        said.append("ranks of which any leave run without CUDA graphs, which is in these times")
    elif replays and any(found.without_graphs):
        said.append(
            "CUDA graphs, which run where none leave, save more time than copies beside training; "
            "with "
            f"train.cuda_graphs = false {list(found.without_graphs)} would cost nothing more"
        )
    return said
