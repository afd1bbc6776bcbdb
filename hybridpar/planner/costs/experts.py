"""Cost of blocks with expert parallelism, derived from their cost on a rank that has all experts.

At balanced load a rank of ep computes as many rows as without: its own tokens' rows for all experts
then, all ranks' rows for its own experts now. It has a share of the experts' parameters, and waits
for rows that go out and come back, forward and backward. The time of these exchanges counts in full,
though a shared expert hides some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from hybridpar.config import (
    Config,
    DataConfig,
    ModelSpec,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.grid import EXPERTS
from hybridpar.models.build import BlockOptions, build_blocks
from hybridpar.nn.placement import Held, named_placements
from hybridpar.planner.costs.context import Dtype
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.prediction.work import block_kinds, expert_traffic


@dataclass(frozen=True)
class ExpertParameters:
    """Parameters of a block on the first rank of ep.

    Attributes:
        all: Parameters of the block with all experts.
        others: The ones that all ranks of ep hold.
        own: Parameters of the rank's experts.
    """

    all: int
    others: int
    own: int


def split_experts(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Return the costs of blocks on the first rank of ep, which has the most experts, by kind.

    Args:
        costs: Costs with all experts, at the configuration's parallel.tp.
    """
    parallel = config.parallel
    held = held_parameters(config.model, _of_one_stage(parallel))
    # with ZeRO fewer replicas share the update of an expert
    fewer = parallel.ep if parallel.zero else 1
    found = {}
    for kind, cost in costs.items():
        of_kind = held[kind]
        norm = (of_kind.others + of_kind.own) / max(of_kind.all, 1)
        update = (of_kind.others + fewer * of_kind.own) / max(of_kind.all, 1)
        found[kind] = replace(
            cost,
            norm=norm * cost.norm,
            update=update * cost.update,
            parameters=round(norm * cost.parameters),
        )
    return found


def own_expert_parameters(config: Config) -> dict[str, int]:
    """Return the parameters of the experts that the first rank of ep has, by kind of block."""
    held = held_parameters(config.model, _of_one_stage(config.parallel))
    return {kind: of_kind.own for kind, of_kind in held.items()}


def expert_waits(config: Config, machine: Machine) -> dict[str, tuple[float, float]]:
    """Return the seconds that each kind of block takes to move rows to experts and back, in forward
    and backward, while all such groups of the job do."""
    parallel = config.parallel
    group = silent_grid(config).experts.ranks
    groups = min(machine.devices_per_server, parallel.tp * parallel.pp * parallel.dp_cp)
    traffic = expert_bytes(config.model, _of_one_stage(parallel), config.train.dtype)

    def seconds(sent: int) -> float:
        # a ring passes (n - 1) / n of the full size through every rank
        full = config.train.micro_batch_size * sent * parallel.ep / (parallel.ep - 1)
        return machine.half_ring("gather", full, group, groups)[0]

    return {kind: (seconds(there), seconds(back)) for kind, (there, back) in traffic.items()}


@lru_cache(maxsize=64)
def expert_bytes(
    model: ModelSpec, parallel: ParallelConfig, dtype: Dtype
) -> dict[str, tuple[int, int]]:
    """Return the bytes that a rank of ep sends to others in the forward and the backward of each
    kind of block, for one sample at balanced load.

    Args:
        model: The model.
        parallel: Sizes of tp, cp, dp and ep, and nothing else.
        dtype: Type of activations (train.dtype).
    """
    config = _of_one_sample(model, parallel, dtype)
    kinds = block_kinds(model)
    return {
        kind: expert_traffic(config, kinds.index(kind), torch.device("cpu"))
        for kind in dict.fromkeys(kinds)
    }


@lru_cache(maxsize=64)
def held_parameters(model: ModelSpec, parallel: ParallelConfig) -> dict[str, ExpertParameters]:
    """Return the parameters of each kind of block on the first rank of ep.

    Args:
        model: The model.
        parallel: Sizes of tp, cp, dp and ep, and nothing else.
    """
    kinds = block_kinds(model)
    found = {}
    for kind in dict.fromkeys(kinds):
        all_of_it, _ = _count(model, replace(parallel, ep=1), kinds.index(kind))
        here, own = _count(model, parallel, kinds.index(kind))
        found[kind] = ExpertParameters(all_of_it, here - own, own)
    return found


def _count(model: ModelSpec, parallel: ParallelConfig, number: int) -> tuple[int, int]:
    """Return the trained parameters of a block on the first rank, and the ones of experts that ranks
    of ep divide."""
    config = _of_one_sample(model, parallel, "bf16")
    grid = silent_grid(config)
    options = BlockOptions.of(config, grid)
    (block,) = build_blocks(model, grid.tp, [number], options=options).values()
    placed = [
        (parameter.numel(), placement)
        for _, parameter, placement in named_placements(block)
        if placement.trainable
    ]
    own = sum(size for size, placement in placed if placement.along(EXPERTS) is Held.SHARDED)
    return sum(size for size, _ in placed), own


def _of_one_stage(parallel: ParallelConfig) -> ParallelConfig:
    """Return the smallest grid with these tp, cp and ep."""
    return ParallelConfig(
        tp=parallel.tp,
        cp=parallel.cp,
        ep=parallel.ep,
        dp=parallel.least_dp,
        sequence=parallel.sequence,
    )


def _of_one_sample(model: ModelSpec, parallel: ParallelConfig, dtype: Dtype) -> Config:
    return Config(
        model=model,
        parallel=parallel,
        pipeline=PipelineConfig(num_microbatches=1),
        data=DataConfig(),
        train=TrainConfig(micro_batch_size=1, device="cpu", dtype=dtype),
    )
