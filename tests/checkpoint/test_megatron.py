"""Megatron-LM's checkpoints, as tests/checkpoint/megatron.py writes them, are the models that they were made of."""

from __future__ import annotations

import enum
import io
import json
import os
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
from checkpoint.megatron import Layout, Model, arguments, gpt2, llama, write
from checkpoint.test_pickled import Evil
from safetensors.torch import load_file, save_file

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import compare, export_folder
from hybridpar.checkpoint.megatron import import_megatron, is_megatron
from hybridpar.cli import main
from hybridpar.config import load_toml
from hybridpar.data import train_tokenizer
from hybridpar.errors import CheckpointError, ConfigError, HybridparError
from hybridpar.validate import problems

transformers = pytest.importorskip("transformers")

GPT2 = {"vocab_size": 101, "n_positions": 20, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_inner": 70,
        "layer_norm_epsilon": 1e-3}
LLAMA = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 70, "max_position_embeddings": 20, "rms_norm_eps": 1e-3}
SIZES = {
    "gpt2": GPT2, "gpt2-untied": GPT2 | {"tie_word_embeddings": False}, "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-bias": LLAMA | {"attention_bias": True, "mlp_bias": True}}


def made(tmp_path: Path, name: str = "gpt2") -> tuple[Path, Model]:
    """A folder of transformers, and its weights in neutral words."""
    kind = name.partition("-")[0]
    folder = make_theirs(tmp_path / "theirs", kind, **SIZES[name])
    config = transformers.AutoConfig.from_pretrained(folder)
    return folder, {"gpt2": gpt2, "llama": llama}[kind](tensors_of(folder), config)


CASES = [
    ("gpt2", Layout()), ("gpt2", Layout("fused", 2)), ("gpt2", Layout("core", 1, 2)), ("gpt2", Layout("fused", 2, 2)),
    ("gpt2", Layout("legacy", 1, 1)), ("gpt2", Layout("legacy", 2, 2)), ("gpt2", Layout("oldest", 2, 1, version=0)),
    ("gpt2", Layout("oldest", 1, 2, version=1.0)), ("gpt2", Layout("oldest", 2, 2, version=2.0, is_zip=False)),
    ("gpt2-untied", Layout("legacy", 2, 2)), ("gpt2-untied", Layout("core", 1, 2, chunks=2)),
    ("gpt2", Layout("core", 4, 1, padded_to=128)), ("gpt2", Layout("fused", 2, safetensors=True)),
    ("gpt2", Layout("core", 1, 3)),  # uneven stages
    ("llama", Layout("fused", 1, 1)), ("llama", Layout("core", 2, 2)), ("llama", Layout("legacy", 2, 1)),
    ("llama-tied", Layout("fused", 4, 2)), ("llama-bias", Layout("core", 2, 1, chunks=2)),
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else (
    f"{x.style}-tp{x.tp}-pp{x.pp}-{x.chunks}-v{x.version}"))
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


def test_what_else_such_files_hold_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerations among the arguments, states of generators, states of layers: none is loaded, none is in the way."""
    module = types.ModuleType("megatron.core.transformer.enums")
    backend = enum.Enum("AttnBackend", ["flash", "auto"], module=module.__name__)
    module.AttnBackend = backend  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs, model = made(tmp_path)
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
           "torch_rng_state": torch.get_rng_state()}
    root = write(tmp_path / "megatron", model, Layout("fused", more={"attention_backend": backend.auto}),
                 rng_state=[rng], opt_param_scheduler={"max_lr": 1e-4})
    path = root / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)
    whole["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"x")
    whole["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.ones(3, dtype=torch.uint8)
    torch.save(whole, path)
    monkeypatch.undo()
    assert "megatron.core.transformer.enums" not in sys.modules
    found = import_megatron(root, tmp_path / "ours", 101)
    assert compare(found.checkpoint, theirs).ok
    assert "megatron.core.transformer.enums" not in sys.modules
    assert "1 tensors that take no part" in found.notes[0]


@pytest.mark.parametrize(("more", "vocab_size", "rows", "says"), [
    ({}, None, 104, True), ({}, 99, 99, False), ({"vocab_size": 101}, None, 101, False),
    ({"vocab_size": 100, "tokenizer_type": "NullTokenizer"}, None, 101, False),
    ({"tokenizer_type": "GPT2BPETokenizer"}, None, 104, True),  # fewer than GPT-2 has
])
def test_the_size_of_the_vocabulary(tmp_path: Path, more: dict[str, Any], vocab_size: int | None, rows: int,
                                    says: bool) -> None:
    _, model = made(tmp_path)
    found = import_megatron(write(tmp_path / "megatron", model, Layout(more=more)), tmp_path / "ours", vocab_size)
    words = checkpoint.load_full(found.checkpoint)[1]["blocks.0.tokens.weight"]
    assert len(words) == rows
    assert any("rows of the embedding are kept" in note for note in found.notes) is says


def test_a_tokenizer_beside_the_ranks_says_it(tmp_path: Path) -> None:
    _, model = made(tmp_path)
    root = write(tmp_path / "megatron", replace(model, words=torch.randn(300, 48)), Layout(padded_to=384))
    train_tokenizer(["some text"], 262).save(root / "iter_0000100" / "tokenizer.json")
    found = import_megatron(root, tmp_path / "ours")
    size = checkpoint.read_manifest(found.checkpoint).config.model.vocab_size
    assert 257 <= size <= 262
    assert not found.notes
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("more", "exact"), [
    ({}, False), ({"bias_gelu_fusion": False}, True), ({"bias_gelu_fusion": False, "openai_gelu": True}, False)])
def test_which_gelu_it_was(tmp_path: Path, more: dict[str, Any], exact: bool) -> None:
    _, model = made(tmp_path)
    found = import_megatron(write(tmp_path / "megatron", model, Layout(more=more)), tmp_path / "ours")
    activation = checkpoint.read_manifest(found.checkpoint).config.model.activation
    assert activation == ("gelu_exact" if exact else "gelu")


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, root: Path, error: type[HybridparError], match: str, vocab_size: int | None = 101) -> None:
    with pytest.raises(error, match=match):
        import_megatron(root, tmp_path / "ours", vocab_size)
    assert not list(tmp_path.glob("*ours*"))


@pytest.mark.parametrize(("more", "says"), [
    ({"num_experts": 8}, "args: num_experts = 8: hybridpar has no such feature for megatron; try None"),
    ({"qk_layernorm": True}, "qk_layernorm = True"), ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
    ({"rotary_percent": 0.5}, r"rotary_percent = 0\.5"), ({"squared_relu": True}, "squared_relu"),
    ({"window_size": (128, 0)}, "window_size = 'tuple'"), ({"mtp_num_layers": 1}, "mtp_num_layers"),
    ({"position_embedding_type": "none"}, "'none': hybridpar has only learned_absolute, rope"),
    ({"normalization": "other"}, "normalization = 'other': hybridpar has only LayerNorm, RMSNorm"),
    ({"add_bias_linear": False, "add_qkv_bias": True}, "add_qkv_bias_alone = True"),
    ({"kv_channels": 16}, "kv_channels = 16: must be hidden_size / num_attention_heads = 48 / 4"),
    ({"num_layers": None}, "num_layers = None: is missing"), ({"num_layers": 10**9}, "1000000000: the files have"),
    ({"hidden_size": 2**30, "kv_channels": None}, "longest dimension"), ({"num_attention_heads": "4"}, "= '4'"),
    ({"add_position_embedding": False}, "add_position_embedding = False"),
    ({"tensor_model_parallel_size": 4}, "has files of 2 tensor and 1 pipeline ranks, its arguments say 4 and 1"),
])
def test_what_we_do_not_have_is_named(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    _, model = made(tmp_path)
    root = write(tmp_path / "megatron", model, Layout(tp=2, more=more))
    refused(tmp_path, root, HybridparError, says)


def test_ranks_that_are_missing_or_differ(tmp_path: Path) -> None:
    _, model = made(tmp_path)
    root = write(tmp_path / "megatron", model, Layout("fused", 2, 2))
    path = root / "iter_0000100" / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = torch.load(path, weights_only=False)

    def with_(**changes: Any) -> None:
        torch.save(whole | changes, path)

    name = "decoder.layers.1.mlp.linear_fc2.bias"
    with_(model=whole["model"] | {name: whole["model"][name] + 1})
    refused(tmp_path, root, CheckpointError, r"decoder\.layers\.3\.mlp\.linear_fc2\.bias differs between tensor ranks")
    with_(model={key: value for key, value in whole["model"].items() if key != name})
    refused(tmp_path, root, CheckpointError, rf"{name} is not on all tensor ranks of pipeline rank 1")
    with_(model=whole["model"] | {name: whole["model"][name].bfloat16()})
    refused(tmp_path, root, CheckpointError, "has types BF16, F32 on different ranks")
    with_(model=whole["model"] | {"output_layer.weight": whole["model"]["output_layer.weight"] + 1})
    refused(tmp_path, root, CheckpointError, r"output_layer\.weight and embedding.* differ, but args ties them")
    with_(model=whole["model"] | {name: torch.tensor(1.0)})
    refused(tmp_path, root, CheckpointError, f"{name.replace('.1.', '.3.')} differs between tensor ranks")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with_(model=whole["model"] | {name: torch.tensor(1.0)})
    refused(tmp_path, root, CheckpointError, "it has 2 dimensions at least")
    torch.save({"weights": 1}, path)
    refused(tmp_path, root, CheckpointError, "has no 'model'")
    torch.save([1], path)
    refused(tmp_path, root, CheckpointError, "holds a list")
    path.unlink()
    refused(tmp_path, root, CheckpointError, "has none of model_optim_rng.pt")
    path.parent.rmdir()
    refused(tmp_path, root, CheckpointError, r"has no file of tensor rank 1, pipeline rank 1, with 2 x 2 ranks")


def test_gates_that_are_not_half_of_a_rank(tmp_path: Path) -> None:
    _, model = made(tmp_path, "llama")
    root = write(tmp_path / "megatron", model, Layout("core", 2))
    paths = sorted(root.glob("*/*/*.pt"))
    whole = [torch.load(path, weights_only=False) for path in paths]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    rows = torch.cat([part["model"][name] for part in whole]).split([69, 71])
    for path, part, moved in zip(paths, whole, rows, strict=True):
        torch.save(part | {"model": part["model"] | {name: moved.clone()}}, path)
    refused(tmp_path, root, CheckpointError, "has 69 rows on a rank, which are no halves")


def test_what_could_run_code_is_refused(tmp_path: Path) -> None:
    _, model = made(tmp_path)
    ran = tmp_path / "ran"
    for number, place in enumerate(("more", "extra")):
        evil: dict[str, Any] = {"x": Evil(ran)}
        root = write(tmp_path / f"{number}", model, Layout(more=evil if place == "more" else {}),
                     **(evil if place == "extra" else {}))
        refused(tmp_path, root, CheckpointError, r"names \w+\.mkdir, which could run any code")
    assert not ran.exists()


@pytest.mark.parametrize(("text", "says"), [
    ("../../x", "must be the number of an iteration"), ("", "must be the number"), ("7", "iter_0000007: is not there")])
def test_a_tracker_that_leads_nowhere(tmp_path: Path, text: str, says: str) -> None:
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    refused(tmp_path, root, CheckpointError, says)


def test_other_formats_are_named(tmp_path: Path) -> None:
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    inner = root / "iter_0000100"
    os.rename(inner / "mp_rank_00", inner / "mp_rank_00_000_001")
    refused(tmp_path, root, CheckpointError, "no folders mp_rank_00")
    os.rename(inner / "mp_rank_00_000_001", inner / "mp_rank_00")
    (inner / "mp_rank_00_000_001").mkdir()
    refused(tmp_path, root, CheckpointError, "names a rank of experts")
    (inner / "mp_rank_00_000_001").rmdir()
    for path in (inner / "mp_rank_00").iterdir():
        path.rename(inner / "common.pt")
    (inner / "mp_rank_00").rmdir()
    refused(tmp_path, root, CheckpointError, r"distributed checkpoint \(torch_dist\).*--ckpt-convert-format torch")


def test_safetensors_need_arguments(tmp_path: Path) -> None:
    theirs, model = made(tmp_path)
    layout = Layout(safetensors=True)
    root = write(tmp_path / "megatron", model, layout)
    path, args = root / "iter_0000100" / "mp_rank_00" / "model.safetensors", root / "iter_0000100" / "args.json"
    plain = json.loads(args.read_text())
    args.rename(root / "args.json")  # beside all iterations will do
    assert compare(import_megatron(root, tmp_path / "first", 101).checkpoint, theirs).ok
    (root / "args.json").write_text(json.dumps(plain | {"checkpoint_version": 9}))
    refused(tmp_path, root, CheckpointError, "has checkpoint_version 9; known ones are 0 to 3")
    (root / "args.json").unlink()
    refused(tmp_path, root, CheckpointError, r"holds no arguments.*args\.json")
    args.write_text(json.dumps(plain))
    tensors = load_file(path)
    save_file(tensors | {"module.embedding.word_embeddings.weight": torch.ones(48)}, path)
    refused(tmp_path, root, CheckpointError, r"has embedding\.word_embeddings\.weight twice")
    save_file(tensors | {"lm_head.dense.weight": torch.ones(48)}, path)
    refused(tmp_path, root, CheckpointError, r"the tensors do not fit args:\n  - lm_head\.dense\.weight \[48\] is no")
    path.write_bytes(path.read_bytes()[:100])
    refused(tmp_path, root, CheckpointError, "is damaged, truncated")
    assert "params_dtype" in arguments(model, layout)


def test_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, model = made(tmp_path)
    root = write(tmp_path / "megatron", model, Layout("fused", 2, 2))
    assert main(["import", str(root), str(tmp_path / "ours"), "--verify"]) == 1
    assert "transformers cannot read Megatron-LM's files" in capsys.readouterr().err
    assert main(["import", str(root), str(tmp_path / "ours"), "--vocab_size", "200"]) == 1
    assert "vocab_size = 200: the embedding has 104 rows" in capsys.readouterr().err
    assert main(["import", str(theirs), str(tmp_path / "ours"), "--vocab_size", "101"]) == 1
    assert "is for Megatron-LM's files" in capsys.readouterr().err
    assert main(["import", str(root), str(tmp_path / "ours"), "--vocab_size", "101", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "megatron"
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--verify"]) == 0
    with pytest.raises(ConfigError, match="is there already"):
        import_megatron(root, tmp_path / "ours")
    assert not is_megatron(save_ours(tmp_path / "checkpoints", OURS["gpt2"]))
