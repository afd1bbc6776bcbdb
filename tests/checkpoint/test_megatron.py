"""Megatron-LM's checkpoints, as tests/checkpoint/megatron.py writes them, are the models that they
were made of."""

from __future__ import annotations

import enum
import io
import json
import random
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.exchange import OURS, make_theirs, same_bits, save_ours, tensors_of
from checkpoint.megatron import Layout, Model, gpt2, llama, write

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import compare, export_folder
from hybridpar.checkpoint.megatron import import_megatron, is_megatron
from hybridpar.cli import main
from hybridpar.config import load_toml
from hybridpar.data import train_tokenizer
from hybridpar.errors import ConfigError
from hybridpar.validate import problems

transformers = pytest.importorskip("transformers")

GPT2 = {
    "vocab_size": 101,
    "n_positions": 20,
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 70,
    "layer_norm_epsilon": 1e-3,
}
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 70,
    "max_position_embeddings": 20,
    "rms_norm_eps": 1e-3,
}
SIZES = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False},
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-bias": LLAMA | {"attention_bias": True, "mlp_bias": True},
}


def made(tmp_path: Path, name: str = "gpt2") -> tuple[Path, Model]:
    """A folder of transformers, and its weights in neutral words."""
    kind = name.partition("-")[0]
    folder = make_theirs(tmp_path / "theirs", kind, **SIZES[name])
    config = transformers.AutoConfig.from_pretrained(folder)
    return folder, {"gpt2": gpt2, "llama": llama}[kind](tensors_of(folder), config)


CASES = [
    ("gpt2", Layout()),
    ("gpt2", Layout("fused", 2)),
    ("gpt2", Layout("core", 1, 2)),
    ("gpt2", Layout("fused", 2, 2)),
    ("gpt2", Layout("legacy", 1, 1)),
    ("gpt2", Layout("legacy", 2, 2)),
    ("gpt2", Layout("oldest", 2, 1, version=0)),
    ("gpt2", Layout("oldest", 1, 2, version=1.0)),
    ("gpt2", Layout("oldest", 2, 2, version=2.0, is_zip=False)),
    ("gpt2-untied", Layout("legacy", 2, 2)),
    ("gpt2-untied", Layout("core", 1, 2, chunks=2)),
    ("gpt2", Layout("core", 4, 1, padded_to=128)),
    ("gpt2", Layout("fused", 2, safetensors=True)),
    ("gpt2", Layout("core", 1, 3)),  # uneven stages
    ("llama", Layout("fused", 1, 1)),
    ("llama", Layout("core", 2, 2)),
    ("llama", Layout("legacy", 2, 1)),
    ("llama-tied", Layout("fused", 4, 2)),
    ("llama-bias", Layout("core", 2, 1, chunks=2)),
]


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("name", "layout"),
    CASES,
    ids=lambda x: (
        x if isinstance(x, str) else (f"{x.style}-tp{x.tp}-pp{x.pp}-{x.chunks}-v{x.version}")
    ),
)
def test_it_is_the_model_that_it_was_made_of(tmp_path: Path, name: str, layout: Layout) -> None:
    theirs, model = made(tmp_path, name)
    found = import_megatron(write(tmp_path / "megatron", model, layout), tmp_path / "ours", 101)
    assert compare(found.checkpoint, theirs).ok
    back = export_folder(found.checkpoint, tmp_path / "back")
    same_bits(tensors_of(back.folder), tensors_of(theirs))
    config = load_toml(tmp_path / "ours" / "config.toml")
    assert (config.model.vocab_size, config.model.seq_length) == (101, 20)
    assert not problems(config, 1)


def test_the_folder_of_one_iteration(tmp_path: Path) -> None:
    theirs, model = made(tmp_path)
    root = write(tmp_path / "megatron", model, Layout(tp=2))
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    (root / "iter_0000100").rename(root / "release")
    assert is_megatron(root)
    assert is_megatron(root / "release")
    assert not is_megatron(theirs)
    assert not is_megatron(tmp_path / "nowhere")
    for number, folder in enumerate((root, root / "release")):
        assert compare(import_megatron(folder, tmp_path / f"{number}", 101).checkpoint, theirs).ok


def test_other_contents_of_such_files_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumerations among the arguments, states of generators, states of layers: none is loaded,
    none is in the way."""
    module = types.ModuleType("megatron.elsewhere.enums")
    backend = enum.Enum("AttnBackend", ["flash", "auto"], module=module.__name__)
    module.AttnBackend = backend  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.elsewhere"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs, model = made(tmp_path)
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    root = write(
        tmp_path / "megatron",
        model,
        Layout("fused", more={"attention_backend": backend.auto}),
        rng_state=[rng],
        opt_param_scheduler={"max_lr": 1e-4},
    )
    path = root / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)
    whole["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"x")
    whole["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.ones(
        3, dtype=torch.uint8
    )
    torch.save(whole, path)
    monkeypatch.undo()
    assert "megatron.elsewhere.enums" not in sys.modules
    found = import_megatron(root, tmp_path / "ours", 101)
    assert compare(found.checkpoint, theirs).ok
    assert "megatron.elsewhere.enums" not in sys.modules
    assert "1 tensors that take no part" in found.notes[0]


@pytest.mark.parametrize(
    ("more", "vocab_size", "rows", "says"),
    [
        ({}, None, 104, True),
        ({}, 99, 99, False),
        ({"vocab_size": 101}, None, 101, False),
        ({"vocab_size": 100, "tokenizer_type": "NullTokenizer"}, None, 101, False),
        ({"tokenizer_type": "GPT2BPETokenizer"}, None, 104, True),  # fewer than GPT-2 has
    ],
)
def test_the_size_of_the_vocabulary(
    tmp_path: Path, more: dict[str, Any], vocab_size: int | None, rows: int, says: bool
) -> None:
    _, model = made(tmp_path)
    found = import_megatron(
        write(tmp_path / "megatron", model, Layout(more=more)), tmp_path / "ours", vocab_size
    )
    words = checkpoint.load_full(found.checkpoint)[1]["blocks.0.tokens.weight"]
    assert len(words) == rows
    assert any("rows of the embedding are kept" in note for note in found.notes) is says


def test_a_tokenizer_beside_the_ranks_says_it(tmp_path: Path) -> None:
    _, model = made(tmp_path)
    root = write(
        tmp_path / "megatron", replace(model, words=torch.randn(300, 48)), Layout(padded_to=384)
    )
    train_tokenizer(["some text"], 262).save(root / "iter_0000100" / "tokenizer.json")
    found = import_megatron(root, tmp_path / "ours")
    size = checkpoint.read_manifest(found.checkpoint).config.model.vocab_size
    assert 257 <= size <= 262
    assert not found.notes
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("style", "more", "exact"),
    [
        ("core", {}, False),
        ("core", {"bias_gelu_fusion": False}, True),
        (
            "core",
            {"bias_gelu_fusion": False, "openai_gelu": True},
            True,
        ),  # Megatron Core does not look at it
        ("legacy", {"bias_gelu_fusion": False, "openai_gelu": True}, False),
        ("legacy", {"bias_gelu_fusion": None, "openai_gelu": True}, False),
    ],
)
def test_gelu_variant(tmp_path: Path, style: str, more: dict[str, Any], exact: bool) -> None:
    _, model = made(tmp_path)
    found = import_megatron(
        write(tmp_path / "megatron", model, Layout(style, more=more)), tmp_path / "ours"
    )
    activation = checkpoint.read_manifest(found.checkpoint).config.model.activation
    assert activation == ("gelu_exact" if exact else "gelu")


def test_verify_needs_megatron_core(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("megatron", "megatron.core", "megatron.core.parallel_state"):
        monkeypatch.setitem(sys.modules, name, None)
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    assert (
        main(["import", str(root), str(tmp_path / "ours"), "--vocab_size", "101", "--verify"]) == 1
    )
    assert (
        "verify = True: requires megatron-core, which cannot be imported" in capsys.readouterr().err
    )


def test_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, model = made(tmp_path)
    root = write(tmp_path / "megatron", model, Layout("fused", 2, 2))
    assert main(["import", str(root), str(tmp_path / "ours"), "--vocab_size", "200"]) == 1
    assert (
        "vocab_size = 200: must be at most 104, the number of rows of the embedding"
        in capsys.readouterr().err
    )
    assert main(["import", str(theirs), str(tmp_path / "ours"), "--vocab_size", "101"]) == 1
    assert "supported for Megatron-LM checkpoints only" in capsys.readouterr().err
    assert main(["import", str(root), str(tmp_path / "ours"), "--vocab_size", "101", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "megatron"
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    with pytest.raises(ConfigError, match="exists already"):
        import_megatron(root, tmp_path / "ours")
    assert not is_megatron(save_ours(tmp_path / "checkpoints", OURS["gpt2"]))
