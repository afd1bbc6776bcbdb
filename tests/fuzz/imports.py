"""The readers of what other programs have written: folders of Hugging Face and of Megatron-LM,
files of torch.save."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface.export import export_folder
from hybridpar.checkpoint.huggingface.import_model import import_folder
from hybridpar.checkpoint.megatron import import_megatron
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.train.engine import Engine

from .mutate import mutate_bytes, mutate_json, mutate_tensors
from .pickles import mutate_pickled
from .samples import TINY
from .target import Target


def make_theirs(folder: Path) -> list[Path]:
    made = []
    llama = {
        "position": "rotary",
        "norm": "rms_norm",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
    }
    neox = {"position": "rotary", "rotary_fraction": 0.5, "parallel_residual": True}
    for name, changes, bytes_a_file in (
        ("gpt2", {}, 10**9),
        ("llama", llama, 4000),
        ("gpt_neox", neox, 10**9),
    ):
        model = replace(TINY.model, **changes)  # type: ignore[arg-type]
        engine = Engine(JobPlan(replace(TINY, model=model)), ProcessGrid(), torch.device("cpu"))
        saved = checkpoint.save(folder / "ours" / name, engine, "")
        export_folder(saved, folder / name, max_file_bytes=bytes_a_file)
        made.append(folder / name)
    return made


def make_pickled(folder: Path) -> list[Path]:
    """Folders with files of torch.save: one file, an old one, several."""
    made = []
    for i, (name, is_zip) in enumerate((("gpt2", True), ("gpt2", False), ("llama", True))):
        (made_here := folder / str(i)).mkdir()
        theirs = next(path for path in make_theirs(made_here) if path.name == name)
        for path in theirs.glob("*.safetensors"):
            file = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
            torch.save(load_file(path), theirs / file, _use_new_zipfile_serialization=is_zip)
            path.unlink()
        for path in theirs.glob("*.index.json"):
            text = (
                path.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            )
            (theirs / "pytorch_model.bin.index.json").write_text(text)
            path.unlink()
        made.append(theirs)
    return made


ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "ffn_hidden_size": 6,
    "max_position_embeddings": 8,
    "bias_gelu_fusion": True,
    "hidden_dropout": 0.0,
}


def make_megatron(folder: Path) -> list[Path]:
    """A GPT as newer versions write it, on two tensor ranks; as old ones did; on two stages,
    without pickles."""
    plain = argparse.Namespace(
        **ARGUMENTS, tensor_model_parallel_size=2, params_dtype=torch.float32, data_path=["x"]
    )
    for rank in range(2):
        put(
            folder / "new",
            f"mp_rank_{rank:02d}",
            lambda file, rank=rank: torch.save(
                {
                    "args": plain,
                    "checkpoint_version": 3.0,
                    "iteration": 1,
                    "model": megatron(range(2), rank, 2),
                },
                file / "model_optim_rng.pt",
            ),
        )
    whole = megatron(range(2))
    embedding = {
        name: {"weight": whole.pop(f"embedding.{name}.weight")}
        for name in ("word_embeddings", "position_embeddings")
    }
    encoder = {name.removeprefix("decoder."): tensor for name, tensor in whole.items()}
    put(
        folder / "old",
        "mp_rank_00",
        lambda file: torch.save(
            {
                "args": argparse.Namespace(**ARGUMENTS),
                "model": {"language_model": {"embedding": embedding, "encoder": encoder}},
            },
            file / "model_optim_rng.pt",
            _use_new_zipfile_serialization=False,
        ),
    )
    for stage in range(2):
        put(
            folder / "safe",
            f"mp_rank_00_{stage:03d}",
            lambda file, stage=stage: save_file(
                megatron(range(stage, stage + 1)), file / "model.safetensors"
            ),
        )
    (folder / "safe" / "iter_0000001" / "args.json").write_text(json.dumps(ARGUMENTS))
    return [folder / name for name in ("new", "old", "safe")]


def put(folder: Path, rank: str, save: Callable[[Path], object]) -> None:
    """One rank's file, and the one that says which iteration is the newest."""
    (inner := folder / "iter_0000001" / rank).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    save(inner)


def megatron(layers: range, rank: int = 0, tp: int = 1) -> dict[str, Tensor]:
    """The tensors of a stage with these of two layers, on a tensor rank, by the names of newer
    versions."""

    def linear(name: str, rows: int, columns: int, dim: int) -> dict[str, Tensor]:
        weight = torch.ones(rows, columns).chunk(tp, dim)[rank]
        bias = torch.zeros(rows)
        return {
            f"{name}.weight": weight.clone(),
            f"{name}.bias": bias.chunk(tp)[rank].clone() if dim == 0 else bias,
        }

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": torch.ones(8), f"{name}.bias": torch.zeros(8)}

    words = torch.ones(20, 8).chunk(tp)[rank].clone()
    found: dict[str, Tensor] = {}
    if layers.start == 0:
        found |= {
            "embedding.word_embeddings.weight": words,
            "embedding.position_embeddings.weight": torch.ones(8, 8),
        }
    for i in range(len(layers)):
        at = f"decoder.layers.{i}"
        found |= norm(f"{at}.input_layernorm") | linear(f"{at}.self_attention.linear_qkv", 24, 8, 0)
        found |= linear(f"{at}.self_attention.linear_proj", 8, 8, 1) | norm(
            f"{at}.pre_mlp_layernorm"
        )
        found |= linear(f"{at}.mlp.linear_fc1", 6, 8, 0) | linear(f"{at}.mlp.linear_fc2", 8, 6, 1)
    if layers.stop == 2:
        found |= norm("decoder.final_layernorm") | (
            {"output_layer.weight": words} if layers.start else {}
        )
    return found


def reads(convert: Callable[[Path, Path], Any]) -> Callable[[Path], None]:
    """Result of an import of a folder, which is then removed."""

    def read(folder: Path) -> None:
        output = folder / "imported"
        try:
            convert(folder, output)
        finally:
            shutil.rmtree(output, ignore_errors=True)

    return read


TARGETS = (
    Target(
        "hugging face",
        make_theirs,
        reads(import_folder),
        {".safetensors": mutate_tensors, "config.json": mutate_json, "index.json": mutate_json},
        share=0.1,
    ),
    Target("pickled", make_pickled, reads(import_folder), {".bin": mutate_pickled}, share=0.3),
    Target(
        "megatron",
        make_megatron,
        reads(import_megatron),
        {
            ".pt": mutate_pickled,
            ".safetensors": mutate_tensors,
            "args.json": mutate_json,
            ".txt": mutate_bytes,
        },
        renames=True,
        share=0.3,
    ),
)
