"""Blocks that follow from pipeline.recompute and the keys of [model]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridpar.config import ModelConfig
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import Recomputation, build_blocks, parse_recompute, recomputed_blocks
from hybridpar.models.heads import padded_labelled_rows
from hybridpar.nn import LayerNorm, RMSNorm
from hybridpar.random import RandomKey


@pytest.mark.parametrize(
    ("text", "what", "numbers"),
    [
        ("none", "", set()),
        ("all", "", {0, 1, 2, 3}),
        ("0", "", {0}),
        ("0,2-3", "", {0, 2, 3}),
        ("3,0-1", "", {0, 1, 3}),
        ("stage", "stage", {0, 1, 2}),
        ("stage:1", "stage", {1}),
        ("stage:0,1-2", "stage", {0, 1, 2}),
        ("selective", "selective", {0, 1, 2, 3}),
        ("selective:3", "selective", {3}),
    ],
)
def test_layers_and_stages_to_recompute(text: str, what: str, numbers: set[int]) -> None:
    assert parse_recompute(text, num_layers=4, num_stages=3) == (what, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "-1",
        "1-",
        "a",
        "2-9",
        "0;1",
        "3-1",
        "0,stage:1",
        "all,0",
        "stages",
        "none:0",
        "selective:4",
        "selective:",
    ],
)
def test_bad_layers(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.recompute.*layers from 0 to 3.*try 'all'"):
        parse_recompute(text, 4, 3)


@pytest.mark.parametrize(
    "text", ["stage:", "stage:3", "stage:all", "stage:2-1", "stage:0-99999999999999"]
)
def test_bad_stages(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline\.recompute.*from 0 to 2 \(parallel\.pp, .* = 3\).*try 'stage'"
    ):
        parse_recompute(text, 4, 3)


def test_recomputation_of_each_stage() -> None:
    model = ModelConfig(num_layers=4)
    split = (range(0, 2), range(2, 4), range(4, 6))
    assert recomputed_blocks("none", model, split) == (Recomputation(),) * 3
    assert [r.blocks for r in recomputed_blocks("all", model, split)] == [{1}, {2, 3}, {4}]
    assert [r.blocks for r in recomputed_blocks("0,2", model, split)] == [{1}, {3}, set()]
    assert [r.selective for r in recomputed_blocks("selective:0,2", model, split)] == [
        {1},
        {3},
        set(),
    ]
    assert not any(r.whole for r in recomputed_blocks("all", model, split))
    assert recomputed_blocks("stage:0,2", model, split) == (
        Recomputation(frozenset({0, 1}), whole=True),
        Recomputation(),
        Recomputation(frozenset({4, 5}), whole=True),
    )


@pytest.mark.parametrize(
    ("keys", "eps"),
    [
        ({}, 1e-5),
        ({"norm": "rms_norm"}, 1e-6),
        ({"norm_eps": 1e-12}, 1e-12),
        ({"norm": "rms_norm", "norm_eps": 0.1}, 0.1),
        ({"kind": "bert", "norm_eps": 1e-12}, 1e-12),
    ],
)
def test_norm_eps_is_that_of_every_norm(keys: dict[str, Any], eps: float) -> None:
    model = ModelConfig(num_layers=2, **keys)
    blocks = build_blocks(model, Axis("tp"), range(model.num_blocks))
    norms = [
        m
        for block in blocks.values()
        for m in block.modules()
        if isinstance(m, LayerNorm | RMSNorm)
    ]
    assert len(norms) == (6 if model.kind == "bert" else 5)
    assert {norm.eps for norm in norms} == {eps}


@pytest.mark.parametrize("parallel", [False, True])
def test_input_of_the_mlp_of_a_layer(parallel: bool) -> None:
    """Either the layer's input, or what attention left; each sum with dropout of its own place."""
    model = ModelConfig(
        num_layers=1, hidden_size=16, num_heads=2, parallel_residual=parallel, dropout=0.5
    )
    layer: Any = build_blocks(model, Axis("tp"), [1], device="cpu", dtype=torch.float64)[1]
    for i, parameter in enumerate(layer.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    for key in (None, RandomKey.of(seed=3, step=1, sample=5)):
        attended = x + layer.attention_dropout(
            layer.attention(layer.attention_norm(x), None, key), key
        )
        fed = layer.mlp_dropout(layer.mlp(layer.mlp_norm(x if parallel else attended)), key)
        torch.testing.assert_close(layer(x, {"tokens": torch.zeros(2, 5)}, key), attended + fed)


def test_partial_rotary_positions_of_a_layer() -> None:
    model = ModelConfig(hidden_size=48, num_heads=2, position="rotary", rotary_fraction=0.3)
    with pytest.raises(
        ConfigError, match=r"rotary_fraction = 0\.3: .* a head's 24 .* takes 7; try 0\.271"
    ):
        build_blocks(model, Axis("tp"), [1])
    for fraction in (0.25, 0.271):
        layer: Any = build_blocks(replace(model, rotary_fraction=fraction), Axis("tp"), [1])[1]
        assert layer.attention.rotary_dim == 6


def test_a_position_table_of_its_own_length() -> None:
    for model in (ModelConfig(seq_length=5, max_positions=9), ModelConfig(seq_length=9)):
        embedding: Any = build_blocks(model, Axis("tp"), [0])[0]
        assert embedding.positions.weight.shape == (9, 256)
    with pytest.raises(
        ConfigError, match=r"model\.max_positions = 9: must be at least 10, the length of the input"
    ):
        embedding.positions(10)


@pytest.mark.parametrize(
    ("activation", "exact"), [("gelu", False), ("gelu_exact", True), ("swiglu", False)]
)
def test_berts_head_has_the_gelu_of_its_layers(activation: Any, exact: bool) -> None:
    model = ModelConfig(
        "bert", num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, activation=activation
    )
    head: Any = build_blocks(model, Axis("tp"), [2], device="cpu")[2]
    x = torch.linspace(-3, 3, 8)
    expected = torch.nn.functional.gelu(x, approximate="none" if exact else "tanh")
    torch.testing.assert_close(head.activation(x, None), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_labelled", [1, 5, 6, 9, 24])
def test_rows_of_berts_head_that_count_for_nothing(num_labelled: int) -> None:
    """Losses and gradients are the same where micro-batches have a fixed number of rows: 2 *
    ceil(0.15 * 12)."""
    model = ModelConfig(kind="bert", hidden_size=16, num_heads=2, seq_length=12, vocab_size=31)
    head: Any = build_blocks(
        model, Axis("tp"), [model.num_blocks - 1], device="cpu", dtype=torch.float64
    )
    (head,) = head.values()
    random = torch.Generator().manual_seed(num_labelled)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    labels = torch.full((24,), -100)
    labels[torch.randperm(24, generator=random)[:num_labelled]] = 7
    batch = {
        "tokens": labels.view(2, 12),
        "labels": labels.view(2, 12),
        "sentence_labels": torch.tensor([0, 1]),
        "num_targets": torch.tensor(3.0),
        "num_samples": torch.tensor(2.0),
    }
    rows = padded_labelled_rows(batch["labels"])
    assert len(rows) == max(num_labelled, 4)
    x = torch.randn(2, 12, 16, dtype=torch.float64, generator=random)
    results = []
    for extra in ({}, {"labelled": rows}):
        y = x.clone().requires_grad_()
        losses = head(y, batch | extra, None)
        results.append(
            [*losses.values(), *torch.autograd.grad(sum(losses.values()), [y, *head.parameters()])]
        )
    for with_all, with_rows in zip(*results, strict=True):
        torch.testing.assert_close(with_rows, with_all, rtol=1e-12, atol=1e-12)
