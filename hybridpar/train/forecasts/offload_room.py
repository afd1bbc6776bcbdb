"""Host memory that activations of GPUs may take: what a run needs, and what the machines of its
ranks have.

Pinned memory cannot be swapped out, so a run that takes too much of it is ended by the system. What
it needs is therefore predicted, and compared with what there is, before any of it is taken.
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
from hybridpar.train.faults.errors import SetupError

_CUDA = torch.device("cuda")


def with_away(config: Config, away: int | tuple[int, ...]) -> Config:
    """Return the configuration with so many micro-batches away, on every rank or on each."""
    return replace(config, memory=replace(config.memory, offload_activations=away))


def everything(job: JobPlan) -> int:
    """Return a number of micro-batches that is at least what any rank can have away."""
    return job.shape.num_microbatches * job.shape.chunks


def most_places(actions: Iterable[Action]) -> int:
    """Return how many micro-batches of a rank's stages have a place in the slow tier at once, at
    most.

    A place is taken at OFFLOAD. It is free once the RELOAD is over, which at the latest the
    backward waits for.
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
    """Return how much of the host's memory the activations of a rank of the pipeline take, at most.
    Units: bytes.

    moved: what leaves of one micro-batch on one stage.
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
    """Return what a rank of the pipeline takes of its host before training. Units: bytes."""
    (memory,) = predict(job, device=_CUDA, ranks=[rank])
    return host_bytes(job, rank, memory.moved)


@dataclass(frozen=True)
class _RankNeeds:
    """What one rank needs of its host. Units: bytes.

    moved: what leaves of one micro-batch on one stage. others: host memory for the optimizer and
    for checkpoints. room: what the host has left.
    """

    rank: int
    host: str
    moved: int
    others: int
    room: int


class OffloadRoom:
    """The hosts of all ranks, and how many micro-batches may be away as far as their memory goes.

    Collectives: the constructor, on all ranks of the grid. All ranks then have the same answers.
    """

    def __init__(self, job: JobPlan, grid: ProcessGrid):
        self._job = job
        most = JobPlan(with_away(job.config, everything(job)))
        (memory,) = predict(most, device=_CUDA, ranks=[grid.pp.rank])
        needs = _RankNeeds(grid.pp.rank, platform.node(), memory.moved, memory.host, host_room())
        self._ranks: list[_RankNeeds] = gather_objects(needs, grid.world)

    def holds(self, away: int | tuple[int, ...]) -> bool:
        """Return whether every host has memory for so many micro-batches of its ranks."""
        job = JobPlan(with_away(self._job.config, away))
        needed = dict[str, int]()
        for one in self._ranks:
            needed[one.host] = (
                needed.get(one.host, 0) + one.others + host_bytes(job, one.rank, one.moved)
            )
        return all(needed[one.host] <= one.room for one in self._ranks)

    def most(self) -> tuple[int, ...]:
        """Return the largest numbers that the hosts have memory for, by rank: equal where more
        could be away."""
        job = self._job
        bounds = [most_away(job.schedule, job.shape, rank) for rank in range(job.shape.num_ranks)]
        least = 0
        bound = max(bounds)
        while least < bound:
            number = (least + bound + 1) // 2
            least, bound = (number, bound) if self.holds(number) else (least, number - 1)
        return tuple(min(least, each) for each in bounds)

    def require(self, away: Sequence[int] | int) -> None:
        """Raise SetupError on all ranks alike where a host has no memory for so many
        micro-batches."""
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
