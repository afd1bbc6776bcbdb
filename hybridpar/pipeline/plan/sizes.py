"""Sizes of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.config import Config
from hybridpar.errors import config_error


@dataclass(frozen=True, slots=True)
class Sizes:
    """All that a schedule depends on: ranks in the pipeline, micro-batches in a batch, and stages that a rank holds.

    With several `chunks` of the model on each rank the pipeline is a ring: stage c * num_ranks + r is chunk c of rank
    r, and the last rank sends to the first.
    """

    num_ranks: int
    num_microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise config_error("parallel.pp", self.num_ranks, "must be at least 1", "1")
        if self.num_microbatches < 1:
            raise config_error("pipeline.num_microbatches", self.num_microbatches, "must be at least 1", "1")
        if self.chunks < 1:
            raise config_error("pipeline.chunks", self.chunks, "must be at least 1", "1")
        if self.chunks > 1 and self.num_ranks == 1:
            raise config_error("parallel.pp", 1, f"must be at least 2 where a rank holds {self.chunks} chunks of the "
                               "model, which wait for each other on a single one", "2, or pipeline.schedule = 1f1b")

    @staticmethod
    def of(config: Config) -> Sizes:
        """The sizes that a configuration names."""
        pipeline = config.pipeline
        return Sizes(config.parallel.pp, pipeline.num_microbatches, pipeline.num_chunks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.num_ranks * self.chunks

    @property
    def is_ring(self) -> bool:
        """Whether the last rank sends to the first."""
        return self.chunks > 1

    @property
    def rank_name(self) -> str:
        """Word for a rank in messages: stage, where each holds one."""
        return "stage" if self.chunks == 1 else "rank"

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages that a rank holds."""
        return range(rank, self.num_stages, self.num_ranks)
