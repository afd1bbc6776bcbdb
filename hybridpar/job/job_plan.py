"""Everything that follows from a configuration, derived here and nowhere else.

    Config --> JobPlan --> engine, checkpoints, memory prediction, planner, simulation, verify,
    check

A function that needs a pipeline shape, the blocks of a stage, a schedule or a state policy takes a
`JobPlan`, or one of its properties. A test counts the derivations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hybridpar.config import Config
from hybridpar.job.stage_split import stage_split
from hybridpar.models.build import Recomputation, recomputed_blocks
from hybridpar.models.cost import block_placements, may_be_frozen
from hybridpar.schedules.passes.offload import num_away
from hybridpar.schedules.proof.check import CheckReport
from hybridpar.schedules.proof.prove import prove, send_window
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, schedule_of
from hybridpar.state.policy import StatePolicy
from hybridpar.state.residency.segments import Segments


@dataclass(frozen=True)
class JobPlan:
    """A configuration (resolved: parallel.dp is known) and what follows from it.

    Creating one costs nothing: each property is derived when it is first read, and then kept. A
    property raises ConfigError if the configuration's settings do not fit together.
    """

    config: Config

    @cached_property
    def shape(self) -> PipelineShape:
        """Ranks, stages and micro-batches of the pipeline, and which rank has which stage."""
        shape = PipelineShape.of(self.config)
        return replace(shape, num_frozen=self._num_frozen)

    @cached_property
    def _num_frozen(self) -> int:
        """The number of stages before the first one that trains a parameter."""
        config = self.config
        if config.parallel.pp == 1 or not may_be_frozen(config.model, config.optim.groups):
            return 0
        blocks = block_placements(config.model, config.optim.groups)
        for stage, numbers in enumerate(self.split):
            if any(placement.trainable for number in numbers for placement in blocks[number]):
                return stage
        return 0

    @cached_property
    def split(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        return stage_split(self.config)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; an early switch of "auto" counts as off until it is measured."""
        return schedule_of(self.config)

    @property
    def options(self) -> ScheduleOptions:
        """The schedule's options."""
        return self.schedule.options

    @cached_property
    def recomputed(self) -> tuple[Recomputation, ...]:
        """The blocks of each stage that its backward recomputes."""
        return recomputed_blocks(self.config.pipeline.recompute, self.config.model, self.split)

    @cached_property
    def send_window(self) -> int:
        """Number of sends of a rank that may be unfinished.

        The executor waits for its oldest send when it has more, and the memory prediction counts as
        many.

        Raises:
            PlanError: The plan cannot run with any number.
        """
        return send_window(self.schedule, self.shape)

    def prove(self) -> list[CheckReport]:
        """Prove that the plan of a run of any number of steps is right.

        Raises:
            PlanError: It is not.
        """
        return prove(self.schedule, self.shape)

    def held(self, rank: int) -> dict[int, range]:
        """Return the blocks of each stage that a rank of the pipeline holds."""
        return {stage: self.split[stage] for stage in self.shape.stages_of(rank)}

    def segments(self, rank: int) -> Segments:
        """Return the segments that the stages of a rank of the pipeline are cut into."""
        return Segments.of(self.config, self.held(rank))

    def num_versions(self, rank: int) -> int:
        """Return the number of weight versions that a rank of the pipeline keeps at once."""
        return self.schedule.max_live_versions(self.shape, rank)

    def num_away(self, rank: int) -> int:
        """Return how many micro-batches of a rank of the pipeline have their activations offloaded
        at once."""
        return num_away(self.schedule, self.shape, rank)

    def state_policy(self, num_versions: int, num_gradient_buffers: int) -> StatePolicy:
        """Return which state a rank keeps, given its number of weight versions and gradient
        buffers.
        """
        return StatePolicy(self.config, num_versions, num_gradient_buffers)
