"""Refusals of import: one clear error, before anything is allocated or written. No transformers."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import edit_config, edit_tensors, folder_of, same_bits
from safetensors.torch import save_file
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.data import train_tokenizer
from hybridpar.errors import CheckpointError, ConfigError, DataError, HybridparError


def refused(tmp_path: Path, folder: Path, error: type[HybridparError], match: str) -> None:
    """The import fails, and leaves nothing behind."""
    with pytest.raises(error, match=match):
        import_folder(folder, tmp_path / "ours")
    assert not list(tmp_path.glob("*ours*"))


# -- what config.json can ask for


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "llama",
            {"model_type": "t5"},
            r"model_type = 't5': not supported by import; try gpt2, llama",
        ),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            r"rope_scaling\.low_freq_factor = None: missing; rope_type llama3 needs it",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "scaling 'dynamic' is not supported for llama: it depends on the length of each text",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}},
            r"rope_scaling\.alpha = 3: unknown setting of rope_type linear",
        ),
        (
            "llama",
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 3.0},
            },
            r"rope_scaling\.factor = 2\.0: contradicts rope_parameters\.factor = 3\.0",
        ),
        (
            "llama",
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
            r"rope_scaling\.rope_type = 'linear': contradicts rope_parameters\.rope_type = 'yarn'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            r"rope_parameters\.factor = None: missing; rope_type yarn needs it",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": "4"}},
            r"rope_scaling\.factor = '4': must be a finite number above 0",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                },
                "original_max_position_embeddings": 10,
            },
            r"original_max_position_embeddings = 10: contradicts rope_scaling\.original_max",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 3.0,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                    "original_max_position_embeddings": 10,
                },
            },
            r"factor = 3\.0: contradicts max_position_embeddings / original_max.* = 2",
        ),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}},
            "rope_scaling",
        ),
        ("llama", {"num_local_experts": 8}, "num_local_experts = 8: hybridpar has no such feature"),
        ("llama", {"residual_multiplier": 0.2}, r"residual_multiplier = 0\.2"),
        (
            "llama",
            {"model_type": "smollm3", "no_rope_layers": [1]},
            r"no_rope_layers = \[1\]: must be a list of 0 and 1, one for each of the 2 layers",
        ),
        (
            "llama",
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval = 0: must be an integer above 0",
        ),
        (
            "llama",
            {"model_type": "gemma2", "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar = 0: must be a finite number above 0",
        ),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ("llama", {"rope_theta": -1}, "rope_theta = -1"),
        ("llama", {"rope_theta": 10**400}, "rope_theta = 1000"),
        ("llama", {"initializer_range": 10**400}, "initializer_range"),
        ("llama", {"head_dim": "12"}, "head_dim = '12'"),
        (
            "llama",
            {"hidden_act": "gelu"},
            r"hidden_act = 'gelu': not supported; must be one of silu",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            "llama",
            {"model_type": "mistral", "sliding_window": -8},
            r"sliding_window = -8: must be an integer above 0, or null",
        ),
        (
            "llama",
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = .*: not supported: all layers of mistral are of one kind",
        ),
        (
            "llama",
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "layer_types = .*: must be a list of full_attention and sliding_attention, one for "
            "each of the 2 layers",
        ),
        (
            "llama",
            {"model_type": "qwen2", "use_sliding_window": 1},
            "use_sliding_window = 1: must be true or false",
        ),
        (
            "llama",
            {"model_type": "gemma3_text", "sliding_window": None},
            "sliding_window = None: must be an integer above 0: its layers have positions of",
        ),
        (
            "llama",
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "rope_parameters.sliding_attention = .*: layers with windows have no scaling here",
        ),
        (
            "llama",
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 2.0},
            },
            r"rope_parameters\.rope_theta = 2\.0: must have settings for full_attention and",
        ),
        (
            "llama",
            {"num_attention_heads": 5, "head_dim": None},
            r"num_heads.* = 5: must divide the hidden size 48",
        ),
        (
            "llama",
            {"num_hidden_layers": "REMOVE"},
            r"number of layers = 32: out of range: the files have only \d+ tensors in all",
        ),
        ("llama", {"num_hidden_layers": True}, r"num_hidden_layers = True: must be of type int"),
        (
            "llama",
            {"num_hidden_layers": 10**4},
            r"10000: out of range: the files have only \d+ tensors in all",
        ),
        (
            "llama",
            {"hidden_size": 2**62},
            r"hidden_size = \d+: must be at least 1 and at most 1048576",
        ),
        (
            "llama",
            {"hidden_size": 2**20, "head_dim": None},
            "the longest dimension of any tensor in the files is 101",
        ),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps = 0: must be above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("llama", {"vocab_size": "101"}, "vocab_size = '101'"),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            r"= 0\.5: not supported: llama rotates all features of a head; try 1\.0",
        ),
        (
            "gpt_neox",
            {"attention_bias": False},
            r"attention_bias = False: hybridpar has no such feature for gpt_neox",
        ),
        ("gpt_neox", {"hidden_act": "relu"}, r"hidden_act = 'relu'"),
        ("gpt_neox", {"use_parallel_residual": 1}, "of type bool"),
        ("gpt_neox", {"rotary_pct": 0}, r"rotary_pct = 0: must be above 0 and at most 1"),
        ("gpt_neox", {"rotary_pct": "0.25"}, "rotary_pct = '0.25'"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct = 1.5"),
        (
            "gpt_neox",
            {"rotary_pct": 0.2},
            r"rotary_fraction = 0\.2: .* a head's 16 .* takes 3",
        ),
        ("gpt_neox", {"rotary_emb_base": 0}, "rotary_emb_base = 0"),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("gpt_neox", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True",
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        (
            "gpt2",
            {"activation_function": "relu"},
            r"'relu': not supported; must be one of gelu_new, gelu_pytorch_tanh, gelu",
        ),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop = 0.3: must be as resid_pdrop"),
        ("gpt2", {"n_positions": 10**7}, "number of positions = 10000000"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size = 3"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (
            "bert",
            {"sentence_head": "other"},
            "sentence_head = 'other': must be one of nsp, sop, none",
        ),
    ],
)
def test_missing_features_are_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: str
) -> None:
    folder = folder_of(tmp_path, kind)
    edit_config(folder, **changes)
    tracemalloc.start()
    refused(tmp_path, folder, ConfigError, says)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, r"q_proj\.bias is missing; its shape would be \[48\]"),
        (
            {"head_dim": 32},
            r"q_proj\.weight has shape \[48, 48\], config\.json makes it \[128, 48\]",
        ),
        ({"model_type": "qwen3"}, r"q_norm\.weight is missing"),
        ({"model_type": "olmo2"}, r"post_feedforward_layernorm\.weight is missing"),
    ],
)
def test_tensors_that_the_config_does_not_describe(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = folder_of(tmp_path, "llama")
    edit_config(folder, **changes)
    refused(tmp_path, folder, CheckpointError, says)


def test_all_that_is_wrong_in_a_config_is_said_at_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gpt2")
    edit_config(folder, scale_attn_weights=False, activation_function="relu", n_layer=0)
    with pytest.raises(ConfigError) as caught:
        import_folder(folder, tmp_path / "ours")
    assert len(caught.value.problems) == 3


def test_keys_that_nobody_knows_are_mentioned(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    edit_config(folder, made_by="someone")
    assert (
        "config.json: made_by: no keys of llama, passed over"
        in import_folder(folder, tmp_path / "ours").notes
    )


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, b"\xff\xfe"])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str | bytes) -> None:
    folder = folder_of(tmp_path)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(
        tmp_path,
        folder,
        CheckpointError,
        r"config\.json: (is not valid JSON|must be a JSON object)",
    )


# -- what the files can be


def header_that_lies(path: Path) -> None:
    """A header that says the file has a terabyte."""
    header = json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 64),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        header_that_lies,
    ],
    ids=["short", "half a header", "empty", "a huge header", "long", "a header that lies"],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    folder = folder_of(tmp_path)
    damage(folder / "model.safetensors")
    refused(
        tmp_path,
        folder,
        CheckpointError,
        r"model\.safetensors: is damaged, truncated or not a safetensors file",
    )


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            r"model\.norm\.weight is missing; its shape would be \[48\]",
        ),
        (
            lambda t: t.update({"score.weight": torch.ones(2, 48)}),
            r"score\.weight \[2, 48\] is no tensor of this llama",
        ),
        (
            lambda t: t.update({"lm_head.bias": torch.ones(101)}),
            r"lm_head\.bias \[101\] is no tensor",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"has shape \[47\], config.json makes it \[48\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, 1)}), r"has shape \[48, 1\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            r"type I8; must be one of F64, F32",
        ),
        (
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(48)}),
            "appear under a second name too",
        ),
        (
            rename("model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
            "mlp.up_proj.weight is",
        ),
        (
            lambda t: t["model.norm.weight"][3:5].fill_(float("nan")),
            r"norm\.weight has 2 of 48 values that are",
        ),
        (
            lambda t: t["lm_head.weight"].fill_(float("-inf")),
            r"lm_head\.weight has \d+ of \d+ values that are NaN or infinite",
        ),
        (dict.clear, "the files have only 0 tensors in all"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], says: str
) -> None:
    folder = folder_of(tmp_path)
    edit_tensors(folder, change)
    refused(tmp_path, folder, HybridparError, says)


def test_a_tied_weight_may_be_there_under_its_other_name_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "gpt2")
    edit_tensors(folder, rename("transformer.wte.weight", "lm_head.weight"))
    made = import_folder(folder, tmp_path / "ours")
    same_bits(
        checkpoint.load_full(made.checkpoint)[1],
        checkpoint.load_full(tmp_path / "made" / "step_00000000")[1],
    )


def test_many_wrong_tensors_are_one_short_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    edit_tensors(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1" in n])  # type: ignore[func-returns-value]
    refused(
        tmp_path,
        folder,
        CheckpointError,
        r"the tensors do not match config\.json:\n(.*\n){8}  - and 1 more$",
    )


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/x.safetensors",
        "..\\outside.safetensors",
        "",
        "x.bin",
        ".safetensors/../x.safetensors",
        3,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: object) -> None:
    folder = folder_of(tmp_path, max_file_bytes=30_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "outside.safetensors")
    refused(
        tmp_path,
        folder,
        CheckpointError,
        r"the file of model\.norm\.weight is .*must be the plain name",
    )


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_file_bytes=30_000)
    path = folder / "model.safetensors.index.json"
    whole = json.loads(path.read_text())
    first, second, *_ = sorted(set(whole["weight_map"].values()))
    name = next(n for n, file in whole["weight_map"].items() if file == first)
    path.write_text(json.dumps({"weight_map": whole["weight_map"] | {name: second}}))
    refused(tmp_path, folder, CheckpointError, "but it is not")
    path.write_text(json.dumps({"weight_map": {}}))
    refused(tmp_path, folder, CheckpointError, "has no weight_map")
    path.write_text(json.dumps(whole))
    (folder / second).unlink()
    refused(tmp_path, folder, CheckpointError, f"{second}: cannot be read")
    os.link(folder / first, folder / second)
    refused(tmp_path, folder, CheckpointError, r"which is in .* too")


def test_there_must_be_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    refused(tmp_path, folder, CheckpointError, r"has neither model\.safetensors nor")
    refused(
        tmp_path, tmp_path / "nowhere", CheckpointError, "is not a folder, and only local folders"
    )


def test_a_tokenizer_must_fit(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    refused(tmp_path, folder, DataError, r"tokenizer\.json: is not a tokenizer\.json")
    train_tokenizer(["some text"], 300).save(folder / "tokenizer.json")
    refused(
        tmp_path,
        folder,
        ConfigError,
        "model.vocab_size = 101: must be above 263, the highest id of the tokenizer",
    )
