"""The segments that a rank's stages are cut into. One segment computes at a time.

Segments also cut the messages in which gradients are reduced, and with ZeRO-1 they decide who owns
what. So runs on three or more replicas have equal bits only with equal segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridpar.config import Config
from hybridpar.schedules.action import Action
from hybridpar.state.policy import cut_into_parts


@dataclass(frozen=True)
class Segments:
    """The blocks of each segment, by stage of the rank. Segments are numbered through all stages.

    Attributes:
        of_stage: Blocks of each segment, by stage.
        part_major: All micro-batches of a batch go through a segment before the next one. Not if
            the last segment shares a weight with the first: its gradients would then be added in
            another order.
        late: Segments are updated when they are needed, so that their state is loaded from the slow
            tier while others compute.
        is_divided: Stages are cut, even if into only one segment.
    """

    of_stage: Mapping[int, tuple[range, ...]]
    part_major: bool = False
    late: bool = False
    is_divided: bool = False

    @staticmethod
    def of(config: Config, split: Mapping[int, range]) -> Segments:
        """Create the configured segments. split: the blocks of each stage of the rank."""
        found = {
            stage: cut_into_parts(config, blocks) or (blocks,) for stage, blocks in split.items()
        }
        return Segments(
            found,
            late=config.memory.is_limited,
            part_major=(
                config.pipeline.schedule == "gpipe"
                and config.parallel.pp == 1
                and not config.model.tie_embeddings
            ),
            is_divided=any(len(parts) > 1 for parts in found.values())
            or config.state_moves
            or (config.memory.is_limited and len(found) > 1),
        )

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The blocks of all segments in order; empty if stages are not cut."""
        if not self.is_divided:
            return ()
        return tuple(part for parts in self.of_stage.values() for part in parts)

    @cached_property
    def last(self) -> int:
        """Number of the last segment, whose backward comes first."""
        return sum(map(len, self.of_stage.values())) - 1

    @cached_property
    def _first(self) -> dict[int, int]:
        ends = 0
        first = {}
        for stage, parts in self.of_stage.items():
            first[stage] = ends
            ends += len(parts)
        return first

    def number(self, action: Action) -> int:
        """Return the number of the segment that an action computes with."""
        return self._first[action.stage] + action.part


UNDIVIDED = Segments({})
"""Stages that are not cut."""
