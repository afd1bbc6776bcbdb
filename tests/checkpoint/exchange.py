"""Shared by the tests of exchange with Hugging Face: models of theirs with random weights,
checkpoints of ours."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import export_folder
from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import build_blocks
from hybridpar.nn.placement import named_placements
from hybridpar.runtime.stage import Stage
from hybridpar.train.engine import Engine

OURS = {
    "gpt2": ModelConfig(
        num_layers=2, hidden_size=48, num_heads=3, ffn_hidden_size=70, seq_length=20, vocab_size=101
    ),
    "llama": ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=70,
        seq_length=20,
        vocab_size=101,
        position="rotary",
        norm="rms_norm",
        activation="swiglu",
        bias=False,
        tie_embeddings=False,
    ),
    "gpt_neox": ModelConfig(
        num_layers=2,
        hidden_size=48,
        num_heads=3,
        ffn_hidden_size=70,
        seq_length=20,
        vocab_size=101,
        position="rotary",
        rotary_fraction=0.25,
        parallel_residual=True,
        activation="gelu_exact",
        tie_embeddings=False,
    ),
    "bert": ModelConfig(
        kind="bert",
        num_layers=2,
        hidden_size=48,
        num_heads=3,
        ffn_hidden_size=70,
        seq_length=20,
        vocab_size=101,
        activation="gelu_exact",
        norm_eps=1e-12,
    ),
}


def random_like(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Equal numbers for equal names, some 0.2 in size: biases and norms, too, so that nothing can
    be mixed up."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (0.2 * torch.randn(shape, generator=generator)).to(dtype)


def save_ours(root: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of one process with random weights; its folder."""
    stage = Stage(build_blocks(model, Axis("tp"), range(model.num_blocks)))
    placements = {name: place for name, _, place in named_placements(stage)}
    weights = {name: random_like(name, place.shape, dtype) for name, place in placements.items()}
    return checkpoint.save_weights(root, Config(model, ParallelConfig(dp=1)), weights, placements)


CONFIGS = {"gemma3": "Gemma3TextConfig"}
"""Classes of configurations that are not named as their models."""


def make_theirs(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder as transformers saves it, of a model with random weights."""
    transformers = pytest.importorskip("transformers")
    name = {
        "gpt2": "GPT2",
        "llama": "Llama",
        "mistral": "Mistral",
        "gpt_neox": "GPTNeoX",
        "bert": "Bert",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "olmo2": "Olmo2",
        "phi3": "Phi3",
        "smollm3": "SmolLM3",
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "mixtral": "Mixtral",
        "qwen3_moe": "Qwen3Moe",
        "olmoe": "Olmoe",
    }[kind]
    head = {"gpt2": "LMHeadModel", "bert": "ForPreTraining"}.get(kind, "ForCausalLM")
    model = getattr(transformers, name + settings.pop("head", head))(
        getattr(transformers, CONFIGS.get(kind, f"{name}Config"))(**settings)
    )
    dtype = settings.get("dtype", torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(random_like(key, parameter.shape))
    model.to(dtype).save_pretrained(folder)
    return folder


def start_engine(start: Path, tp: int, pp: int, dp: int = 1, **train: Any) -> Engine:
    """An engine of this job that has started from a checkpoint."""
    model = checkpoint.read_manifest(start).config.model
    config = Config(model, ParallelConfig(tp, pp, dp), PipelineConfig("1f1b", 2))
    engine = Engine(JobPlan(config), ProcessGrid(tp=tp, pp=pp, dp=dp), torch.device("cpu"))
    checkpoint.start_from(start, engine)
    return engine


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of theirs."""
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    plain = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in plain.items() if value != "REMOVE"}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"}
    )


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    different = [
        name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    ]
    assert not different, different


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def folder_of(tmp_path: Path, kind: str = "llama", **options: Any) -> Path:
    """A folder of theirs, made by export."""
    return export_folder(
        save_ours(tmp_path / "made", OURS[kind]), tmp_path / "theirs", **options
    ).folder
