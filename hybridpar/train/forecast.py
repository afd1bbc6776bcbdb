"""What a run will move between the tiers of its state, before it starts: its own plan, on
ghosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from hybridpar.config import Config
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import Kind
from hybridpar.pipeline.plan.predict import Ordering
from hybridpar.pipeline.plan.residency import FastTier, add_residency
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.state.touches import Touches
from hybridpar.train.ghost_rank import GhostRank

_MIB = 2**20
_BEGUN = 4
_STEPS = 4
_LEFT = 4
"""Steps of the forecast: before it counts, that it counts, and that are known to follow."""


@dataclass(frozen=True)
class TierForecast:
    """The tiers of one rank. state: all that it keeps; least: the smallest budget. read, written:
    from and to the slow tier, in a step on average. Units: bytes."""

    state: int
    least: int
    read: int
    written: int

    def __str__(self) -> str:
        state, least, read, written = (f"{num_bytes / _MIB:,.1f}" for num_bytes in astuple(self))
        return (
            f"of {state} MiB of state, {least} have to be in memory; a step reads {read} from the "
            "file, and writes "
            f"{written}"
        )


def forecasts(config: Config) -> list[TierForecast]:
    """The tiers of the first replica's ranks, in the order of the pipeline; none without
    memory.budget."""
    ranks = range(0, config.parallel.num_ranks, config.parallel.num_ranks // config.parallel.pp)
    return [forecast(config, rank) for rank in ranks] if config.memory.budget else []


def forecast(config: Config, rank: int = 0) -> TierForecast:
    """The tiers of a rank of the configuration's grid, in a steady step. Nothing is taken, moved or
    computed.

    `config`: resolved, with memory.budget.
    Raises: ConfigError where the budget is smaller than the least.
    """
    ghost = GhostRank.of(config, rank)
    sizes = Sizes.of(config)
    touches = ghost.touches(sizes)
    touches.require(config.memory.budget)
    actions: Iterable[Action] = ghost.actions(Ordering.of(config), sizes, _BEGUN + _STEPS + _LEFT)
    if (shared := ghost.ghost.shared_items(sizes)) is not None:
        actions = shared.moved(actions)
    read, written = moved(actions, touches, config.memory.budget, range(_BEGUN, _BEGUN + _STEPS))
    return TierForecast(
        touches.most_bytes, touches.least_budget(), read // _STEPS, written // _STEPS
    )


def moved(
    actions: Iterable[Action], touches: Touches, budget: int, batches: range
) -> tuple[int, int]:
    """Bytes read and written from update to update of these batches, of a run that starts with all
    in the slow tier."""
    residency = touches.residency(budget)
    fast = FastTier(residency)
    read = 0
    written = 0
    counts = False
    for action in add_residency(actions, residency):
        if action.kind is Kind.UPDATE and action.part == 0:
            counts = action.microbatch in batches
        counted = counts and action.microbatch < len(touches.items)
        if counted and action.kind is Kind.FETCH:
            read += touches.num_bytes[action.microbatch]
        elif counted and action.kind is Kind.RELEASE and fast.is_changed(action.microbatch):
            written += touches.num_bytes[action.microbatch]
        fast.follow(action)
    return read, written
