"""Forecast the moves between the tiers of a run's state, from its plan on ghosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridpar.errors import ConfigError, config_error
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.passes.residency import add_residency
from hybridpar.schedules.passes.rooms import Room
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

    @property
    def moved(self) -> int:
        """Mean bytes per step between the tiers."""
        return self.read + self.written

    def __str__(self) -> str:
        state, least, read, written = (
            f"{num_bytes / _MIB:,.1f}"
            for num_bytes in (self.state, self.least, self.read, self.written)
        )
        return (
            f"the state takes {state} MiB; {self.field} must be at least {least} MiB; a step reads "
            f"{read} MiB from the file, and writes {written}"
        )


@dataclass(frozen=True)
class SegmentForecast:
    """The costs of a number of segments (memory.parts) on one rank, in bytes.

    Attributes:
        parts: The number.
        moved: Read and written in a step; 0 if nothing moves.
        padding: Part of the state's items that holds nothing.
        least: Smallest limit or budget.
    """

    parts: int
    moved: int
    padding: int
    least: int

    def __str__(self) -> str:
        return (
            f"{self.parts} (moves {self.moved / _MIB:,.1f} MiB a step, pads "
            f"{self.padding / _MIB:,.1f}, needs {self.least / _MIB:,.1f})"
        )


def search_segments(job: JobPlan, rank: int = 0) -> list[SegmentForecast]:
    """Return forecasts of a rank on the grid for segments of one to four blocks, the best first:
    fewest bytes moved, then least padding. Numbers for which memory is too small are left out.
    """
    config = job.config
    blocks = max(map(len, job.split))
    found = []
    for parts in sorted({-(-blocks // size) for size in range(1, 5)}, reverse=True):
        one = JobPlan(replace(config, memory=replace(config.memory, parts=parts)))
        try:
            plan = _RankPlan.of(GhostRank.of(one, rank))
            tier = plan.forecast()
        except ConfigError:
            continue
        padding = plan.accesses.memory.padding
        found.append(SegmentForecast(parts, tier.moved, padding, tier.least))
    return sorted(found, key=lambda one: (one.moved, one.padding))


def segments_line(job: JobPlan, tiers: Sequence[TierForecast]) -> str:
    """Return a line on the best number of segments for the rank that moves most, or ""."""
    moved = [tier.moved for tier in tiers]
    if not any(moved):
        return ""
    parallel = job.config.parallel
    rank = moved.index(max(moved)) * parallel.num_ranks // parallel.pp
    found = search_segments(job, rank)
    best, *others = map(str, found)
    text = f"segments of a stage (memory.parts): best {best}"
    return "; then ".join([text, *others])


def forecasts(job: JobPlan) -> list[TierForecast]:
    """Return forecasts for the first replica's ranks, in order; empty if memory is not limited.

    Raises:
        ConfigError: memory.limit is too small for one of them; names what all of them need.
    """
    if not job.config.memory.is_limited:
        return []
    plans = _pipeline(job)
    _require(job.config.memory.limit, plans)
    return [plan.forecast() for plan in plans]


def require_limit(job: JobPlan) -> None:
    """Check that memory.limit, if it is set, is enough for the plans of all ranks.

    Raises:
        ConfigError: It is too small for one of them; names what all of them need.
    """
    if job.config.memory.limit:
        _require(job.config.memory.limit, _pipeline(job))


def _pipeline(job: JobPlan) -> list[_RankPlan]:
    """Return the plans of the first replica's ranks, in order."""
    return list(map(_RankPlan.of, GhostRank.pipeline(job)))


def _require(limit: int, plans: Sequence[_RankPlan]) -> None:
    least = max(plan.least for plan in plans)
    if 0 < limit < least:
        rule = f"too small: activations and the state that an action needs take {least} bytes"
        raise config_error("memory.limit", limit, rule, str(least))


def forecast(job: JobPlan, rank: int = 0) -> TierForecast:
    """Return the forecast for a rank's steady step. Nothing is allocated, moved or computed.

    Args:
        job: A job with memory.limit or memory.budget.
        rank: Rank on the grid.

    Raises:
        ConfigError: Memory is smaller than the least possible.
    """
    return _RankPlan.of(GhostRank.of(job, rank)).forecast()


@dataclass(frozen=True)
class _RankPlan:
    """The actions of a rank without moves between tiers, and the memory for its state."""

    accesses: AccessMap
    room: Room
    actions: Sequence[Action]

    @staticmethod
    def of(ghost: GhostRank) -> _RankPlan:
        """Return the plan of a rank. Raises: ConfigError if a budget is too small."""
        job = ghost.job
        room = ghost.room(job.shape)
        accesses = ghost.accesses(job.shape)
        accesses.require(room)
        num_batches = _BEGUN + _STEPS + _LEFT
        actions = ghost.actions(job.options, job.shape, num_batches)
        return _RankPlan(accesses, room, list(add_residency(actions, accesses.sharded_pools())))

    @cached_property
    def least(self) -> int:
        """The smallest limit or budget with which the actions run."""
        tiers = self.accesses.tiers(self.room)
        along = ((one, tiers.needed_bytes(tiers.accessed(one))) for one in self.actions)
        return self.room.least(self.accesses.least_budget(), along)

    def forecast(self) -> TierForecast:
        """Return the forecast. Raises: ConfigError if memory is smaller than the least possible."""
        counted = range(_BEGUN, _BEGUN + _STEPS)
        read, written = (
            total // _STEPS for total in moved(self.actions, self.accesses, self.room, counted)
        )
        return TierForecast(self.accesses.most_bytes, self.least, self.room.field, read, written)


def moved(
    actions: Iterable[Action], accesses: AccessMap, room: Room, batches: range
) -> tuple[int, int]:
    """Return the bytes read and written during the updates of these batches.

    The run starts with all state in the slow tier.
    """
    *pools, tiers = accesses.pools(room)
    fast = FastTiers([*pools, tiers])
    assert fast.store is not None
    marks = []
    for action in add_residency(actions, [tiers]):
        is_update = action.kind is Kind.UPDATE and action.part == 0
        if is_update and action.microbatch in (batches.start, batches.stop):
            marks.append((fast.store.fetched, fast.store.written))
        fault = fast.follow(action)
        assert not fault, fault
    (read_before, written_before), (read, written) = marks
    return read - read_before, written - written_before
