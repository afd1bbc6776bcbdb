"""The plan of a rank of a job that is not there: its own state on ghosts, and what it moves.
Nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridpar.grid import place_of, sizes_of
from hybridpar.job import JobPlan
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_state import GhostState
from hybridpar.prediction.predict import default_device
from hybridpar.schedules.action import Action
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.passes.residency import Residency, add_residency
from hybridpar.schedules.passes.shared_items import SharedItems
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule
from hybridpar.state.residency.access_map import AccessMap


@dataclass(frozen=True)
class GhostRank:
    """A rank of a job's grid, as the engine would have it. rank: of the pipeline."""

    job: JobPlan
    rank: int
    ghost: GhostState

    @staticmethod
    def of(job: JobPlan, rank: int) -> GhostRank:
        """A rank of the job, by its number."""
        with Tracker(default_device(job.config)) as tracker:
            place = place_of(rank, sizes_of(job.config.parallel))["pp"]
            policy = job.state_policy(job.num_versions(place), job.schedule.num_gradient_buffers)
            return GhostRank(job, place, GhostState.of(job, rank, policy, tracker))

    @staticmethod
    def pipeline(job: JobPlan) -> list[GhostRank]:
        """The ranks of the first pipeline, in its order."""
        number = job.config.parallel.num_ranks
        pp = job.config.parallel.pp
        return [GhostRank.of(job, rank) for rank in range(0, number, number // pp)]

    @property
    def hosted(self) -> list[float]:
        """Number of parameters that its host updates, by group; none where there is no host."""
        return [] if (host := self.ghost.state.host) is None else list(map(float, host.sizes))

    def touches(self, sizes: PipelineShape) -> AccessMap:
        """What its actions touch of the items of its state; it has a budget."""
        touches = self.ghost.touches(sizes)
        assert touches is not None
        return touches

    def residency(self, sizes: PipelineShape) -> Residency | SharedItems | None:
        """What it moves, from a start at which all is in the slow tier, or in shares; None: it
        moves nothing.

        Raises: ConfigError where the budget is too small for any plan.
        """
        tiers = None
        budget = self.job.config.memory.budget
        if budget:
            touches = self.touches(sizes)
            touches.require(budget)
            tiers = touches.residency(budget)
        return self.ghost.shared_items(sizes, budget) or tiers

    def actions(
        self, ordering: ScheduleOptions, sizes: PipelineShape, num_batches: int
    ) -> Iterator[Action]:
        """Its list for so many batches, without what it moves. `sizes`: their micro-batches may be
        fewer or more."""
        return lower(
            make_schedule(ordering.steady),
            sizes,
            self.rank,
            0,
            num_batches,
            parts=self.ghost.division,
        )

    def moved(
        self, ordering: ScheduleOptions, sizes: PipelineShape, num_batches: int
    ) -> Iterator[Action]:
        """Its list with what it moves. Raises: ConfigError."""
        actions = self.actions(ordering, sizes, num_batches)
        items = self.residency(sizes)
        if isinstance(items, SharedItems):
            return items.moved(actions)
        return actions if items is None else add_residency(actions, items)
