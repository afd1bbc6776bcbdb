"""The configuration values that decide what state a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridpar.config import (
    AUTO,
    UNCOMPRESSED,
    CompressionConfig,
    Config,
    KernelsConfig,
    OptimConfig,
    OuterConfig,
    ParallelConfig,
)
from hybridpar.models.build import DTYPES
from hybridpar.nn.placement import split_ranges


@dataclass(frozen=True)
class StatePolicy:
    """How much state a rank keeps, and of which kinds.

    Attributes:
        dtype: Type that micro-batches compute in.
        backend: Backend of the optimizer's kernels.
        defers: Weight gradients may be computed later than input gradients.
        ends_apart: Embedding and head are on different ranks of a pipeline.
        on_host: The host updates the weights.
        fp8: Products of hidden matrices have float8 factors.
        rounds_gradients: Gradients are accumulated and reduced in `dtype`, not in the master copy's.
        is_limited: State moves between the device and a slower tier.
        num_microbatches: Micro-batches of a replica's batch.
        num_stages: Stages of a rank.
    """

    dtype: torch.dtype
    num_versions: int
    num_gradient_buffers: int
    optim: OptimConfig
    parallel: ParallelConfig
    backend: str
    defers: bool = False
    ends_apart: bool = True
    on_host: bool = False
    outer: OuterConfig = field(default_factory=OuterConfig)
    compression: CompressionConfig = UNCOMPRESSED
    kernels: KernelsConfig = AUTO
    fp8: bool = False
    rounds_gradients: bool = False
    is_limited: bool = False
    num_microbatches: int = 1
    num_stages: int = 1

    @staticmethod
    def of(config: Config, num_versions: int, num_gradient_buffers: int) -> StatePolicy:
        """Create the policy for a schedule that needs these numbers of buffers."""
        return StatePolicy(
            DTYPES[config.train.dtype],
            num_versions,
            num_gradient_buffers,
            config.optim,
            config.parallel,
            config.kernels.optimizer,
            config.pipeline.split_backward,
            config.pipeline.stage_layout != "v",
            config.memory.host_optimizer,
            config.outer,
            config.compression,
            config.kernels,
            config.train.fp8,
            config.train.gradient_dtype == "bf16",
            config.memory.is_limited,
            config.pipeline.num_microbatches,
            config.pipeline.num_virtual_stages,
        )

    @property
    def keeps_factors(self) -> bool:
        """Whether reduced gradients stay factors, which norm and update multiply out one after the
        other. A host optimizer or limited memory takes gradients from a buffer, and so do batches
        before compression.gradients_start.
        """
        return (
            self.compression.takes_factors
            and not self.on_host
            and not self.is_limited
            and self.compression.gradients_start == 0
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of micro-batches of a batch, if gradients are factors."""
        return min(self.compression.gradients_blocks, self.num_microbatches)

    @property
    def streams(self) -> bool:
        """Whether factors are exchanged block by block while the batch runs. Stages of one rank
        would end their blocks at different times.
        """
        return self.compression.takes_factors and self.num_blocks > 1 and self.num_stages == 1

    @property
    def splits_gradients(self) -> bool:
        """Whether replicas shard the reduced gradients (ZeRO-2 and 3)."""
        return self.parallel.zero >= 2 and self.parallel.dp_cp > 1 and not self.keeps_factors

    @property
    def moves_gradients(self) -> bool:
        """Whether one segment's gradients at a time are unsharded (not if they are compressed)."""
        return self.splits_gradients and self.compression.gradients == "none"

    @property
    def moves(self) -> bool:
        """Whether any state is unsharded for only one segment at a time."""
        return self.moves_gradients or self.splits_weights

    @property
    def divides_updates(self) -> bool:
        """Whether segments are updated one by one. Shards that stay resident are updated in one
        group at no cost.
        """
        return self.is_limited or not (self.moves or self.keeps_factors)

    @property
    def moved_kinds(self) -> tuple[str, ...]:
        """Prefixes of the kinds of state of which only one segment is unsharded at a time."""
        kinds = ("gradients/",) if self.moves_gradients else ()
        return (*kinds, "weights/", "frozen/") if self.splits_weights else kinds

    @property
    def splits_weights(self) -> bool:
        """Whether replicas shard the weights, too (ZeRO-3)."""
        return self.parallel.zero > 2 and self.parallel.dp_cp > 1

    @property
    def predicts(self) -> bool:
        """Whether micro-batches run on predicted weights."""
        return self.optim.staleness == "prediction"


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
