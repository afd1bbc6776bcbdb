"""Cost of blocks with context parallelism, derived from their cost without it.

A rank of cp has 1 / cp of the tokens of a sample and of the pairs of a query and a key
(nn/context.py), so it computes for 1 / cp of the time; the wait for kernel launches stays. What
layers receive from the other ranks is counted by running their code on ghosts (tensors without
memory): with gathered keys a forward receives (c - 1) / c of the keys and values of all tokens, and
a backward as much of their gradients. The time of a ring counts in full, though products hide some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch

from hybridpar.config import (
    Config,
    DataConfig,
    ModelSpec,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.models.custom_blocks import context_of
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.prediction.work import block_kinds, context_traffic

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]


def split_tokens(costs: Mapping[str, BlockCost], config: Config) -> dict[str, BlockCost]:
    """Return the costs of blocks on the rank of cp that has the most tokens, by kind.

    Args:
        costs: Costs of full samples, at the configuration's parallel.tp.
    """
    context = context_of(config.model, silent_axis("cp", config.parallel.cp))
    share = max(context.sizes) / context.length
    return {kind: _shared(cost, share) for kind, cost in costs.items()}


def _shared(cost: BlockCost, share: float) -> BlockCost:
    def messages(sizes: Iterable[int]) -> tuple[int, ...]:
        return tuple(round(share * size) for size in sizes)

    return replace(
        cost,
        forward=share * (cost.forward - cost.forward_idle) + cost.forward_idle,
        backward=share * (cost.backward - cost.backward_idle) + cost.backward_idle,
        forward_wait=share * cost.forward_wait,
        backward_wait=share * cost.backward_wait,
        forward_messages=messages(cost.forward_messages),
        backward_messages=messages(cost.backward_messages),
        backward_input=share * cost.backward_input,
        remake=share * cost.remake,
        kept=round(share * cost.kept),
    )


def context_waits(config: Config, machine: Machine) -> dict[str, tuple[float, float]]:
    """Return the seconds that each kind of block takes to exchange what the tokens of other ranks
    have, in forward and backward, while all such groups of the job do."""
    parallel = config.parallel
    group = range(0, parallel.cp * parallel.tp, parallel.tp)
    rings = min(machine.devices_per_server, parallel.tp * parallel.pp * max(parallel.dp, 1))
    one = replace(parallel, pp=1, dp=1, zero=0, sites=1, sequence=False)
    traffic = context_bytes(config.model, one, config.train.dtype)

    def seconds(op: str, received: int) -> float:
        # a ring passes (c - 1) / c of the full size through every rank
        full = config.train.micro_batch_size * received * parallel.cp / (parallel.cp - 1)
        return machine.half_ring(op, full, group, rings)[0]

    return {
        kind: (seconds("gather", forward), seconds("scatter", backward))
        for kind, (forward, backward) in traffic.items()
    }


@lru_cache(maxsize=64)
def context_bytes(
    model: ModelSpec, parallel: ParallelConfig, dtype: Dtype
) -> dict[str, tuple[int, int]]:
    """Return the bytes that a rank of cp receives in the forward and the backward of each kind of
    block, for one sample.

    Args:
        model: The model.
        parallel: Sizes of tp and cp, and how attention reaches other ranks' tokens; nothing else.
        dtype: Type of activations (train.dtype).
    """
    config = Config(
        model=model,
        parallel=parallel,
        pipeline=PipelineConfig(num_microbatches=1),
        data=DataConfig(),
        train=TrainConfig(micro_batch_size=1, device="cpu", dtype=dtype),
    )
    kinds = block_kinds(model)
    return {
        kind: context_traffic(config, kinds.index(kind), torch.device("cpu"))
        for kind in dict.fromkeys(kinds)
    }
