"""Costs of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from custom_models import CustomGPT

from hybridpar.config import ModelConfig, load_toml
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.models.cost import (
    document_share,
    forward_flops_per_token,
    layer_matmul_parameters,
    mean_document_share,
    training_flops_per_token,
    training_flops_rule,
    visible_share,
)
from hybridpar.nn.placement import named_placements
from hybridpar.prediction.work import block_kinds


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt_345m", 355),
        ("gpt_1b3", 1313),
        ("gpt_2b2", 2157),
        ("gpt_3b8", 3780),
        ("bert_large", 336),
    ],
)
def test_models_have_the_size_in_their_name(name: str, millions: int) -> None:
    """Built on the meta device: nothing is allocated."""
    model = load_toml(f"scripts/configs/{name}.toml").model
    blocks = build_blocks(model, Axis("tp"), range(model.num_blocks))
    seen = {id(p): p.numel() for block in blocks.values() for _, p, _ in named_placements(block)}
    assert sum(seen.values()) == pytest.approx(millions * 1e6, rel=0.005)
    assert all(p.is_meta for block in blocks.values() for p in block.parameters())


def test_flops_are_six_per_matmul_weight_and_token_and_attention() -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=100,
        seq_length=32,
        vocab_size=50,
        activation="swiglu",
    )
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 100
    assert training_flops_per_token(model) == 6 * (3 * layer + 64 * 50) + 6 * 3 * 64 * 32, (
        "half the matrix"
    )
    assert len(forward_flops_per_token(model)) == model.num_blocks


def test_flops_count_the_experts_that_a_token_visits() -> None:
    model = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        ffn_hidden_size=100,
        seq_length=32,
        vocab_size=50,
        activation="swiglu",
        num_experts=6,
        router_topk=2,
        expert_ffn_hidden_size=30,
        shared_expert_ffn_hidden_size=10,
        moe_layers="011",
    )
    attention = 4 * 64 * 64
    dense = attention + 3 * 64 * 100
    active = attention + 3 * 64 * (2 * 30 + 10) + 64 * 6
    head = 64 * 50
    assert training_flops_per_token(model) == (6 * (dense + 2 * active + head) + 6 * 3 * 64 * 32), (
        "half the matrix of attention"
    )
    assert layer_matmul_parameters(model, 1, stored=True) - active == 3 * 64 * 4 * 30
    assert block_kinds(model) == ("embedding", "layer", "experts", "experts", "head")


def test_attention_of_wide_heads_in_windows() -> None:
    """A token in a window of w keys sees w - w^2 / 2s of s on average, all heads' features each."""
    model = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        head_dim=24,
        seq_length=32,
        vocab_size=50,
        activation="geglu",
        window=8,
        window_pattern="110",
    )
    features = 4 * 24
    layer = 64 * features * 4 + 3 * 64 * 4 * 64
    pairs = 2 * (8 * 32 - 8 * 8 // 2) + 32 * 32 // 2
    assert training_flops_per_token(model) == (
        6 * (3 * layer + 64 * 50) + 12 * features * pairs // 32
    )
    first, full, *_ = sorted(set(forward_flops_per_token(model)[1:-1]))
    assert full - first == 4 * features * (32 - 14)


def test_the_whole_attention_matrix_counts_where_nothing_is_masked() -> None:
    model = ModelConfig(
        "bert", num_layers=3, hidden_size=64, num_heads=4, seq_length=32, vocab_size=50
    )
    layer = 12 * 64 * 64
    head = round(2 * 0.15 * (64 * 50 + 64 * 64))
    assert training_flops_per_token(model) == 6 * 3 * layer + 12 * 3 * 64 * 32 + 3 * head


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("documents", [(12,), (5, 1, 6), (1,) * 12, (7, 2)])
def test_the_share_of_causal_attention_counts_pairs(
    documents: tuple[int, ...], window: int | None
) -> None:
    """Rows of 12, of which the last has padding at its end."""
    seen = [
        sum(1 for key in range(query + 1) if window is None or key > query - window)
        for length in documents
        for query in range(length)
    ]
    assert visible_share(12, documents, window) == pytest.approx(sum(seen) / (12 * 13 / 2))


@pytest.mark.parametrize("window", [0, 1, 3, 40])
@pytest.mark.parametrize("length", [1, 3, 4, 12])
def test_equal_documents_leave_a_share_of_what_a_window_shows(length: int, window: int) -> None:
    documents = [length] * (12 // length)
    alone = visible_share(12, [12], window or None)
    expected = visible_share(12, documents, window or None) / alone
    assert document_share(12, length, window) == pytest.approx(expected)


def test_the_share_of_all_layers_counts_their_windows() -> None:
    """Two layers with a window of 4, and one without; documents of 3 tokens in rows of 12."""
    model = ModelConfig(num_layers=3, seq_length=12, window=4, window_pattern="110")
    alone, packed = (
        sum(visible_share(12, documents, window) for window in (4, 4, None))
        for documents in ([12], [3] * 4)
    )
    assert mean_document_share(model, 3) == pytest.approx(packed / alone)
    assert mean_document_share(model, 0) == 1
    first, *_, last = forward_flops_per_token(model, 3)
    assert (first, last) == (0, forward_flops_per_token(model)[-1])
    plain = forward_flops_per_token(replace(model, window=0))[1]
    packed_layer = forward_flops_per_token(replace(model, window=0), 3)[1]
    attention = 4 * 12 * model.num_heads * model.head_size
    assert plain - packed_layer == attention - round(attention * 4 / 13)


def test_attention_within_documents_takes_its_share_of_the_flops() -> None:
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, seq_length=32, vocab_size=50)
    plain = training_flops_per_token(model)
    attention = 6 * 3 * 64 * 32
    assert training_flops_per_token(model, 0.25) == plain - attention * 3 // 4
    assert "x 0.25" in training_flops_rule(model, 0.25)
    assert "x" not in training_flops_rule(model).replace("6 N + 6 L h s", "")


class WithFormulas(CustomGPT):
    @property
    def cost_model(self) -> ModelConfig:
        return self.text_format


def test_a_custom_model_may_have_the_costs_of_a_gpt() -> None:
    custom = WithFormulas(depth=3)
    gpt = custom.text_format
    for cost in (forward_flops_per_token, training_flops_per_token, block_kinds):
        assert cost(custom) == cost(gpt)
