"""A rank's state on ghosts, built as the engine builds it: its bytes, its items, and the memory of
an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_chunks import ghost_memory
from hybridpar.runtime.stage import Stage, build_held_blocks
from hybridpar.schedules.passes.residency import Pool
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.passes.segments import WHOLE, Division
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.state import RankState
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.state.residency.shares import ShardedMemory

_Ghost = TypeVar("_Ghost", bound="GhostState")


@dataclass(frozen=True)
class GhostState:
    """The state of a rank of a job's grid."""

    job: JobPlan
    state: RankState
    memory: ShardedMemory

    @classmethod
    def build(cls: type[_Ghost], job: JobPlan, rank: int, tracker: Tracker) -> _Ghost:
        """Build the state of rank `rank` of the grid. `tracker` must be active."""
        config = job.config
        grid = silent_grid(config, rank)
        place = grid.pp.rank
        policy = job.state_policy(job.num_versions(place), job.schedule.num_gradient_buffers)
        memory = ghost_memory(policy, tracker.device)
        segments = job.segments(place)
        stage = Stage(build_held_blocks(policy, grid, segments))
        state = RankState(stage, grid, policy, memory, segments=segments)
        return cls(job, state, memory)

    @property
    def rank(self) -> int:
        """The rank of the pipeline."""
        return self.state.grid.pp.rank

    def accesses(self, shape: PipelineShape) -> AccessMap:
        """Return which items of the state each action accesses."""
        return AccessMap(self.memory, self.state, shape)


@dataclass(frozen=True)
class StateFootprint:
    """Bytes that a rank's state always takes, and the peaks of a norm and of an update, by segment.

    Args:
        hosting: Peak of the host's step of a segment, if the host updates state in place.
        division: Division of the rank's plan into segments.
        pools: Items that are sharded over replicas, and then also the tiers if their room is constant.
        whole: Upper bound of the bytes of chunks that are unsharded at once.
        hosted: Bytes of master weights and optimizer state that a host optimizer keeps on the host.

    Units: bytes.
    """

    weights: int
    master: int
    gradients: int
    optimizer: int
    norm: int
    updates: tuple[int, ...]
    division: Division = WHOLE
    pools: Sequence[Pool] = ()
    whole: int = 0
    hosted: tuple[int, int] = (0, 0)
    hosting: int = 0


def trace_state(
    job: JobPlan, rank: int, shape: PipelineShape, device: torch.device, room: Room
) -> StateFootprint:
    """Build the state of rank `rank`, run an update, and return its footprint, without allocating
    or computing anything.

    Args:
        job: The job.
        rank: The first replica of a pipeline rank. The replica with the most state counts.
        shape: The shape of the pipeline.
        device: The device, whose type this machine need not have.
        room: The room of the state.
    """
    dp_cp = job.config.parallel.dp_cp
    tp = job.config.parallel.tp
    with Tracker(device) as tracker:
        ghost = GhostState.build(job, rank, tracker)
        most = ghost.state.partition.most_whole(range(rank, rank + dp_cp * tp, tp))
        if most != rank:
            ghost = GhostState.build(job, most, tracker)
        state = ghost.state
        state.allocate()
        state.begin(0)

        def taken(start: int) -> int:
            return tracker.read().peak - start

        def now() -> int:
            tracker.restart_peak()
            return tracker.read().current

        start = now()
        state.square_norm(0)
        norm = taken(start)
        updates = []
        hosting = 0
        state.host.work_here(True)
        for group in range(state.num_groups):
            if state.host.num_groups and not state.weights.copies:
                start = now()
                state.begin_update(0, lr=1.0, factor=0.5, group=group)
                hosting = max(hosting, taken(start))
            start = now()
            state.update(0, lr=1.0, factor=0.5, group=group)
            updates.append(taken(start))
        accesses = ghost.accesses(shape)
        return StateFootprint(
            **state.num_bytes(),
            norm=norm,
            updates=tuple(updates),
            division=state.division,
            pools=_walked_pools(accesses, room),
            whole=accesses.unsharded_bytes,
            hosted=state.host.held(),
            hosting=hosting,
        )


def _walked_pools(accesses: AccessMap, room: Room) -> list[Pool]:
    """Return the pools whose moves the walk of a rank's memory follows. A room that is not constant
    is itself found by that walk.
    """
    sharded = accesses.sharded_pools()
    has_room = room.is_constant and room.can_hold(accesses.least_budget())
    return accesses.pools(room) if sharded and has_room else sharded
