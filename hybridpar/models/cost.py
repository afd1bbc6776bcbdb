"""Floating-point operations and parameters of each block.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hybridpar.config import ModelConfig, ModelSpec, ParameterGroup
from hybridpar.grid import Axis
from hybridpar.models.blocks import LABELLED
from hybridpar.models.build import build_blocks
from hybridpar.models.flops import BlockFlops, count_flops
from hybridpar.nn.placement import Placement, named_placements


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


def forward_flops_per_token(model: ModelSpec) -> tuple[int, ...]:
    """Forward operations of each block for one token: of GPT and BERT, embedding, layers, head.

    Of other models what they say (`ModelSpec.forward_flops`), else what their own code computes
    (models/flops.py). A layer of GPT and BERT: 2 per weight, and 4 s h for the attention scores and
    their product with the values; of a causal matrix these are twice what counts
    (`training_flops_per_token`).
    """
    if not isinstance(model, ModelConfig):
        return _own_flops(model)
    layer = 2 * layer_matmul_parameters(model) + 4 * model.seq_length * model.hidden_size
    return (
        0,
        *[layer] * model.num_layers,
        round(2 * LABELLED[model.kind] * head_matmul_parameters(model)),
    )


@lru_cache(maxsize=256)
def block_placements(
    model: ModelSpec, groups: tuple[ParameterGroup, ...] = ()
) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of the parameters of each block. groups: `optim.groups`, which may
    freeze some."""
    return tuple(
        tuple(placement for _, _, placement in named_placements(block))
        for n in range(model.num_blocks)
        for block in build_blocks(model, Axis("tp"), [n], groups=groups).values()
    )


@lru_cache(maxsize=256)
def untied_parameters(model: ModelSpec) -> int:
    """Return the number of trained parameters of the first block that the last one does not
    share."""
    if isinstance(model, ModelConfig):
        return model.num_positions * model.hidden_size if model.position == "learned" else 0
    return sum(
        prod(placement.shape)
        for block in build_blocks(model, Axis("tp"), [0]).values()
        for _, _, placement in named_placements(block)
        if placement.trainable and not placement.tied
    )


def _own_flops(model: ModelSpec) -> tuple[int, ...]:
    return tuple(block.forward // model.tokens_per_sample for block in block_flops(model))


@lru_cache(maxsize=256)
def block_flops(model: ModelSpec) -> tuple[BlockFlops, ...]:
    """Return the operations of each block of a custom model for one sample.

    A block's `forward_flops` come first, then what its code computes; the backward of what a block
    says of itself is twice its forward. Where a block cannot run without values all count 2 for
    each weight of a matrix and each row of features that comes in, or goes out of the first block.
    """
    said = [model.forward_flops(number) for number in range(model.num_blocks)]
    counted = count_flops(model) if None in said else None
    found = []
    for number, forward in enumerate(said):
        if forward is None and counted is not None:
            found.append(counted[number])
            continue
        forward = _weights_and_rows(model, number) if forward is None else forward
        found.append(BlockFlops(forward, 2 * forward))
    return tuple(found)


def _weights_and_rows(model: ModelSpec, number: int) -> int:
    shape = (1,) if model.num_blocks == 1 else model.activation_shape(max(0, number - 1))
    rows = sum(prod(one[:-1]) for one in (shape.values() if isinstance(shape, dict) else [shape]))
    return (
        2
        * rows
        * sum(prod(one.shape) for one in block_placements(model)[number] if len(one.shape) > 1)
    )


def training_flops_per_token(model: ModelSpec) -> int:
    """Return the operations that training on one token needs: the numerator of MFU, over the rate
    of tokens.

    Only products count, two operations for a multiplication and its addition: matrix products,
    convolutions and attention. Recomputation, the optimizer and communication do not count.

    GPT and BERT: 3 x forward, as a backward has twice the products. With N weights that is 6 N + 12
    L h s, as in PaLM (arXiv 2204.02311, appendix B), and 6 N + 6 L h s where attention is causal:
    half of its matrix is masked, and no operation on that half is needed. Custom models:
    `block_flops`, forward and backward, for each of the `tokens_per_sample`.
    """
    if not isinstance(model, ModelConfig):
        return sum(map(sum, block_flops(model))) // model.tokens_per_sample
    masked = (
        2 * model.num_layers * model.seq_length * model.hidden_size if model.kind == "gpt" else 0
    )
    return 3 * (sum(forward_flops_per_token(model)) - masked)


def training_flops_rule(model: ModelSpec) -> str:
    """The rule of `training_flops_per_token`, for people."""
    if not isinstance(model, ModelConfig):
        return "products, convolutions and attention, forward and backward"
    return "6 N + 6 L h s, causal attention once" if model.kind == "gpt" else "6 N + 12 L h s"


KEPT_BYTES = 34
"""Bytes that a layer keeps of a token for its backward in half precision, over the hidden size.

Source: arXiv 2205.05198, equation 2, without the scores."""
