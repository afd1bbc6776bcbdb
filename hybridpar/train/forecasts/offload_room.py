"""Check whether hosts have room for activations offloaded from GPUs.

Pinned memory cannot be swapped out, and the system ends a run that takes too much of it. So the
need is predicted and compared with each host's memory before any of it is allocated.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hybridpar.comm import gather_objects
from hybridpar.config import Config
from hybridpar.cpu import host_room
from hybridpar.errors import Problem
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.predict import batches_to_peak, predict
from hybridpar.runtime.slow_tier import HostTier
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import INPUTS, Kind
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.passes.offload import most_away
from hybridpar.schedules.simulate.predict import largest
from hybridpar.train.faults.errors import SetupError

_CUDA = torch.device("cuda")


def with_away(config: Config, away: int | tuple[int, ...]) -> Config:
    """Return the configuration with these numbers of offloaded micro-batches: one, or by rank."""
    return replace(config, memory=replace(config.memory, offload_activations=away))


def everything(job: JobPlan) -> int:
    """Return an upper bound of the micro-batches that any rank can offload at once."""
    return job.shape.num_microbatches * job.shape.virtual_stages


def most_places(actions: Iterable[Action]) -> int:
    """Return the most slots of the slow tier that a rank's micro-batches occupy at once.

    OFFLOAD takes a slot. The slot is free when its RELOAD has completed, at the latest when the
    backward waits for it.
    """
    places = set[tuple[int, int]]()
    most = 0
    for action in actions:
        key = action.stage, action.microbatch
        if action.kind is Kind.OFFLOAD:
            places.add(key)
            most = max(most, len(places))
        elif action.kind in INPUTS:
            places.discard(key)
    return most


def host_bytes(job: JobPlan, rank: int, moved: int) -> int:
    """Return the most host memory that offloaded activations of a pipeline rank take, in bytes.

    moved: bytes of one micro-batch that are offloaded, on one stage.
    """
    actions = lower(
        job.schedule,
        job.shape,
        rank,
        job.options.sync_steps,
        batches_to_peak(job),
    )
    return most_places(actions) * HostTier.rounded(moved)


def reserved_bytes(job: JobPlan, rank: int) -> int:
    """Return the host memory that a pipeline rank reserves before training, in bytes."""
    (memory,) = predict(job, device=_CUDA, ranks=[rank])
    return host_bytes(job, rank, memory.moved)


@dataclass(frozen=True)
class _RankNeeds:
    """Memory that one rank needs of its host, in bytes.

    Attributes:
        rank: Rank of the pipeline.
        moved: Bytes of one micro-batch that are offloaded, on one stage.
        others: Host memory of the optimizer and of checkpoints.
        room: Memory that the host has left.
    """

    rank: int
    host: str
    moved: int
    others: int
    room: int


class OffloadRoom:
    """Limits the number of offloaded micro-batches to the memory of all hosts.

    Collectives: the constructor, on all ranks of the grid. All ranks then have the same answers.
    """

    def __init__(self, job: JobPlan, grid: ProcessGrid):
        self._job = job
        most = JobPlan(with_away(job.config, everything(job)))
        (memory,) = predict(most, device=_CUDA, ranks=[grid.pp.rank])
        needs = _RankNeeds(grid.pp.rank, platform.node(), memory.moved, memory.host, host_room())
        self._ranks: list[_RankNeeds] = gather_objects(needs, grid.world)

    def holds(self, away: int | tuple[int, ...]) -> bool:
        """Return whether every host has memory for this many micro-batches of its ranks."""
        job = JobPlan(with_away(self._job.config, away))
        needed = dict[str, int]()
        for one in self._ranks:
            needed[one.host] = (
                needed.get(one.host, 0) + one.others + host_bytes(job, one.rank, one.moved)
            )
        return all(needed[one.host] <= one.room for one in self._ranks)

    def most(self) -> tuple[int, ...]:
        """Return the largest numbers that the hosts have memory for, by rank.

        They are equal on all ranks, except where a rank's schedule limits it to fewer.
        """
        job = self._job
        bounds = [most_away(job.schedule, job.shape, rank) for rank in range(job.shape.num_ranks)]
        most = largest(self.holds, max(bounds))
        return tuple(min(most, each) for each in bounds)

    def require(self, away: Sequence[int] | int) -> None:
        """Raise SetupError on all ranks if a host lacks memory for this many micro-batches."""
        numbers = away if isinstance(away, int) else tuple(away)
        if not self.holds(numbers):
            most = list(self.most())
            raise SetupError(
                str(
                    Problem(
                        "memory.offload_activations",
                        list(numbers) if isinstance(numbers, tuple) else numbers,
                        "a host of this run has too little memory: activations offloaded from a "
                        "GPU wait in the host's pinned memory",
                        str(most if any(most) else 0),
                    )
                )
            )
