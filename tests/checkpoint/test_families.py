"""Today's families against transformers: tiny random models, in both forms of config.json, give
equal logits on every grid and come back equal."""

from __future__ import annotations

import copy
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import edit_config, make_theirs, same_bits, tensors_of
from checkpoint.lifted import exact_logits
from checkpoint.test_huggingface import logits_on_grid
from ranks import run_ranks
from torch import Tensor
from verify.test_grids import holds

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import export_folder, import_folder
from hybridpar.checkpoint.huggingface.source import WeightFiles
from hybridpar.checkpoint.huggingface.verify import our_logits, random_batch, their_logits
from hybridpar.checkpoint.stages import whole_model
from hybridpar.config import Config, ModelConfig, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 70,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 10,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.5, 5.0],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"rms_norm_eps": 1e-5}),
    "llama3.2": ("llama", {"rope_parameters": LLAMA3, "head_dim": 10, "tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2.5": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "head_dim": 8}),
    "olmo2": ("olmo2", {}),
    "olmo2-biased": ("olmo2", {"attention_bias": True}),
    "phi3": ("phi3", {"original_max_position_embeddings": 40}),
    "phi3-long": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 16,
        },
    ),
    "phi3-short": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 40,
            "max_position_embeddings": 80,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "phi3-window": ("phi3", {"original_max_position_embeddings": 40, "sliding_window": 9}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "gemma2": ("gemma2", {"sliding_window": 7, "head_dim": 10, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 7,
            "head_dim": 10,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "sliding_window": 7, "head_dim": 10}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 10,
        },
    ),
    "qwen3moe-step": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 22,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 3}),
    "gemma3-capped": (
        "gemma3",
        {
            "sliding_window": 50,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
}
OTHERS = {
    "mistral": ["llama", "mistral"],
    "phi3": ["llama", "phi3"],
    "phi3-window": ["mistral", "phi3"],
}
"""Families of models that lack what only their own family has, and that an export writes first."""
FORMS = ("new", "old")
_TOKENS = 40


def made(folder: Path, name: str, form: str = "new") -> Path:
    """A folder of a model of theirs; `old`: with the keys of transformers 4."""
    kind, settings = MODELS[name]
    theirs = make_theirs(folder, kind, **copy.deepcopy({**SIZES, **settings}))
    if form == "old":
        plain = json.loads((theirs / "config.json").read_text())
        edit_config(theirs, **in_old_form(plain))
    return theirs


def in_old_form(plain: dict[str, Any]) -> dict[str, Any]:
    """The changes that make transformers 4's config.json of transformers 5's."""
    rope = plain["rope_parameters"]
    experts = {"num_local_experts": "REMOVE", "num_experts": plain.get("num_local_experts")}
    changes: dict[str, Any] = experts if plain["model_type"] == "qwen3_moe" else {}
    changes |= {
        "rope_parameters": "REMOVE",
        "dtype": "REMOVE",
        "torch_dtype": plain["dtype"],
    }
    local = rope.get("sliding_attention")
    if local is not None:
        changes["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    scaling = {key: value for key, value in rope.items() if key not in _OUTSIDE}
    changes["rope_theta"] = rope["rope_theta"]
    changes["partial_rotary_factor"] = rope.get("partial_rotary_factor", "REMOVE")
    changes["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    if plain["model_type"] == "phi3" and changes["rope_scaling"]:
        del scaling["original_max_position_embeddings"]
        scaling["type"] = scaling.pop("rope_type")
    return changes


_OUTSIDE = ("rope_theta", "partial_rotary_factor")


def batch_of(model: ModelConfig) -> dict[str, Tensor]:
    return random_batch(replace(model, seq_length=_TOKENS, max_positions=_TOKENS))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    assert theirs.std() > 0.1
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_the_way_back(tmp_path: Path, name: str, form: str) -> None:
    """1e-6: transformers casts norms, angles and softmax to float32. 1e-9: these casts lifted."""
    theirs = made(tmp_path / "theirs", name, form)
    ours = import_folder(theirs, tmp_path / "ours")
    config, weights = checkpoint.load_full(ours.checkpoint)
    model = config.transformer
    batch = batch_of(model)
    logits = our_logits(model, whole_model(model, weights, torch.float64), batch)["words"]
    assert difference(logits, their_logits(theirs, model, batch)["words"]) < 1e-6
    exact = exact_logits(theirs, batch["tokens"])
    assert difference(logits, exact) < 1e-9
    back = export_folder(ours.checkpoint, tmp_path / "back", max_file_bytes=60_000).folder
    assert len(list(back.glob("*.safetensors"))) > 1
    kinds = [json.loads((one / "config.json").read_text())["model_type"] for one in (theirs, back)]
    if kinds[0] == kinds[1]:
        same_bits(tensors_of(back), tensors_of(theirs))
    else:  # without its own features it is another family
        assert kinds[::-1] == OTHERS[name]
    assert difference(exact_logits(back, batch["tokens"]), exact) < 1e-12
    again, same = checkpoint.load_full(import_folder(back, tmp_path / "again").checkpoint)
    assert again.transformer == model
    same_bits(same, weights)


def logits_in_float64(start: Path, tp: int, pp: int) -> dict[str, Tensor]:
    """Logits of a checkpoint on a grid."""
    model = checkpoint.read_manifest(start).config.model
    sections = {
        "parallel": {"tp": tp, "pp": pp, "dp": 1},
        "pipeline": {"num_microbatches": 2},
        "train": {"dtype": "fp64"},
    }
    config = from_mapping(sections, Config(model))
    engine = Engine(JobPlan(config), ProcessGrid(tp=tp, pp=pp, dp=1), torch.device("cpu"))
    checkpoint.start_from(start, engine)
    return logits_on_grid(engine, batch_of(model))


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("olmo2-biased", 3, 1),
        ("qwen3", 2, 1),
        ("smollm3", 1, 2),
        *[(name, tp, pp) for name in MODELS for tp, pp in ((2, 1), (3, 1), (1, 2))],
    ],
)
def test_logits_on_grids(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    theirs = made(tmp_path / "theirs", name)
    ours = import_folder(theirs, tmp_path / "ours")
    found = run_ranks(logits_in_float64, tp * pp, ours.checkpoint, tp, pp)[-1]["words"]
    model = checkpoint.read_manifest(ours.checkpoint).config.transformer
    exact = exact_logits(theirs, batch_of(model)["tokens"])
    assert difference(found, exact) < 1e-9


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("name", MODELS)
def test_training_on_a_grid_equals_one_process(tmp_path: Path, name: str) -> None:
    ours = import_folder(made(tmp_path / "theirs", name), tmp_path / "ours")
    model = checkpoint.read_manifest(ours.checkpoint).config.transformer
    sections = {"pipeline": {"num_microbatches": 2}, "train": {"micro_batch_size": 2}}
    holds({"tp": 2, "pp": 2, "dp": 2}, from_mapping(sections, Config(model)), num_batches=2)


def test_an_import_holds_one_parameter_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = made(tmp_path / "theirs", "qwen3")
    held: list[weakref.ref[Tensor]] = []
    most = 0
    read = WeightFiles.read

    def counted(files: WeightFiles, name: str) -> Tensor:
        nonlocal most
        tensor = read(files, name)
        held.append(weakref.ref(tensor))
        alive = (one() for one in held)
        most = max(most, sum(one.nbytes for one in alive if one is not None))
        return tensor

    monkeypatch.setattr(WeightFiles, "read", counted)
    import_folder(theirs, tmp_path / "ours")
    assert len(held) > 30
    largest = max(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert most <= 2 * largest  # gate and up are one parameter
