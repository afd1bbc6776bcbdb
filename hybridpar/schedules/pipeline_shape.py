"""The shape of a pipeline: how many ranks and stages it has, and which rank holds which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridpar.config import Config, rank_of_stage
from hybridpar.errors import config_error


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Shape of a pipeline: ranks, micro-batches in a batch, and stages of a rank.

    With several virtual stages (`chunks`) on each rank, `stage_layout` decides which. loop: stage c
    * num_ranks + r is virtual stage c of rank r; the pipeline is a ring, and the last rank sends to
    the first. v: stages r and 2 * num_ranks - 1 - r are on rank r; the last rank hands over to
    itself, and the first has both ends. More virtual stages, an even number, continue like this:
    down and back again.

    The first `num_frozen` stages train nothing. No stage sends a gradient to them.
    """

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1
    stage_layout: str = "loop"
    num_frozen: int = 0

    def __post_init__(self) -> None:
        for field, number in (
            ("parallel.pp", self.num_ranks),
            ("pipeline.num_microbatches", self.num_microbatches),
            ("pipeline.virtual_stages", self.virtual_stages),
        ):
            if number < 1:
                raise config_error(field, number, "must be at least 1", "1")
        if self.virtual_stages > 1 and self.num_ranks == 1:
            works = "2" if self.is_v else "2, or pipeline.schedule = 1f1b"
            rule = (
                f"must be at least 2 with {self.virtual_stages} stages per rank "
                "(pipeline.virtual_stages): on a single rank they would only wait for each other"
            )
            raise config_error("parallel.pp", 1, rule, works)

    @staticmethod
    def of(config: Config) -> PipelineShape:
        """Return the shape that a configuration asks for."""
        of = config.pipeline
        return PipelineShape(
            config.parallel.pp, of.num_microbatches, of.num_virtual_stages, of.stage_layout
        )

    @staticmethod
    def found(ranks: Mapping[int, int], num_ranks: int) -> PipelineShape:
        """Return the shape of a pipeline whose stages were seen on these ranks; m counts as 1."""
        chunks = max(ranks, default=0) // max(num_ranks, 1) + 1
        loops = all(rank == rank_of_stage(s, num_ranks, "loop") for s, rank in ranks.items())
        return PipelineShape(max(num_ranks, 1), 1, chunks, "loop" if loops else "v")

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.num_ranks * self.virtual_stages

    @property
    def is_ring(self) -> bool:
        """Whether the last rank sends to the first."""
        return self.virtual_stages > 1 and not self.is_v

    @property
    def is_v(self) -> bool:
        """Whether stages go down the ranks and back."""
        return self.stage_layout == "v"

    @property
    def num_links(self) -> int:
        """Number of pairs of neighbours, rank r and the one after it (in a ring: mod p)."""
        return self.num_ranks if self.is_ring else self.num_ranks - 1

    @property
    def rank_name(self) -> str:
        """Word for a rank in messages: stage, if each rank holds one."""
        return "stage" if self.virtual_stages == 1 else "rank"

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return rank_of_stage(stage, self.num_ranks, self.stage_layout)

    def stages_of(self, rank: int) -> Sequence[int]:
        """Return the stages that a rank holds, in order; the first one has the rank's number."""
        p = self.num_ranks
        return [
            turn * p + (p - 1 - rank if self.is_v and turn % 2 else rank)
            for turn in range(self.virtual_stages)
        ]

    def turn(self, stage: int) -> int:
        """Return the number of a stage's pass through the ranks; 0 unless stage_layout is "v"."""
        return stage // self.num_ranks if self.is_v else 0

    def peer(self, stage: int, side: int) -> int | None:
        """Return the rank to which a stage's neighbour on that side (1: the next stage) is linked;
        None if there is no such stage, or it is on the same rank.
        """
        if not 0 <= stage + side < self.num_stages:
            return None
        rank = self.rank_of(stage + side)
        return None if rank == self.rank_of(stage) else rank

    def carries(self, flow: int, stage: int, side: int) -> bool:
        """Return whether a stage and its neighbour on that side exchange messages of a direction:
        activations (flow 1), or gradients (-1), which no stage sends to one that trains nothing.
        """
        has_link = self.peer(stage, side) is not None
        return has_link and (flow > 0 or min(stage, stage + side) >= self.num_frozen)

    def link(self, stage: int, side: int) -> int | None:
        """Return the number of the link between a stage and that neighbour; None as for `peer`."""
        if self.peer(stage, side) is None:
            return None
        lower = min(stage, stage + side)
        if self.is_v:
            return min(self.rank_of(lower), self.rank_of(lower + 1))
        return lower % self.num_ranks
