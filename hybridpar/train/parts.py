"""The parts that a rank's stages are cut into, of which one is computed with at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridpar.config import Config
from hybridpar.nn.placement import split_ranges
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.parts import WHOLE, Division
from hybridpar.state import RankState


@dataclass(frozen=True)
class Parts:
    """The blocks of each part, by stage of the rank. They are counted through all its stages.

    part_major: all micro-batches of a batch go through a part before the next one. Not where the last part has a weight
    in common with the first, whose gradients would then be added up in another order. late: parts are updated as they
    are needed, so that what an update needs of the slow tier comes while others compute.
    """

    of_stage: Mapping[int, tuple[range, ...]]
    part_major: bool = False
    late: bool = False

    @staticmethod
    def of(config: Config, split: Mapping[int, range]) -> Parts:
        """The parts that a configuration asks for. split: the blocks of each stage of the rank."""
        memory, parallel = config.memory, config.parallel
        wanted = memory.parts or (config.model.num_blocks if memory.budget or memory.host_optimizer else 1)
        return Parts(
            {stage: tuple(range(blocks.start + a, blocks.start + b)
                          for a, b in split_ranges(len(blocks), min(wanted, len(blocks))))
             for stage, blocks in split.items()},
            part_major=(config.pipeline.schedule == "gpipe" and parallel.pp == 1
                        and not config.model.tie_embeddings),
            late=memory.budget > 0)

    @cached_property
    def is_divided(self) -> bool:
        """Whether any stage has several."""
        return any(len(parts) > 1 for parts in self.of_stage.values())

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The blocks of all parts in order; none where stages are whole."""
        return tuple(part for parts in self.of_stage.values() for part in parts) if self.is_divided else ()

    @cached_property
    def last(self) -> int:
        """Number of the part whose backwards come first."""
        return sum(map(len, self.of_stage.values())) - 1

    @cached_property
    def _first(self) -> dict[int, int]:
        ends, first = 0, {}
        for stage, parts in self.of_stage.items():
            first[stage], ends = ends, ends + len(parts)
        return first

    def number(self, action: Action) -> int:
        """Number of the part that an action computes with."""
        return self._first[action.stage] + action.part

    def division(self, state: RankState) -> Division:
        """How the plan of the rank is to be cut, whose state this is."""
        if not self.is_divided:
            return WHOLE
        norms = state.num_groups > 1 and not all(map(state.is_alone, range(1, state.num_parts)))
        return Division({stage: len(parts) for stage, parts in self.of_stage.items()},
                        lambda rank: state.num_groups, norms=norms, part_major=self.part_major, late=self.late)
