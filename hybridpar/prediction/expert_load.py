"""The load of experts that a prediction of memory assumes, and what their ranks send each other.

A rank of ep receives rows from the tokens of all ranks of ep. If tokens choose k of E experts at
random, each sends the o experts of a rank k o / E rows on average, with a variance of

    k o / E (1 - o / E) (E - k) / (E - 1)        (hypergeometric)

and the loads of many tokens are nearly normal: a rank exceeds its mean by four standard deviations
in one of 30,000 layers and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hybridpar.config import Config, MemoryConfig, PipelineConfig
from hybridpar.models.custom_blocks import context_of
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.prediction.work import block_kinds, expert_traffic

_MIB = 2**20
_DEVIATIONS = 4


@dataclass(frozen=True)
class ExpertLoad:
    """Rows of a micro-batch in a layer, on the rank with the most experts; without ep, of an expert.

    Attributes:
        ep: Ranks that share the experts of a layer.
        balanced: Rows at balanced load.
        usual: Rows that random routing does not exceed, but for one time in 30,000.
        most: Rows if all tokens visit these experts.
        bound: Rows of a round (memory.expert_load), for which memory is predicted. 0: none.
        sent: Bytes that the first rank sends to other ranks of ep for a micro-batch, in all layers,
            forward and backward, at balanced load.
    """

    ep: int
    balanced: int
    usual: int
    most: int
    bound: int = 0
    sent: int = 0

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        if self.ep == 1:
            yield (
                f"experts: at balanced load, {self.balanced:,} rows each, up to {self.usual:,} with "
                f"random routing; at most {self.most:,}, if all tokens of a micro-batch visit one "
                "expert, which adds temporary tensors and no activations that are kept"
            )
            return
        rows = (
            f"{self.balanced:,} rows a layer at balanced load on the rank with the most experts, up "
            f"to {self.usual:,} with random routing"
        )
        if self.bound:
            yield (
                f"experts: predicted with {self.bound:,} rows (memory.expert_load); {rows}; rows "
                "beyond the bound move in further rounds, whose activations are computed again"
            )
        else:
            yield (
                f"experts: predicted with {rows}; at most {self.most:,}, if all tokens of the "
                f"{self.ep} ranks of a micro-batch visit its experts, and a rank keeps the rows that "
                "it gets, unless memory.expert_load is a bound"
            )
        yield (
            f"a rank sends {self.sent / _MIB:,.2f} MiB a micro-batch to the experts of other ranks and "
            "back, forward and backward"
        )


def expert_load(config: Config) -> ExpertLoad | None:
    """Return the load of experts that a prediction assumes; None without experts."""
    model = config.model.cost_model
    if model is None or model.routed_experts is None:
        return None
    ep = config.parallel.ep
    context = context_of(model, silent_axis("cp", config.parallel.cp))
    tokens = config.train.micro_batch_size * context.local_length(model.tokens_per_sample) * ep
    number = model.num_experts
    topk = model.router_topk
    own = -(-number // ep) if ep > 1 else 1
    mean = tokens * topk * own / number
    left = (number - topk) / max(number - 1, 1)
    deviation = math.sqrt(mean * (1 - own / number) * left)
    most = tokens * min(topk, own)
    bound = min(most, math.ceil(config.memory.expert_load * mean)) if ep > 1 else 0
    usual = min(most, math.ceil(mean + _DEVIATIONS * deviation))
    return ExpertLoad(ep, int(mean), usual, most, bound, _sent(config) if ep > 1 else 0)


def _sent(config: Config) -> int:
    """Return the bytes of all exchanges of a micro-batch."""
    plain = replace(
        config,
        parallel=replace(config.parallel, pp=1, zero=0),
        pipeline=PipelineConfig(num_microbatches=1),
        memory=MemoryConfig(),
        compression=type(config.compression)(),
    )
    kinds = block_kinds(config.model)
    cpu = torch.device("cpu")
    by_kind = {
        kind: sum(expert_traffic(plain, kinds.index(kind), cpu)) for kind in dict.fromkeys(kinds)
    }
    return sum(by_kind[kind] for kind in kinds)
