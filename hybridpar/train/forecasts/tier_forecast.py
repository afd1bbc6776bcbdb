"""Forecast the moves between the tiers of a run's state, from its plan on ghosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.residency import FastTier, Room, Tide, add_residency, least_room
from hybridpar.state.residency.access_map import AccessMap
from hybridpar.train.forecasts.ghost_rank import GhostRank

_MIB = 2**20
_BEGUN = 4
_STEPS = 4
_LEFT = 4
"""Steps of the forecast: skipped at first, counted, and known to follow."""


@dataclass(frozen=True)
class TierForecast:
    """Forecast for the tiers of one rank, in bytes.

    Attributes:
        state: Size of the whole state.
        least: Smallest value of `field`.
        field: The setting that limits memory.
        read, written: Mean bytes per step from and to the slow tier.
    """

    state: int
    least: int
    field: str
    read: int
    written: int

    def __str__(self) -> str:
        state, least, read, written = (
            f"{num_bytes / _MIB:,.1f}"
            for num_bytes in (self.state, self.least, self.read, self.written)
        )
        return (
            f"the state takes {state} MiB; {self.field} must be at least {least} MiB; a step reads "
            f"{read} MiB from the file, and writes {written}"
        )


def forecasts(job: JobPlan) -> list[TierForecast]:
    """Return forecasts for the first replica's ranks, in order; empty if memory is not limited."""
    parallel = job.config.parallel
    ranks = range(0, parallel.num_ranks, parallel.num_ranks // parallel.pp)
    return [forecast(job, rank) for rank in ranks] if job.config.memory.is_limited else []


def forecast(job: JobPlan, rank: int = 0) -> TierForecast:
    """Return the forecast for a rank's steady step. Nothing is allocated, moved or computed.

    Args:
        job: A job with memory.limit or memory.budget.
        rank: Rank on the grid.

    Raises:
        ConfigError: Memory is smaller than the least possible.
    """
    ghost = GhostRank.of(job, rank)
    room = ghost.room(job.shape)
    accesses = ghost.accesses(job.shape)
    accesses.require(room)
    num_batches = _BEGUN + _STEPS + _LEFT
    actions: Iterable[Action] = ghost.actions(job.options, job.shape, num_batches)
    if (shared := ghost.ghost.shared_items(job.shape)) is not None:
        actions = shared.moved(actions)
    actions = list(actions)
    least = accesses.least_budget()
    if isinstance(room, Tide):
        least = least_room(actions, accesses.residency(room))
    read, written = moved(actions, accesses, room, range(_BEGUN, _BEGUN + _STEPS))
    return TierForecast(accesses.most_bytes, least, room.field, read // _STEPS, written // _STEPS)


def moved(
    actions: Iterable[Action], accesses: AccessMap, room: Room, batches: range
) -> tuple[int, int]:
    """Return the bytes read and written during the updates of these batches.

    The run starts with all state in the slow tier.
    """
    residency = accesses.residency(room)
    fast = FastTier(residency)
    read = 0
    written = 0
    counts = False
    for action in add_residency(actions, residency):
        if action.kind is Kind.UPDATE and action.part == 0:
            counts = action.microbatch in batches
        counted = counts and residency.moves(action)
        if counted and action.kind is Kind.FETCH:
            read += accesses.num_bytes[action.microbatch]
        elif counted and action.kind is Kind.RELEASE and fast.is_changed(action.microbatch):
            written += accesses.num_bytes[action.microbatch]
        fast.follow(action)
    return read, written
