"""Rotary frequencies of published models, against transformers' (float32) and known values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridpar.nn.rotary import UNSCALED, RotaryScaling
from hybridpar.ops.rotary import POWERS

LONG = [1.0 + 0.25 * i for i in range(48)]
SHORT = [1.0 + 0.01 * i for i in range(48)]
PUBLISHED: dict[str, tuple[RotaryScaling, float, int, dict[str, Any]]] = {
    "Llama 3.1": (
        RotaryScaling("llama3", 8.0, 8192, 1.0, 4.0),
        500_000.0,
        128,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "Llama 3.2": (
        RotaryScaling("llama3", 32.0, 8192, 1.0, 4.0),
        500_000.0,
        64,
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "Qwen 2.5, yarn": (RotaryScaling("yarn", 4.0, 32768), 1e6, 128, {"factor": 4.0}),
    "gpt-oss, yarn": (
        RotaryScaling("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        150_000.0,
        64,
        {"factor": 32.0, "truncate": False},
    ),
    "Gemma 3, linear": (RotaryScaling("linear", 8.0), 1e6, 256, {"factor": 8.0}),
    "Phi-3.5": (
        RotaryScaling(
            "longrope",
            32.0,
            4096,
            short_factors=tuple(SHORT),
            long_factors=tuple(LONG),
        ),
        10_000.0,
        96,
        {"factor": 32.0, "short_factor": SHORT, "long_factor": LONG},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("length", [100, 10_000])
def test_against_transformers(name: str, length: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = pytest.importorskip("transformers").LlamaConfig
    scaling, base, features, rope = PUBLISHED[name]
    theirs = config(
        hidden_size=features,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    theirs.rope_parameters = {
        **rope,
        "rope_type": scaling.kind,
        "rope_theta": base,
        "original_max_position_embeddings": scaling.original_positions or 8192,
    }
    expected, magnitude = utils.ROPE_INIT_FUNCTIONS[scaling.kind](theirs, "cpu", seq_len=length)
    found = scaling.frequencies(base, features, length)
    torch.testing.assert_close(torch.tensor(found.values), expected, rtol=2e-6, atol=0)
    assert found.magnitude == pytest.approx(magnitude)


def test_known_values() -> None:
    """Llama 3.1: waves of up to 2048 positions are unchanged, from 8192 on 8 times as long."""
    scaling, base, features, _ = PUBLISHED["Llama 3.1"]
    found = scaling.frequencies(base, features, 1).values
    plain = [base ** (-2 * i / features) for i in range(features // 2)]
    for scaled, frequency in zip(found, plain, strict=True):
        wave = 2 * math.pi / frequency
        if wave < 2048:
            assert scaled == frequency
        elif wave > 8192:
            assert scaled == frequency / 8
        else:
            assert frequency / 8 < scaled < frequency
    assert PUBLISHED["Qwen 2.5, yarn"][0].frequencies(1e6, 128, 1).magnitude == pytest.approx(
        0.1 * math.log(4) + 1
    )
    phi = PUBLISHED["Phi-3.5"][0].frequencies(1e4, 96, 1)
    assert phi.magnitude == pytest.approx(1.190238, abs=1e-6)
    assert UNSCALED.frequencies(1e4, 8, 1) is POWERS
