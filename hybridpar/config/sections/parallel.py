"""The section [parallel]."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, Literal

from hybridpar.config.typed import Within


@dataclass(frozen=True)
class ParallelConfig:
    tp: Annotated[int, Within(1, 2**16)] = 1
    """Tensor parallelism: ranks that share each layer."""
    pp: Annotated[int, Within(1, 2**16)] = 1
    """Pipeline parallelism: ranks that hold consecutive stages of the model."""
    dp: Annotated[int, Within(0, 2**20)] = 0
    """Data parallelism: replicas of the model. 0: number of processes / (tp * cp * pp * sites)."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: training state that replicas shard. 1: optimizer state, and the fp32 master
    weights of bf16 and fp16. 2: also gradients; one block's full gradients exist at a time and
    are reduced after each micro-batch. 3: also weights, which are gathered block by block. With
    pipeline.schedule = gpipe, pp = 1 and no tied embeddings a block is reduced once a batch and
    gathered twice. Never sharded: an embedding that is tied across stages and, if tp is above 1,
    norms and biases."""
    sites: Annotated[int, Within(1, 2**10)] = 1
    """Copies of the whole grid that train apart on different samples, for slow links between
    them. They exchange weights every outer.every steps ([outer], DiLoCo). The first 1 / sites of
    the ranks are the first site. A batch has sites * dp * num_microbatches * micro_batch_size
    samples."""
    sequence: bool = False
    """Sequence parallelism over the tp ranks: each has seq_length / tp rows of norms, dropout,
    residuals and activations between stages, and all-reduces become reduce-scatters and
    all-gathers. Works with any seq_length; no effect if tp is 1."""
    cp: Annotated[int, Within(1, 2**16)] = 1
    """Context parallelism: ranks that share the tokens of each sample, for long sequences. Each
    has seq_length / cp tokens of every layer, in two pieces for equal work, and receives the keys
    and values of the others. The ranks are replicas of the parameters: gradients are summed, and
    ZeRO shards, over dp * cp of them. GPT only."""
    ep: Annotated[int, Within(1, 2**16)] = 1
    """Expert parallelism: neighbouring ranks of cp and dp that share the experts of each layer
    (model.num_experts), as evenly as possible. Rows of tokens travel to the ranks of their experts
    and back. Must divide dp * cp. Gradients of an expert are summed, and ZeRO shards it, over the
    dp * cp / ep ranks that hold it."""
    cp_comm: Literal["all_gather", "ring", "ulysses"] = "all_gather"
    """How attention reaches the tokens of the other ranks of cp. all_gather: each rank gathers all
    keys and values, and adds up in the order of one process. ring: they travel from rank to rank
    while each computes, and none keeps more than its own. ulysses: ranks exchange tokens for heads,
    of which each then has 1 / cp; needs at least cp key heads on each rank of tp."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the grid; of one replica a site where dp is 0."""
        return self.tp * self.cp * self.pp * max(self.dp, 1) * self.sites

    @property
    def replicas(self) -> int:
        """Replicas at all sites, each with samples of its own."""
        return self.sites * self.dp

    @property
    def least_dp(self) -> int:
        """Fewest replicas of a grid with these ep and cp: ep divides dp * cp."""
        return self.ep // gcd(self.ep, self.cp)

    @property
    def dp_cp(self) -> int:
        """Ranks of a site that hold the same parameters, and sum their gradients."""
        return self.dp * self.cp
