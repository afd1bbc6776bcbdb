"""Simulate the plan of a rank: its state consists of ghosts (sizes only), nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.job import JobPlan
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_state import GhostState
from hybridpar.prediction.predict import default_device, rooms_of
from hybridpar.schedules.action import Action
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.passes.residency import Pool, add_residency
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, make_schedule


class GhostRank(GhostState):
    """A rank of a job's grid, with the plan that its engine would have."""

    @staticmethod
    def of(job: JobPlan, rank: int) -> GhostRank:
        """Create a rank of the job by its number."""
        with Tracker(default_device(job.config)) as tracker:
            return GhostRank.build(job, rank, tracker)

    @staticmethod
    def pipeline(job: JobPlan) -> list[GhostRank]:
        """Create the ranks of the first pipeline, in order."""
        number = job.config.parallel.num_ranks
        pp = job.config.parallel.pp
        return [GhostRank.of(job, rank) for rank in range(0, number, number // pp)]

    @property
    def hosted(self) -> list[float]:
        """Number of parameters that its host updates, by group; empty without host optimizer."""
        return list(map(float, self.state.host.sizes))

    def pools(self, shape: PipelineShape) -> list[Pool]:
        """Return the items that it moves. At the start, all are in the slow tier, or sharded.

        Raises: ConfigError if memory is too small for any plan.
        """
        accesses = self.accesses(shape)
        room = self.room(shape)
        accesses.require(room)
        return accesses.pools(room)

    def room(self, shape: PipelineShape) -> Room:
        """Return the room of its state."""
        return rooms_of(self.job, self.rank, shape).training

    def actions(
        self, schedule_options: ScheduleOptions, shape: PipelineShape, num_batches: int
    ) -> Iterator[Action]:
        """Return its actions without moves, for a pipeline shape that may differ from the job's."""
        return lower(
            make_schedule(schedule_options.steady),
            shape,
            self.rank,
            0,
            num_batches,
            parts=self.state.division,
        )

    def moved(
        self, schedule_options: ScheduleOptions, shape: PipelineShape, num_batches: int
    ) -> Iterator[Action]:
        """Return its actions with moves. Raises: ConfigError."""
        actions = self.actions(schedule_options, shape, num_batches)
        return add_residency(actions, self.pools(shape))
