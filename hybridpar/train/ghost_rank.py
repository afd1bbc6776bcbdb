"""The plan of a rank of a job that is not there: its own state on ghosts, and what it moves. Nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridpar.config import Config
from hybridpar.memory.ghost import Tracker
from hybridpar.memory.ghost_chunks import GhostChunks
from hybridpar.memory.predict import default_device
from hybridpar.memory.silent import silent_grid
from hybridpar.models.build import build_blocks
from hybridpar.models.cost import stage_split
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.copies import SharedItems
from hybridpar.pipeline.plan.parts import Division
from hybridpar.pipeline.plan.passes import lower
from hybridpar.pipeline.plan.predict import Ordering
from hybridpar.pipeline.plan.residency import Residency, add_residency
from hybridpar.pipeline.plan.schedules import Sizes, schedule_of
from hybridpar.pipeline.run.codecs import with_coded_sums
from hybridpar.pipeline.run.stage import Stage
from hybridpar.state import RankState, StatePolicy
from hybridpar.state.tiered import ItemMemory
from hybridpar.train.parts import Parts
from hybridpar.train.policy import BatchPolicy
from hybridpar.train.replicas import SharedChunks
from hybridpar.train.touches import Touches


@dataclass(frozen=True)
class GhostRank:
    """A rank of a configuration's grid, as the engine would have it. stages: those that it holds."""

    config: Config
    rank: int
    parts: Parts
    state: RankState
    memory: ItemMemory | GhostChunks | None

    @staticmethod
    def of(config: Config, rank: int) -> GhostRank:
        """A rank of the job, by its number. `config`: resolved."""
        with Tracker(default_device(config)) as tracker:
            grid, sizes, schedule = silent_grid(config, rank), Sizes.of(config), schedule_of(config.pipeline)
            split = stage_split(config.model, grid.pp.size, config.pipeline.split, sizes.chunks,
                                config.pipeline.placement)
            held = sizes.stages_of(grid.pp.rank)
            policy = StatePolicy.of(
                config, BatchPolicy(config).num_versions(grid.pp.rank), schedule.num_gradient_buffers)
            whole = GhostChunks(tracker.device, policy) if policy.splits_gradients else None
            memory = ItemMemory(tracker.device, whole) if config.memory.budget else whole
            stage = Stage(with_coded_sums(build_blocks(
                config.model, grid.tp, [number for one in held for number in split[one]], kernels=config.kernels,
                sequence=config.parallel.sequence, dtype=policy.dtype), config))
            parts = Parts.of(config, {one: split[one] for one in held})
            return GhostRank(config, grid.pp.rank, parts, RankState(
                stage, grid, policy, tracker.device, parts=parts.ranges, memory=memory), memory)

    @staticmethod
    def pipeline(config: Config) -> list[GhostRank]:
        """The ranks of the first pipeline, in its order."""
        number, pp = config.parallel.num_ranks, config.parallel.pp
        return [GhostRank.of(config, rank) for rank in range(0, number, number // pp)]

    @property
    def division(self) -> Division:
        """How its plan is cut into parts."""
        return self.parts.division(self.state)

    @property
    def hosted(self) -> list[float]:
        """Number of parameters that its host updates, by group; none where there is no host."""
        return [] if self.state.host is None else list(map(float, self.state.host.sizes))

    def touches(self, sizes: Sizes) -> Touches:
        """What its actions touch of the items of its state; it has a budget."""
        assert isinstance(self.memory, ItemMemory)
        return Touches(self.memory, self.state, self.parts, sizes, norms=self.division.norms)

    def residency(self, sizes: Sizes) -> Residency | SharedItems | None:
        """What it moves, from a start at which all is in the slow tier, or in shares; None: it moves nothing.

        Raises: ConfigError where the budget is too small for any plan.
        """
        touches, budget = None, self.config.memory.budget
        if isinstance(self.memory, ItemMemory):
            touches = self.touches(sizes)
            touches.require(budget)
        own = None if touches is None else touches.residency(budget)
        items = self.shared(sizes, touches)
        return own if items is None else replace(items, state=own)

    def shared(self, sizes: Sizes, touches: Touches | None = None) -> SharedItems | None:
        """What it shares with replicas. touches: of the items of its state, where it has a budget."""
        whole = self.memory.whole if isinstance(self.memory, ItemMemory) else self.memory
        return None if whole is None else SharedChunks(whole, self.state, self.parts, sizes, touches=touches).items

    def actions(self, ordering: Ordering, sizes: Sizes, num_batches: int) -> Iterator[Action]:
        """Its list for so many batches, without what it moves. `sizes`: their micro-batches may be fewer or more."""
        return lower(ordering.make(), sizes, self.rank, 0, num_batches, **ordering.options, parts=self.division)

    def moved(self, ordering: Ordering, sizes: Sizes, num_batches: int) -> Iterator[Action]:
        """Its list with what it moves. Raises: ConfigError."""
        actions, items = self.actions(ordering, sizes, num_batches), self.residency(sizes)
        if isinstance(items, SharedItems):
            return items.moved(actions)
        return actions if items is None else add_residency(actions, items)
