"""Floating-point operations and parameters of each block, and the split into stages that balances them.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
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
    Raises: ConfigError if there are more stages than blocks.
    """
    if num_stages > len(costs):
        raise config_error("parallel.pp", num_stages, f"the model has only {len(costs)} blocks", str(len(costs)))
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


def stage_split(model: ModelConfig, num_stages: int, split: tuple[int, ...] = ()) -> tuple[range, ...]:
    """The blocks of each stage: `split` as the user gave it, or balanced by forward operations.

    Raises: ConfigError if `split` does not give every stage a block and every block a stage.
    """
    if split:
        if len(split) != num_stages or sum(split) != model.num_blocks or min(split) < 1:
            works = balanced_split(forward_flops_per_token(model), num_stages)
            raise config_error(
                "pipeline.split", list(split), f"must be {num_stages} positive numbers (parallel.pp) that add up to "
                f"{model.num_blocks} (embedding, {model.num_layers} layers, head)", str(list(works)))
        sizes = split
    else:
        sizes = balanced_split(forward_flops_per_token(model), num_stages)
    ends = tuple(accumulate(sizes))
    return tuple(range(stop - size, stop) for size, stop in zip(sizes, ends, strict=True))
