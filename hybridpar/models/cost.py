"""Floating-point operations and parameters of each block.

Legend: h hidden, f ffn, s sequence, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import mul

from hybridpar.config import ModelConfig, ModelSpec, ParameterGroup
from hybridpar.grid import Axis
from hybridpar.models.build import BlockOptions, build_blocks, distinct_blocks
from hybridpar.models.flops import BlockFlops, count_flops
from hybridpar.models.heads import LABELLED
from hybridpar.nn.placement import Placement, named_placements


def layer_matmul_parameters(model: ModelConfig, layer: int = 0, *, stored: bool = False) -> int:
    """Return how many weights of a transformer layer take part in a matrix product with every
    token.

    Args:
        model: The model.
        layer: Number of the layer, from 0.
        stored: Count all experts, and not only as many as a token visits.
    """
    h = model.hidden_size
    heads = model.num_heads * model.head_size
    qkv = h * (heads + 2 * model.kv_heads * model.head_size)
    features = model.stored_ffn_size(layer) if stored else model.active_ffn_size(layer)
    ffn = (3 if model.gated else 2) * h * features
    if model.layer_has_experts(layer):
        ffn += h * model.num_experts  # the router
    return qkv + h * heads + ffn


def layer_attention_flops(model: ModelConfig, layer: int) -> int:
    """Return the forward operations of a layer's scores and of their products with the values, for
    one token: 4 for each feature of the query heads and each key.

    All s keys count, which for a causal matrix is twice what a token sees. With a window of w keys
    a token sees w - w^2 / 2s on average, which also counts twice.
    """
    s = model.seq_length
    window = model.layer_window(layer)
    keys = 2 * window - window * window // s if 0 < window < s else s
    return 4 * keys * model.num_heads * model.head_size


def head_matmul_parameters(model: ModelConfig) -> int:
    """Return how many weights of the output head take part in a matrix product with every token."""
    h = model.hidden_size
    return h * model.vocab_size + (h * h if model.kind == "bert" else 0)


def forward_flops_per_token(model: ModelSpec, document_length: float = 0.0) -> tuple[int, ...]:
    """Return the forward operations of each block for one token.

    A model with formulas (`ModelSpec.cost_model`) has embedding, layers and head. A layer takes 2
    per weight, and 4 s n d for the attention scores of n heads of d features and their product with
    the values, which is 4 s h in most models. For a causal matrix that is twice what counts
    (`training_flops_per_token`). Another model says its operations (`ModelSpec.forward_flops`), or
    they are counted in its code (models/flops.py).

    Args:
        model: The model.
        document_length: Length of packed documents (`data.document_length`). 0: a row's. Of models
            with formulas.
    """
    if (formulas := model.cost_model) is None:
        return tuple(block.forward // model.tokens_per_sample for block in block_flops(model))
    layers = []
    for layer in range(formulas.num_layers):
        attention = layer_attention_flops(formulas, layer)
        share = document_share(formulas.seq_length, document_length, formulas.layer_window(layer))
        layers.append(2 * layer_matmul_parameters(formulas, layer) + round(share * attention))
    head = round(2 * LABELLED[formulas.kind] * head_matmul_parameters(formulas))
    return (0, *layers, head)


@lru_cache(maxsize=256)
def block_placements(
    model: ModelSpec, groups: tuple[ParameterGroup, ...] = ()
) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of the parameters of each block; equal layers share one layer's.

    Args:
        model: The model.
        groups: `optim.groups`, which may freeze some.
    """
    numbers = range(model.num_blocks) if groups else distinct_blocks(model)
    options = BlockOptions(groups=groups)
    found = []
    for number in numbers:
        (block,) = build_blocks(model, Axis("tp"), [number], options=options).values()
        found.append(tuple(placement for _, _, placement in named_placements(block)))
    if len(found) == model.num_blocks:
        return tuple(found)
    first, layer, last = found
    return (first, *[layer] * (model.num_blocks - 2), last)


def may_be_frozen(model: ModelSpec, groups: tuple[ParameterGroup, ...]) -> bool:
    """Return whether a model may have frozen parameters, before any block is built."""
    return model.may_freeze or any(group.frozen for group in groups)


@lru_cache(maxsize=256)
def untied_parameters(model: ModelSpec) -> int:
    """Return the number of trained parameters of the first block that the last one does not
    share."""
    if (formulas := model.cost_model) is not None:
        return formulas.position_rows * formulas.hidden_size
    return sum(
        prod(placement.shape)
        for placement in block_placements(model)[0]
        if placement.trainable and not placement.tied
    )


@lru_cache(maxsize=256)
def block_flops(model: ModelSpec) -> tuple[BlockFlops, ...]:
    """Return the operations of each block of a custom model for one sample.

    `forward_flops` of the model comes first, then the operations of the block's code. For the
    former a backward counts twice the forward. If a block cannot run without values, all blocks
    count 2 for each weight of a matrix and each row of features that comes in (goes out, for the
    first block).
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


def visible_share(seq_length: int, documents: Sequence[int], window: int | None = None) -> float:
    """Return the number of pairs of a query and a visible key, over the pairs of plain causal
    attention.

    Args:
        seq_length: Tokens of a row.
        documents: Lengths of the row's packed documents; whatever is left of the row sees nothing.
        window: Most keys that a query sees. None: no limit.
    """
    pairs = sum(_pairs(length, window) for length in documents)
    return 2 * pairs / (seq_length * (seq_length + 1))


def document_share(seq_length: int, document_length: float, window: int = 0) -> float:
    """Return the number of pairs of a query and a visible key in rows of equal documents, over the
    number in rows of one document.

    Args:
        seq_length: Tokens of a row.
        document_length: Length of the documents (`data.document_length`). 0: a row's.
        window: Most keys that a query sees. 0: no limit.
    """
    if not 0 < document_length < seq_length:
        return 1.0
    left, pairs = (_pairs(n, window or None) / n for n in (document_length, seq_length))
    return left / pairs


def mean_document_share(model: ModelSpec, document_length: float) -> float:
    """Return the share of `document_share` of the pairs of all layers, with their windows; 1 for a
    model without formulas (`ModelSpec.cost_model`)."""
    if (formulas := model.cost_model) is None:
        return 1.0
    s = formulas.seq_length
    windows = [formulas.layer_window(layer) for layer in range(formulas.num_layers)]
    pairs = [_pairs(s, window or None) for window in windows]
    shares = [document_share(s, document_length, window) for window in windows]
    return sum(map(mul, pairs, shares)) / sum(pairs)


def _pairs(length: float, window: int | None) -> float:
    """Return the number of pairs of a query and a visible key in a document."""
    full = length if window is None else min(window, length)  # queries with fewer keys
    return full * (full + 1) / 2 + (length - full) * full


def training_flops_per_token(model: ModelSpec, visible: float = 1.0) -> int:
    """Return the operations that training on one token needs: the numerator of MFU, over the rate
    of tokens.

    Only products count, two operations for a multiplication and its addition: matrix products,
    convolutions and attention. Recomputation, the optimizer and communication do not count.

    GPT and BERT: 3 x forward, as a backward has twice the products. With N weights that is 6 N + 12
    L h s, as in PaLM (arXiv 2204.02311, appendix B), and 6 N + 6 L h s where attention is causal:
    half of its matrix is masked, and no operation on that half is needed. With adapters (LoRA) the
    weights below have no gradient, so 4 N, and 6 for each weight of an adapter. Custom models:
    `block_flops`, forward and backward, for each of the `tokens_per_sample`.

    Args:
        model: The model.
        visible: Share of causal attention that packed documents leave (`visible_share`). GPT only.
    """
    if (formulas := model.cost_model) is None:
        return sum(map(sum, block_flops(model))) // model.tokens_per_sample
    masked = 0
    if formulas.kind == "gpt":
        layers = range(formulas.num_layers)
        attention = sum(layer_attention_flops(formulas, layer) for layer in layers)
        masked = attention - round(visible * attention / 2)
    forward = sum(forward_flops_per_token(model)) - masked
    if not formulas.lora_rank:
        return 3 * forward
    frozen = formulas.num_layers * layer_matmul_parameters(formulas)
    frozen += round(LABELLED[formulas.kind] * head_matmul_parameters(formulas))
    return 3 * forward - 2 * frozen + 6 * adapter_parameters(formulas)


@lru_cache(maxsize=256)
def adapter_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of all adapters (LoRA)."""
    if not model.lora_rank:
        return 0
    trained = (place for block in block_placements(model) for place in block if place.trainable)
    return sum(prod(place.shape) for place in trained)


def training_flops_rule(model: ModelSpec, visible: float = 1.0) -> str:
    """Return the rule of `training_flops_per_token`, for people."""
    if (formulas := model.cost_model) is None:
        return "products, convolutions and attention, forward and backward"
    weights = "4 N + 6 N of adapters" if formulas.lora_rank else "6 N"
    if formulas.kind != "gpt":
        return f"{weights} + 12 L h s"
    is_usual = formulas.num_heads * formulas.head_size == formulas.hidden_size
    if formulas.window or not is_usual:
        return (
            f"{weights} + 12 for each feature of a head and key that a token sees, causal "
            "attention once"
        )
    if visible != 1.0:
        share = f"x {visible:.3g}, the share of causal attention within documents"
        return f"{weights} + 6 L h s {share}"
    return f"{weights} + 6 L h s, causal attention once"


KEPT_BYTES = 34
"""Bytes that a layer keeps of a token for its backward in half precision, over the hidden size.

Source: arXiv 2205.05198, equation 2, without the scores."""
