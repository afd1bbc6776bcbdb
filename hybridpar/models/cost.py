"""Floating-point operations and parameters of each block, and the split into stages that balances them.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

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

    A layer: 2 per weight, and 4 s h for the attention scores and their product with the values (the causal half is
    counted in full, as in PaLM, arXiv 2204.02311, appendix B).
    """
    layer = 2 * layer_matmul_parameters(model) + 4 * model.seq_length * model.hidden_size
    return (0, *[layer] * model.num_layers, round(2 * LABELLED[model.kind] * head_matmul_parameters(model)))


def training_flops_per_token(model: ModelConfig) -> int:
    """Model operations to train on one token: 3 x forward, as a backward is two; that is 6 N + 12 L h s (PaLM)."""
    return 3 * sum(forward_flops_per_token(model))


def balanced_split(costs: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage such that the costliest stage is as cheap as possible; every stage gets at least one.

    Ties: the later stages get fewer blocks, because the head's loss is costlier than its matrix product.
    """
    assert num_stages <= len(costs), f"{num_stages} stages of {len(costs)} blocks"
    prefix = (0, *accumulate(costs))

    @cache
    def best(stop: int, stages: int) -> tuple[int, int]:
        """Bottleneck of blocks [0, stop) in `stages` stages, and where the last of them starts."""
        if stages == 1:
            return prefix[stop], 0
        return min(
            ((max(best(cut, stages - 1)[0], prefix[stop] - prefix[cut]), cut) for cut in range(stages - 1, stop)),
            key=lambda choice: (choice[0], -choice[1]),
        )

    sizes: list[int] = []
    stop = len(costs)
    for stages in range(num_stages, 0, -1):
        start = best(stop, stages)[1]
        sizes.insert(0, stop - start)
        stop = start
    return tuple(sizes)


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
            works = balanced_split(forward_flops_per_token(model), num_stages)
            of = "parallel.pp" if chunks == 1 else "parallel.pp * chunks"
            raise config_error(
                "pipeline.split", list(split), f"must be {num_stages} positive numbers ({of}) that add up to "
                f"{model.num_blocks} (embedding, {model.num_layers} layers, head)", str(list(works)))
        sizes = split
    else:
        sizes = balanced_split(forward_flops_per_token(model), num_stages)
    ends = tuple(accumulate(sizes))
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, ends, strict=True))
