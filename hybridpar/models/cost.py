"""Floating-point operations and parameters of each block, and the split into stages that balances them.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise

from hybridpar.config import ModelConfig
from hybridpar.errors import config_error


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Weights of one transformer layer that take part in a matrix product with every token."""
    h = model.hidden_size
    head_dim = h // model.num_heads
    qkv = h * (h + 2 * model.kv_heads * head_dim)
    ffn = (3 if model.activation == "swiglu" else 2) * h * model.ffn_size
    return qkv + h * h + ffn


def head_matmul_parameters(model: ModelConfig) -> int:
    """Weights of the output head that take part in a matrix product with every token."""
    h = model.hidden_size
    return h * model.vocab_size + (h * h if model.kind == "bert" else 0)


LABELLED = {"gpt": 1.0, "bert": 0.15}
"""Share of the positions that the head projects to the vocabulary."""


def forward_flops_per_token(model: ModelConfig) -> tuple[int, ...]:
    """Forward operations of each block for one token: embedding, layers, head.

    A layer: 2 per weight, and 4 s h for the attention scores and their product with the values; of a causal matrix
    these are twice what counts (`training_flops_per_token`).
    """
    layer = 2 * layer_matmul_parameters(model) + 4 * model.seq_length * model.hidden_size
    return (0, *[layer] * model.num_layers, round(2 * LABELLED[model.kind] * head_matmul_parameters(model)))


def training_flops_per_token(model: ModelConfig) -> int:
    """Model operations to train on one token: 3 x forward, as a backward is two.

    With N weights that is 6 N + 12 L h s, as in PaLM (arXiv 2204.02311, appendix B), and 6 N + 6 L h s where attention
    is causal: half of its matrix is masked, and no operation on that half is needed.
    """
    masked = 2 * model.num_layers * model.seq_length * model.hidden_size if model.kind == "gpt" else 0
    return 3 * (sum(forward_flops_per_token(model)) - masked)


def training_flops_rule(model: ModelConfig) -> str:
    """The rule of `training_flops_per_token`, for people."""
    return "6 N + 6 L h s, causal attention once" if model.kind == "gpt" else "6 N + 12 L h s"


def balanced_split(costs: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage such that the costliest stage is as cheap as possible; every stage gets at least one.

    Ties: the later stages get fewer blocks, because the head's loss is costlier than its matrix product.
    """
    assert num_stages <= len(costs), f"{num_stages} stages of {len(costs)} blocks"
    prefix = (0, *accumulate(costs))

    def reach(stages: int, most: int, stop: int) -> int:
        """How many of the first `stop` blocks so many stages can hold, none costlier than `most`."""
        at = 0
        for _ in range(stages):
            if at == stop:
                break
            at = min(bisect_right(prefix, prefix[at] + most) - 1, stop)
        return at

    sizes: list[int] = []
    stop, highest = len(costs), prefix[-1]
    for stages in range(num_stages, 0, -1):
        lowest = max(costs[:stop])
        while lowest < highest:
            middle = (lowest + highest) // 2
            lowest, highest = (lowest, middle) if reach(stages, middle, stop) == stop else (middle + 1, highest)
        start = min(reach(stages - 1, highest, stop), stop - 1)
        sizes.insert(0, stop - start)
        stop = start
    return tuple(sizes)


@lru_cache(maxsize=256)
def even_out(costs: tuple[float, ...], sizes: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """A split into chunks whose costliest ranks are cheaper, if there is one near `sizes`; of equal ones, that where
    ranks wait less for each other: whose costliest stages, one of each round of the ranks, take less together.

    The cheapest costliest stage does not care what else its rank has. One block of the costliest rank at a time goes to
    another stage, and those between them move up.
    """
    prefix, best = (0.0, *accumulate(costs)), sizes
    if len(best) == num_ranks:
        return best

    def ranks_of(sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """The costs of ranks, and of the costliest stage in each round."""
        ends = (0, *accumulate(sizes))
        stages = [prefix[stop] - prefix[start] for start, stop in pairwise(ends)]
        return ([sum(stages[rank::num_ranks]) for rank in range(num_ranks)],
                [max(stages[first : first + num_ranks]) for first in range(0, len(stages), num_ranks)])

    def worth(sizes: tuple[int, ...]) -> tuple[list[float], float]:
        ranks, rounds = ranks_of(sizes)
        return sorted(ranks, reverse=True), sum(rounds)

    while True:
        ranks, _ = ranks_of(best)
        costliest = ranks.index(max(ranks))
        moved = [tuple(size - (i == giver) + (i == taker) for i, size in enumerate(best))
                 for giver in range(costliest, len(best), num_ranks) if best[giver] > 1
                 for taker in range(len(best)) if taker != giver]
        better = min(moved, key=worth, default=best)
        if not worth(better) < worth(best):
            return best
        best = better


def stage_split(
    model: ModelConfig, num_ranks: int, split: tuple[int, ...] = (), chunks: int = 1
) -> tuple[range, ...]:
    """The blocks of each stage: `split` as the user gave it, or balanced by forward operations.

    Stage c * num_ranks + r is chunk c of rank r.
    Raises: ConfigError if there are more stages than blocks, or `split` does not give every stage a block and every
    block a stage.
    """
    num_stages, blocks = num_ranks * chunks, model.num_blocks
    if num_ranks > blocks:
        raise config_error("parallel.pp", num_ranks, f"the model has only {blocks} blocks", str(blocks))
    if num_stages > blocks:
        most = blocks // num_ranks
        raise config_error(
            "pipeline.chunks", chunks, f"parallel.pp = {num_ranks} ranks would hold {num_stages} stages, but the model "
            f"has only {blocks} blocks", str(most) if most > 1 else "pipeline.schedule = 1f1b")
    if split:
        if len(split) != num_stages or sum(split) != model.num_blocks or min(split) < 1:
            costs = forward_flops_per_token(model)
            works = even_out(costs, balanced_split(costs, num_stages), num_ranks)
            of = "parallel.pp" if chunks == 1 else "parallel.pp * chunks"
            raise config_error(
                "pipeline.split", list(split), f"must be {num_stages} positive numbers ({of}) that add up to "
                f"{model.num_blocks} (embedding, {model.num_layers} layers, head)", str(list(works)))
        sizes = split
    else:
        costs = forward_flops_per_token(model)
        sizes = even_out(costs, balanced_split(costs, num_stages), num_ranks)
    ends = tuple(accumulate(sizes))
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, ends, strict=True))
