"""Cost of moving a rank's state: sharded over replicas (ZeRO-2 and 3), on a host, or in a file.

ZeRO-2 and 3    FETCH gathers the weights of a segment, RELEASE reduces its gradients, at the
                measured speed of the link between replicas; the rank's time that they take from
                computing is measured, too (overlap_bench.py)
host            gradients go to the host, which updates, and weights come back, at speeds of
                the profile; on CPUs, on the ranks' cores
budget          FETCH and RELEASE read and write the file, at speeds of the profile; the time
                that they take from computing counts for the rank if ranks and transfers are
                more than the cores
activations     like the file of a budget

The simulated plan contains all transfers that a run would make, from its state on ghosts.

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

from hybridpar.config import Config
from hybridpar.errors import ConfigError, Problem
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.planner.machines.machine import Machine
from hybridpar.prediction import predict
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.passes.residency import Away
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.copy_engines import MIB
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.train.forecasts.ghost_rank import GhostRank

_SETTLING = 3
_COUNTED = 3
_AHEAD = 4
"""Number of batches to simulate: these before the batches that count, and as many as the transfers
of a budget look ahead."""
_GRADIENT_BYTES = 4
_GIB = 2**30
HOSTED = ("adamw", "sgd", "own")
"""Optimizers that update each element separately. For other optimizers the time of a segment is
unknown."""


class UnknownCosts(ConfigError):
    """A setting whose transfers have no known cost on a machine."""


class Moves:
    """The state transfers of a job, and their costs on a machine."""

    def __init__(self, job: JobPlan, machine: Machine):
        config = job.config
        self.job = job
        self.config = config
        self.machine = machine
        if wrong := next(_without_costs(config, machine), None):
            raise UnknownCosts(wrong)
        self._plans: dict[tuple[ScheduleOptions, PipelineShape], dict[int, tuple[Action, ...]]] = {}

    @staticmethod
    def of(job: JobPlan, machine: Machine) -> Moves | None:
        """Return the transfers of a job, or None if no state moves.

        Raises:
            UnknownCosts: The cost of a transfer is unknown.
        """
        memory = job.config.memory
        if job.config.state_moves or memory.host_optimizer or memory.is_limited:
            return Moves(job, machine)
        return None

    @property
    def what(self) -> str:
        """The resource that ranks wait for if the transfer is not hidden, in words."""
        memory = self.config.memory
        if memory.host_optimizer:
            return "the optimizer on the host"
        if memory.is_limited:
            return "the file of the state"
        return "weights and gradients of other replicas"

    @cached_property
    def ghosts(self) -> list[GhostRank]:
        """The ranks of a pipeline."""
        device = self.machine.device.type
        train = replace(self.config.train, device=device)  # type: ignore[arg-type]
        return GhostRank.pipeline(JobPlan(replace(self.config, train=train)))

    def added_to(self, costs: Costs, replicas: Sequence[Sequence[int]], rings: int) -> Costs:
        """Return the costs of the plan's actions, including the transfers.

        Args:
            costs: Costs without transfers.
            replicas: Ranks of the replicas of each pipeline rank.
            rings: Number of replica groups that use a link at the same time.
        """
        memory = self.config.memory
        speeds = self.machine.profile.state
        shared = self._collectives(costs, replicas, rings) if self.config.state_moves else None
        if memory.host_optimizer:
            shares = [ghost.hosted for ghost in self.ghosts]
            working = DTYPES[self.config.train.dtype].itemsize
            numbers = [sum(groups) for groups in shares]
            copied = [
                n * ghost.state.weights.copies
                for n, ghost in zip(numbers, self.ghosts, strict=True)
            ]
            costs = replace(
                costs,
                to_host=[_GRADIENT_BYTES * n / speeds.copied for n in copied],
                host=[n / speeds.updated for n in numbers],
                from_host=[working * n / speeds.copied for n in copied],
                host_shares=shares,
                host_works=True,
                shared=shared,
            )
        if memory.is_limited:
            whole = MIB / speeds.read, MIB / speeds.written
            if self._share_cores(
                costs
            ):  # if the rank's share of a time is unknown, all of it counts for the rank
                work = [
                    time if seconds is None else seconds / 1024
                    for time, seconds in zip(
                        whole, (speeds.read_work, speeds.written_work), strict=True
                    )
                ]
            else:
                work = [0.0, 0.0]
            fetch, release = (max(0.0, time - used) for time, used in zip(whole, work, strict=True))
            calls = {**costs.calls, **dict(zip((Kind.FETCH, Kind.RELEASE), work, strict=True))}
            return replace(costs, calls=calls, fetch=fetch, release=release, shared=shared)
        if memory.host_optimizer:
            return costs
        assert shared is not None
        return shared

    def _collectives(self, costs: Costs, replicas: Sequence[Sequence[int]], rings: int) -> Costs:
        """Return the costs with collectives as transfers; arguments as for `added_to`."""
        gathers, sums = (
            [self._collective(away, r, ranks, rings) for r, ranks in enumerate(replicas)]
            for away in (Away.GATHERED, Away.REDUCED)
        )
        calls = {
            **costs.calls,
            Kind.FETCH: [work for _, work in gathers],
            Kind.RELEASE: [work for _, work in sums],
        }
        return replace(
            costs,
            calls=calls,
            fetch=[max(0.0, seconds - work) for seconds, work in gathers],
            release=[max(0.0, seconds - work) for seconds, work in sums],
        )

    def _share_cores(self, costs: Costs) -> bool:
        return costs.cores is not None and costs.cores < 2 * len(self.ghosts)

    def _collective(
        self, away: Away, rank: int, replicas: Sequence[int], rings: int
    ) -> tuple[float, float]:
        """Return the seconds of a MiB in items of the usual size, and the part that the rank cannot
        overlap."""
        sizes = [
            pool.num_bytes[item]
            for pool in self.ghosts[rank].accesses(self.job.shape).sharded_pools()
            for item in pool.items
            if pool.away is away
        ]
        if not sizes:
            return 0.0, 0.0
        op = "gather" if away is Away.GATHERED else "scatter"
        seconds, work = self.machine.half_ring(op, usual := fmean(sizes), replicas, rings)
        hardware = self.machine.profile.hardware
        speeds = self.machine.profile.state
        measured = hardware.devices_per_host * hardware.hosts
        number = len(replicas)
        beside = ((speeds.gathered_work if op == "gather" else speeds.summed_work) or 0.0) / 1024
        if measured > 1:  # a rank receives the shards of all other ranks
            beside *= (1 - 1 / number) / (1 - 1 / measured)
        return seconds * MIB / usual, max(min(work, seconds) * MIB / usual, beside)

    def step_time(
        self, schedule_options: ScheduleOptions, shape: PipelineShape, costs: Costs
    ) -> float:
        """Return the simulated time of a batch in the steady state."""
        number = _SETTLING + _COUNTED + (_AHEAD if self.config.memory.is_limited else 1)
        ranks = self.ghosts
        if (schedule_options, shape) not in self._plans:
            self._plans[schedule_options, shape] = {
                r: tuple(ghost.moved(schedule_options, shape, number))
                for r, ghost in enumerate(ranks)
            }
        pools = {r: ghost.pools(shape) for r, ghost in enumerate(ranks)}
        timeline = simulate(self._plans[schedule_options, shape], costs, pools)
        starts = timeline.batch_starts(shape.num_microbatches)
        return (starts[_SETTLING + _COUNTED] - starts[_SETTLING]) / _COUNTED


def with_activations(costs: Costs, job: JobPlan, machine: Machine) -> Costs:
    """Return the costs including activations in a file, which is as fast as the file of a budget.

    Returns the costs unchanged if no activations are offloaded or no speeds are known.
    """
    speeds = machine.profile.state
    if not job.config.memory.num_away or not (speeds.read and speeds.written):
        return costs
    moved = [stage.moved for stage in predict(job, device=machine.device)]
    times = [[size / speed for size in moved] for speed in (speeds.written, speeds.read)]
    work = [[0.0] * len(moved)] * 2
    if costs.cores is not None and costs.cores < 2 * len(moved):
        work = [
            time if per_gib is None else [per_gib * size / _GIB for size in moved]
            for time, per_gib in zip(times, (speeds.written_work, speeds.read_work), strict=True)
        ]
    offload, reload = (
        [max(0.0, t - w) for t, w in zip(*both, strict=True)]
        for both in zip(times, work, strict=True)
    )
    calls = {**costs.calls, Kind.OFFLOAD: work[0], Kind.RELOAD: work[1]}
    return replace(costs, calls=calls, offload=offload, reload=reload)


def _without_costs(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yield the settings whose transfers have no known cost on a machine."""
    memory = config.memory
    speeds = machine.profile.state
    again = "measure this machine with hybridpar profile"
    limit, most = memory.limiting
    moved = {"memory.host_optimizer": memory.host_optimizer, limit: memory.is_limited}
    values = {"memory.host_optimizer": ("true", "false"), limit: (most, "0")}
    if machine.device.type != "cpu":
        for field in (field for field, is_set in moved.items() if is_set):
            yield Problem(
                field,
                values[field][0],
                f"has known costs on CPUs only; this machine has {machine.device.type}",
                values[field][1],
            )
    if memory.host_optimizer and config.optim.name not in HOSTED:
        yield Problem(
            "optim.name",
            config.optim.name,
            f"has no estimated costs with memory.host_optimizer; {', '.join(HOSTED)} have",
            HOSTED[0],
        )
    if memory.host_optimizer and not (speeds.updated and speeds.copied):
        yield Problem("memory.host_optimizer", "true", "has no costs in this profile", again)
    if memory.is_limited and not (speeds.read and speeds.written):
        yield Problem(limit, most, "has no costs in this profile", again)
