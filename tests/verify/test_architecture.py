"""Keys of today's architectures on every grid: each equals one process in float64, also where heads,
groups and features do not divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from verify.test_grids import holds, make

from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn import KeyValueCache, named_placements
from hybridpar.nn.init import initialize
from hybridpar.runtime.stage import Stage

pytestmark = pytest.mark.ranks
F64 = torch.float64

GATED: dict[str, Any] = {
    "num_kv_heads": 3,
    "position": "rotary",
    "norm": "rms_norm",
    "activation": "swiglu",
    "ffn_hidden_size": 50,
    "bias": False,
    "tie_embeddings": False,
}
SCALED = {
    "rotary_scaling": "llama3",
    "rotary_factor": 8.0,
    "rotary_original_positions": 8,
    "rotary_low_factor": 0.2,
    "rotary_high_factor": 1.5,
}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_positions": 8}
LONGROPE = {
    "rotary_scaling": "longrope",
    "rotary_factor": 2.0,
    "rotary_original_positions": 8,
    "rotary_short_factors": (1.0,) * 5,
    "rotary_long_factors": (1.0, 1.5, 2.0, 3.0, 5.0),
}
QWEN2 = {**GATED, "qkv_bias": "on", "tie_embeddings": True}
QWEN3 = {**GATED, "head_dim": 10, "qk_norm": "head"}
OLMO2 = {**GATED, "norm_position": "output", "qk_norm": "full"}
PHI3 = {**GATED, **LONGROPE, "head_dim": 10}
SMOLLM3 = {**GATED, "rotary_pattern": "110", "tie_embeddings": True}
GEMMA = {
    **GATED,
    "head_dim": 10,
    "norm_position": "sandwich",
    "norm_zero_centered": True,
    "activation": "geglu",
    "embedding_scale": 48**0.5,
    "attention_scale": 0.2,
    "attention_softcap": 2.0,
    "window": 6,
    "window_pattern": "10",
    "logit_softcap": 1.5,
    "logit_scale": 2.0,
    "qk_norm": "head",
    "tie_embeddings": True,
}
GEMMA3 = {
    **GEMMA,
    "attention_softcap": 0.0,
    "window": 4,
    "window_pattern": "110",
    "window_rotary_base": 50.0,
    "rotary_scaling": "linear",
    "rotary_factor": 8.0,
}
MODELS = {
    "llama3": {**GATED, **SCALED},
    "yarn": {**GATED, **YARN},
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "gemma": GEMMA,
    "gemma3": GEMMA3,
    "biased-output": {**GATED, "out_bias": "on", "norm_position": "sandwich"},
    "zero-centred-olmo": {**OLMO2, "norm_zero_centered": True},
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("model", "tp"),
    [
        ("olmo2", 4),
        ("gemma", 3),
        ("qwen3", 4),
        ("phi3", 2),
        ("gemma3", 2),
        *[(model, 3) for model in MODELS],
        ("qwen2", 6),
        ("zero-centred-olmo", 6),
    ],
)
def test_tensor_parallelism(model: str, tp: int) -> None:
    """From tp 4 on, ranks share key heads, whose norms have partial gradients."""
    holds({"tp": tp}, make(MODELS[model]), num_batches=2)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", ["gemma", "olmo2", "qwen3", "phi3", "biased-output"])
def test_sequence_parallelism(model: str) -> None:
    config = make(MODELS[model], parallel={"sequence": True})
    holds({"tp": 3, "pp": 2}, config, num_batches=2)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("recompute", ["selective", "all"])
@pytest.mark.parametrize("model", ["gemma", "olmo2", "qwen3"])
def test_recomputation(model: str, recompute: str) -> None:
    dropout = {"dropout": 0.1, "attention_dropout": 0.2}
    pipeline = {"schedule": "2bw", "recompute": recompute}
    holds({"tp": 2, "pp": 2}, make({**MODELS[model], **dropout}, pipeline=pipeline))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("model", ["gemma", "olmo2", "qwen3", "qwen2"])
def test_split_backward_and_chunks_of_logits(model: str) -> None:
    pipeline = {"schedule": "1f1b", "zero_bubble": True, "split_backward": True}
    config = make({**MODELS[model], "logits_chunk": 5}, pipeline=pipeline)
    holds({"tp": 2, "pp": 2, "dp": 2}, config, num_batches=2)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    model = replace(make(MODELS[name]).transformer, init_std=0.3)
    stage = Stage(build_blocks(model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=F64))
    initialize(list(named_placements(stage)), seed=1)
    tokens = torch.arange(28).view(2, 14) * 7 % 61
    layers = range(1, model.num_layers + 1)
    caches = {str(layer): KeyValueCache(14) for layer in layers}

    def logits(positions: torch.Tensor, caches: dict[str, KeyValueCache]) -> torch.Tensor:
        batch = {"tokens": tokens[:, positions], "positions": positions}
        x = stage.blocks["0"](None, batch, None)
        for layer in map(str, layers):
            x = stage.blocks[layer](x, batch, None, caches.get(layer))
        return stage.blocks[str(model.num_layers + 1)].logits(x)

    with torch.no_grad():
        steps = [torch.arange(5), *torch.arange(5, 14).split(1)]
        one_by_one = torch.cat([logits(positions, caches) for positions in steps], 1)
        torch.testing.assert_close(one_by_one, logits(torch.arange(14), {}), rtol=0, atol=1e-12)
