"""The operators of a block: which there are, what they read, and that together they are the
block."""

from __future__ import annotations

from typing import Any

import pytest
from planner import made

from hybridpar.config import Config
from hybridpar.models.cost import forward_flops_per_token
from hybridpar.placement.operators import INPUT, block_operators
from hybridpar.planner.machines.cluster import count_parameters
from hybridpar.prediction.work import KINDS

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "rotary": {"position": "rotary"},
    "llama": {
        "position": "rotary",
        "norm": "rms_norm",
        "activation": "swiglu",
        "bias": False,
        "num_kv_heads": 2,
    },
    "neox": {"position": "rotary", "rotary_fraction": 0.5, "parallel_residual": True},
    "longer table": {"max_positions": 50},
    "smoothed": {"label_smoothing": 0.1, "logits_chunk": 8},
    "bert": {"kind": "bert", "sentence_head": "none"},
    "bert, pre-norm": {"kind": "bert", "sentence_head": "none", "norm_position": "pre"},
}


def numbers(config: Config) -> dict[str, int]:
    return dict(zip(KINDS, (0, 1, config.model.num_blocks - 1), strict=True))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_they_are_all_of_the_block(variant: dict[str, Any]) -> None:
    config = made.config(seq_length=40, **variant)  # of 40 positions BERT labels 6: 15 %
    tokens = config.train.micro_batch_size * config.model.seq_length
    flops = dict(zip(KINDS, (0, *forward_flops_per_token(config.model)[-2:]), strict=True))
    for kind, number in numbers(config).items():
        operators = block_operators(config, number)
        assert sum(op.flops for op in operators) == pytest.approx(
            tokens * flops[kind], abs=tokens / 2
        )  # rounded
        assert sum(op.parameters for op in operators) == count_parameters(config.model, 1)[kind]
        assert sum(op.leaves for op in operators) == 1
        read = {i for op in operators for i in op.reads}
        for i, op in enumerate(operators):
            assert all(INPUT <= j < i for j in op.reads)
            assert op.leaves or i in read
            assert op.traffic > op.output > 0


def test_a_layer_by_hand() -> None:
    config = made.config()
    b = 2
    s = 32
    h = 64
    f = 256
    found = [(op.name, op.reads, op.flops, op.output) for op in block_operators(config, 1)]
    whole = 4 * b * s * h
    assert found == [
        ("attention_norm.layer_norm", (INPUT,), 0, whole),
        ("attention.qkv.linear", (0,), 2 * b * s * h * 3 * h, 3 * whole),
        ("scaled_dot_product_attention", (1,), 4 * b * s * s * h, whole),
        ("attention.out.linear", (2,), 2 * b * s * h * h, whole),
        ("attention.out.add", (INPUT, 3), 0, whole),
        ("mlp_norm.layer_norm", (4,), 0, whole),
        ("mlp.up.linear", (5,), 2 * b * s * h * f, 4 * whole),
        ("mlp.up.gelu", (6,), 0, 4 * whole),
        ("mlp.down.linear", (7,), 2 * b * s * f * h, whole),
        ("mlp.down.add", (4, 8), 0, whole),
    ]
    norm, product = block_operators(config, 1)[:2]
    assert norm.traffic == 2 * whole + 4 * 2 * h
    assert product.traffic == 4 * whole + 4 * 3 * h * (h + 1)


@pytest.mark.thorough
def test_functions_of_the_micro_batch_alone_are_no_operators() -> None:
    bert = block_operators(made.config(kind="bert", position="rotary"), 1)
    assert [op.name for op in bert if not op.reads] == []  # neither masks nor tables of positions
    assert sum("cat" in op.name for op in bert) == 2  # queries and keys turned, each one operator
    embedding = block_operators(made.config(kind="bert"), 0)
    assert [op.name for op in embedding if not op.reads] == [
        "tokens.embedding",
        "segments.embedding",
    ]


@pytest.mark.thorough
def test_a_loss_is_one_operator_and_bert_has_two() -> None:
    assert [op.name for op in block_operators(made.config(), 7)] == [
        "norm.layer_norm",
        "language_model.projection.linear",
        "language_model.div",
    ]
    config = made.config(kind="bert")
    bert = block_operators(config, 7)
    assert [op.name for op in bert if op.leaves] == ["language_model.div", "div"]
    projection = next(op for op in bert if op.name == "language_model.projection.linear")
    assert (
        projection.output == 4 * 2 * 5 * config.model.vocab_size
    )  # 5 of 32 positions are labelled
