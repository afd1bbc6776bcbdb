"""The configuration values that decide what state a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridpar.config import Config
from hybridpar.models.build import DTYPES
from hybridpar.nn.placement import split_ranges


@dataclass(frozen=True)
class StatePolicy:
    """How much state a rank keeps, and of which kinds.

    Args:
        num_versions: Versions of the weights that are kept at once.
        num_gradient_buffers: Batches that accumulate or reduce at the same time.
    """

    config: Config
    num_versions: int
    num_gradient_buffers: int

    @property
    def dtype(self) -> torch.dtype:
        """Type that micro-batches compute in."""
        return DTYPES[self.config.train.dtype]

    @property
    def on_host(self) -> bool:
        """Whether the host updates the weights."""
        return self.config.memory.host_optimizer

    @property
    def ends_apart(self) -> bool:
        """Whether embedding and head are on different ranks of a pipeline."""
        return self.config.pipeline.stage_layout != "v"

    @property
    def keeps_factors(self) -> bool:
        """Whether reduced gradients stay factors, which norm and update multiply out one after the
        other. A host optimizer or limited memory takes gradients from a buffer, and so do batches
        before compression.gradients_start.
        """
        return (
            self.config.compression.takes_factors
            and not self.on_host
            and not self.config.memory.is_limited
            and self.config.compression.gradients_start == 0
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of micro-batches of a batch, if gradients are factors."""
        return min(self.config.compression.gradients_blocks, self.config.pipeline.num_microbatches)

    @property
    def streams(self) -> bool:
        """Whether factors are exchanged block by block while the batch runs. Stages of one rank
        would end their blocks at different times.
        """
        has_one_stage = self.config.pipeline.num_virtual_stages == 1
        return self.config.compression.takes_factors and self.num_blocks > 1 and has_one_stage

    @property
    def splits_gradients(self) -> bool:
        """Whether replicas shard the reduced gradients (ZeRO-2 and 3)."""
        parallel = self.config.parallel
        return parallel.zero >= 2 and parallel.dp_cp > 1 and not self.keeps_factors

    @property
    def moves_gradients(self) -> bool:
        """Whether one segment's gradients at a time are unsharded (not if they are compressed)."""
        return self.splits_gradients and self.config.compression.gradients == "none"

    @property
    def moves(self) -> bool:
        """Whether any state is unsharded for only one segment at a time."""
        return self.moves_gradients or self.splits_weights

    @property
    def divides_updates(self) -> bool:
        """Whether segments are updated one by one. Shards that stay resident are updated in one
        group at no cost.
        """
        return self.config.memory.is_limited or not (self.moves or self.keeps_factors)

    @property
    def moved_kinds(self) -> tuple[str, ...]:
        """Prefixes of the kinds of state of which only one segment is unsharded at a time."""
        kinds = ("gradients/",) if self.moves_gradients else ()
        return (*kinds, "weights/", "frozen/") if self.splits_weights else kinds

    @property
    def splits_weights(self) -> bool:
        """Whether replicas shard the weights, too (ZeRO-3)."""
        return self.config.parallel.zero > 2 and self.config.parallel.dp_cp > 1

    @property
    def predicts(self) -> bool:
        """Whether micro-batches run on predicted weights."""
        return self.config.optim.staleness == "prediction"


def cut_into_parts(config: Config, blocks: range) -> tuple[range, ...]:
    """Return the segments of a stage's blocks, which compute one at a time; () if not cut."""
    memory = config.memory
    by_block = memory.is_limited or memory.host_optimizer or config.state_moves
    if not (wanted := memory.parts or config.model.num_blocks * by_block):
        return ()
    return tuple(
        range(blocks.start + a, blocks.start + b)
        for a, b in split_ranges(len(blocks), min(wanted, len(blocks)))
    )
