"""Export and import, there and back: no bit changes, and nothing is overwritten. No
transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoint.exchange import OURS, folder_of, metadata_of, same_bits, save_ours, tensors_of
from tokenizers import models

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import export_folder, import_folder
from hybridpar.checkpoint.huggingface.families import FAMILIES
from hybridpar.checkpoint.huggingface.names import plan_of
from hybridpar.cli import main
from hybridpar.config import ModelConfig, load_toml
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.validate import problems


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_there_and_back_changes_no_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    name = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float64: "fp64",
    }[dtype]
    folder = save_ours(tmp_path / "first", OURS[kind], dtype)
    made = export_folder(folder, tmp_path / "theirs", dtype=name)
    assert metadata_of(made.folder / "model.safetensors")["format"] == "pt"
    again = import_folder(made.folder, tmp_path / "ours")
    assert (again.dtype, again.num_tensors, again.num_parameters) == (
        name,
        made.num_tensors,
        made.num_parameters,
    )
    same_bits(checkpoint.load_full(again.checkpoint)[1], checkpoint.load_full(folder)[1])
    config = load_toml(tmp_path / "ours" / "config.toml")
    canonical = replace(OURS[kind], num_kv_heads=0, norm_eps=0.0, max_positions=20)
    found = replace(config.model, num_kv_heads=0, norm_eps=0.0)
    assert found == canonical
    assert (config.model.kv_heads, config.model.norm_epsilon) == (
        OURS[kind].kv_heads,
        OURS[kind].norm_epsilon,
    )
    assert not problems(config, 1)


@pytest.mark.parametrize("kind", OURS)
def test_a_model_in_many_files(tmp_path: Path, kind: str) -> None:
    whole, parts = (
        folder_of(tmp_path / name, kind, max_file_bytes=size)
        for name, size in (("whole", 10**9), ("parts", 30_000))
    )
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 3
    assert all(path.stat().st_size < 45_000 for path in parts.glob("*.safetensors"))
    same_bits(tensors_of(whole), tensors_of(parts))
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(whole).values())
    made = [import_folder(folder, tmp_path / name) for folder, name in ((whole, "a"), (parts, "b"))]
    same_bits(*(checkpoint.load_full(m.checkpoint)[1] for m in made))


def test_no_row_of_the_vocabulary_is_added_or_lost(tmp_path: Path) -> None:
    tensors = tensors_of(folder_of(tmp_path))
    assert (
        tensors["model.embed_tokens.weight"].shape == tensors["lm_head.weight"].shape == (101, 48)
    )


def test_every_rule_is_used_by_some_model() -> None:
    """No table names a module that we do not have."""
    for name, family in FAMILIES.items():
        model = OURS.get(name, OURS["llama"])
        changes = {
            key: family.model[key]
            for key in ("norm_position", "qk_norm", "norm_zero_centered")
            if key in family.model and family.model[key] != "pre"
        }
        if any(key.ours == "num_experts" for key in family.keys):
            changes |= {"num_experts": 4, "moe_layers": "01"}
        shapes = plan_of(replace(model, tie_embeddings=False, **changes), family).shapes
        for rule in family.tensors.values():
            for tensor in rule.names:
                of_layers = [tensor.format(layer=layer, expert=0) for layer in (0, 1)]
                weights = [f"{name}.weight" for name in of_layers]
                assert {*of_layers, *weights} & shapes.keys(), tensor


@pytest.mark.parametrize(
    ("words", "begin"), [(("<s>", "</s>"), "<s>"), (("</s>",), "</s>"), (("plain",), None)]
)
def test_the_token_that_starts_a_text(
    tmp_path: Path, words: tuple[str, ...], begin: str | None
) -> None:
    """A LLaMA's own one is kept; without it the end of a document is the start of the next."""
    folder = save_ours(tmp_path / "run" / "checkpoints", OURS["llama"])
    tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, words[-1])
    ).save(str(tmp_path / "run" / "tokenizer.json"))
    made = export_folder(tmp_path / "run", tmp_path / "theirs")
    assert made.checkpoint == folder
    config, tokens = (
        json.loads((made.folder / f"{name}.json").read_text())
        for name in ("config", "tokenizer_config")
    )
    assert tokens.get("bos_token") == begin
    assert config["bos_token_id"] == (None if begin is None else words.index(begin))
    assert config["eos_token_id"] == (None if begin is None else words.index("</s>"))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "gpt2",
            {"position": "rotary", "num_kv_heads": 1},
            r"num_kv_heads = 1: .* nearest model is gpt_neox; try 3",
        ),
        (
            "gpt2",
            {"parallel_residual": True},
            r"model\.parallel_residual = True: .* gpt2; try False",
        ),
        ("gpt_neox", {"bias": False}, r"model\.bias = False: .* gpt_neox; try True"),
        ("llama", {"qk_norm": "full"}, r"model\.qk_norm = 'full': .* llama; try none"),
        (
            "llama",
            {"rotary_pattern": "10", "out_bias": "on"},
            r"model\.out_bias = 'on': .* try off",
        ),
        ("llama", {"embedding_scale": 2.0}, r"model\.embedding_scale = 2\.0: .* try 1\.0"),
        ("gpt2", {"head_dim": 8}, r"model\.head_dim = 8: .* try 16"),
        ("gpt2", {"num_kv_heads": 1}, r"model\.num_kv_heads = 1"),
        ("gpt2", {"bias": False}, r"model\.bias = False"),
        ("gpt2", {"norm_position": "post"}, r"model\.norm_position = 'post'"),
        (
            "llama",
            {"activation": "gelu"},
            r"model\.activation = 'gelu': .* nearest model is llama; try swiglu",
        ),
        ("bert", {"position": "rotary"}, r"model\.position = 'rotary': .* bert; try learned"),
        ("bert", {"norm_position": "pre"}, r"model\.norm_position = 'pre': .* bert; try post"),
        ("bert", {"activation": "swiglu"}, r"try gelu or gelu_exact"),
    ],
)
def test_models_that_transformers_has_not(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: str
) -> None:
    model: ModelConfig = replace(OURS[kind], **changes)
    folder = save_ours(tmp_path / "made", model)
    with pytest.raises(ConfigError, match=says):
        export_folder(folder, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("kind", OURS)
def test_positions_beyond_the_sequences_are_kept(tmp_path: Path, kind: str) -> None:
    """After training at a shorter length the whole imported table goes back, and config.json names
    it."""
    folder = save_ours(tmp_path / "made", replace(OURS[kind], seq_length=8, max_positions=20))
    made = export_folder(folder, tmp_path / "theirs")
    plain = json.loads((made.folder / "config.json").read_text())
    assert plain["n_positions" if kind == "gpt2" else "max_position_embeddings"] == 20
    again = import_folder(made.folder, tmp_path / "ours")
    same_bits(checkpoint.load_full(again.checkpoint)[1], checkpoint.load_full(folder)[1])
    model = load_toml(tmp_path / "ours" / "config.toml").model
    assert (model.seq_length, model.max_positions) == (20, 20)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "made", OURS["gpt2"])
    (tmp_path / "theirs").mkdir()
    made = export_folder(folder, tmp_path / "theirs")  # an empty one is welcome
    before = sorted(made.folder.iterdir())
    for command in (
        lambda out: export_folder(folder, out),
        lambda out: import_folder(made.folder, out),
    ):
        with pytest.raises(
            ConfigError, match=r"exists already, and is not overwritten; try .*theirs-2"
        ):
            command(tmp_path / "theirs")
    assert sorted(made.folder.iterdir()) == before
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(
            ConfigError, match=f"exists already, and is not overwritten; try .*{name}-2"
        ):
            export_folder(folder, tmp_path / name)
    for path, why in (
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"cannot be written \({why}\); name another folder"
        ):
            export_folder(folder, path)
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_ours(tmp_path / "made", OURS["gpt2"])
    path = folder / "pp0-tp0.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    assert main(["export", str(folder), str(tmp_path / "theirs"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert "checksum" in err
    assert not json.loads(out)["ok"]
    assert not (tmp_path / "theirs").exists()


def test_output_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_ours(tmp_path / "made", OURS["llama"])
    assert main(["export", str(folder), str(tmp_path / "theirs"), "--dtype", "fp16", "--json"]) == 0
    out, err = capsys.readouterr()
    plain = json.loads(out)
    assert (plain["ok"], plain["architecture"], plain["dtype"]) == (
        True,
        "LlamaForCausalLM",
        "fp16",
    )
    assert "tokenizer.json is missing" in err
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "hybridpar train" in capsys.readouterr().out
    assert main(["export", str(folder), str(tmp_path / "x"), "--max_file_gb", "0"]) == 1
    with pytest.raises(SystemExit):
        main(["export", str(folder)])


def test_verify_without_transformers_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    folder = save_ours(tmp_path / "made", OURS["llama"])
    assert main(["export", str(folder), str(tmp_path / "theirs")]) == 0
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--verify"]) == 1
    assert "pip install 'hybridpar[hf]'" in capsys.readouterr().err
