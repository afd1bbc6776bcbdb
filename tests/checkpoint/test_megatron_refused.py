"""Refused checkpoints of Megatron-LM, and the errors' words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.format.test_pickled import Evil
from checkpoint.megatron import Layout, arguments, write
from checkpoint.test_megatron import made
from safetensors.torch import load_file, save_file

from hybridpar.checkpoint.huggingface import compare
from hybridpar.checkpoint.megatron import import_megatron
from hybridpar.errors import CheckpointError, ConfigError, HybridparError


def refused(
    tmp_path: Path,
    root: Path,
    error: type[HybridparError],
    match: str,
    vocab_size: int | None = 101,
) -> None:
    with pytest.raises(error, match=match):
        import_megatron(root, tmp_path / "ours", vocab_size)
    assert not list(tmp_path.glob("*ours*"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"num_experts": 8},
            "args: num_experts = 8: hybridpar has no such feature for megatron; try None",
        ),
        ({"qk_l2_norm": True}, "qk_l2_norm = True"),
        (
            {"qk_layernorm": True, "normalization": "LayerNorm"},
            "qk_layernorm = True: not supported with normalization LayerNorm",
        ),
        (
            {"apply_layernorm_1p": True, "normalization": "LayerNorm"},
            "apply_layernorm_1p = True: not supported with normalization LayerNorm",
        ),
        ({"rotary_percent": 1.5}, r"rotary_percent = 1\.5: must be above 0"),
        ({"squared_relu": True}, "squared_relu"),
        ({"window_size": (128, 128)}, r"window_size = .*: must be \(tokens before, 0\)"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        (
            {"position_embedding_type": "none"},
            "'none': not supported; must be one of learned_absolute, rope",
        ),
        (
            {"normalization": "other"},
            "normalization = 'other': not supported; must be one of LayerNorm, RMSNorm",
        ),
        ({"kv_channels": 16}, r"linear_qkv\.weight has shape"),
        (
            {"no_rope_freq": [1], "position_embedding_type": "rope"},
            r"no_rope_freq = \[1\]: must be an integer, or a list",
        ),
        (
            {
                "use_rope_scaling": True,
                "rope_scaling_factor": -1,
                "position_embedding_type": "rope",
            },
            "rope_scaling_factor = -1: must be a finite number above 0",
        ),
        ({"num_layers": None}, "num_layers = None: missing"),
        ({"num_layers": 10**4}, "10000: out of range: the files have"),
        ({"hidden_size": 2**20, "kv_channels": None}, "longest dimension"),
        ({"num_attention_heads": "4"}, "= '4'"),
        ({"add_position_embedding": False}, "add_position_embedding = False"),
        (
            {"tensor_model_parallel_size": 4},
            "has files for 2 tensor and 1 pipeline ranks, which do not match its arguments: 4 "
            "and 1",
        ),
    ],
)
def test_missing_features_are_named(tmp_path: Path, more: dict[str, Any], says: str) -> None:
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
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"decoder\.layers\.3\.mlp\.linear_fc2\.bias differs between tensor ranks",
    )
    with_(model={key: value for key, value in whole["model"].items() if key != name})
    refused(
        tmp_path, root, CheckpointError, rf"{name} is not on all tensor ranks of pipeline rank 1"
    )
    with_(model=whole["model"] | {name: whole["model"][name].bfloat16()})
    refused(tmp_path, root, CheckpointError, "has types BF16, F32 on different ranks")
    with_(model=whole["model"] | {"output_layer.weight": whole["model"]["output_layer.weight"] + 1})
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"output_layer\.weight and embedding.* differ, but args ties them",
    )
    with_(model=whole["model"] | {name: torch.tensor(1.0)})
    refused(
        tmp_path,
        root,
        CheckpointError,
        f"{name.replace('.1.', '.3.')} differs between tensor ranks",
    )
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with_(model=whole["model"] | {name: torch.tensor(1.0)})
    refused(tmp_path, root, CheckpointError, "must have at least 2 dimensions")
    with_(model=whole["model"] | {name: torch.ones(3, 35)})
    refused(
        tmp_path, root, CheckpointError, r"has shapes \[\[48, 35\], \[3, 35\]\] on its tensor ranks"
    )
    torch.save({"weights": 1}, path)
    refused(tmp_path, root, CheckpointError, "has no 'model'")
    torch.save([1], path)
    refused(tmp_path, root, CheckpointError, "holds a list")
    path.unlink()
    refused(tmp_path, root, CheckpointError, "has none of model_optim_rng.pt")
    path.parent.rmdir()
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"has no file of tensor rank 1, pipeline rank 1, with 2 x 2 ranks",
    )
    path.parent.with_name("mp_rank_999999_999999").mkdir()
    shutil.copy(
        path.parent.with_name("mp_rank_00_000") / path.name,
        path.parent.with_name("mp_rank_999999_999999"),
    )
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"has no file of tensor rank 2, pipeline rank 0, with 1000000 x 1000000",
    )


@pytest.mark.parametrize("name", ["decoder.layers.{}.input_layernorm.weight", "model{}"])
def test_numbers_of_many_digits_are_no_numbers(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    (path,) = root.glob("iter*/mp_rank_00/*.pt")
    whole = torch.load(path, weights_only=False)
    inside = whole["model"] if name.startswith("decoder") else whole
    inside[name.format("9" * 5000)] = torch.ones(3)
    torch.save(whole, path)
    if inside is whole:  # beside it, as anything else may be
        import_megatron(root, tmp_path / "ours", 101)
    else:
        refused(tmp_path, root, CheckpointError, "do not match args")


def test_gates_that_are_not_half_of_a_rank(tmp_path: Path) -> None:
    _, model = made(tmp_path, "llama")
    root = write(tmp_path / "megatron", model, Layout("core", 2))
    paths = sorted(root.glob("*/*/*.pt"))
    whole = [torch.load(path, weights_only=False) for path in paths]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    rows = torch.cat([part["model"][name] for part in whole]).split([69, 71])
    for path, part, moved in zip(paths, whole, rows, strict=True):
        torch.save(part | {"model": part["model"] | {name: moved.clone()}}, path)
    refused(tmp_path, root, CheckpointError, "has 69 rows on a rank; must be even")


def test_code_in_checkpoints_is_refused(tmp_path: Path) -> None:
    _, model = made(tmp_path)
    ran = tmp_path / "ran"
    for number, place in enumerate(("more", "extra")):
        evil: dict[str, Any] = {"x": Evil(ran)}
        root = write(
            tmp_path / f"{number}",
            model,
            Layout(more=evil if place == "more" else {}),
            **(evil if place == "extra" else {}),
        )
        refused(
            tmp_path, root, CheckpointError, r"contains \w+\.mkdir; only plain .* can run any code"
        )
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("../../x", "must be the number of an iteration"),
        ("", "must be the number"),
        ("7", "iter_0000007: does not exist"),
    ],
)
def test_a_tracker_that_leads_nowhere(tmp_path: Path, text: str, says: str) -> None:
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    refused(tmp_path, root, CheckpointError, says)


def test_other_formats_are_named(tmp_path: Path) -> None:
    root = write(tmp_path / "megatron", made(tmp_path)[1], Layout())
    inner = root / "iter_0000100"
    os.rename(inner / "mp_rank_00", inner / "mp_rank_00_000_001")
    refused(tmp_path, root, CheckpointError, "no folder mp_rank_00")
    os.rename(inner / "mp_rank_00_000_001", inner / "mp_rank_00")
    (inner / "mp_rank_00_000_001").mkdir()
    refused(tmp_path, root, CheckpointError, "must be named mp_rank_TT .*; models with experts")
    (inner / "mp_rank_00_000_001").rmdir()
    for path in (inner / "mp_rank_00").iterdir():
        path.rename(inner / "common.pt")
    (inner / "mp_rank_00").rmdir()
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"distributed checkpoint \(torch_dist\).*--ckpt-convert-format torch",
    )


def test_arguments_beside_the_ranks_go_before_those_in_the_files(tmp_path: Path) -> None:
    theirs, model = made(tmp_path)
    root = write(
        tmp_path / "megatron", model, Layout("oldest", version=0, more={"a_fork_s_own": 3})
    )
    refused(
        tmp_path,
        root,
        ConfigError,
        r"a_fork_s_own = 3: hybridpar does not know .*args\.json.*try None",
    )
    args = {
        key: value for key, value in arguments(model, Layout()).items() if key != "params_dtype"
    }
    (root / "args.json").write_text(json.dumps(args))
    assert compare(import_megatron(root, tmp_path / "ours", 101).checkpoint, theirs).ok


def test_safetensors_need_arguments(tmp_path: Path) -> None:
    theirs, model = made(tmp_path)
    layout = Layout(safetensors=True)
    root = write(tmp_path / "megatron", model, layout)
    path = root / "iter_0000100" / "mp_rank_00" / "model.safetensors"
    args = root / "iter_0000100" / "args.json"
    plain = json.loads(args.read_text())
    args.rename(root / "args.json")  # beside all iterations will do
    assert compare(import_megatron(root, tmp_path / "first", 101).checkpoint, theirs).ok
    (root / "args.json").write_text(json.dumps(plain | {"checkpoint_version": 9}))
    refused(tmp_path, root, CheckpointError, "has checkpoint_version 9; supported: 0 to 3")
    (root / "args.json").unlink()
    refused(tmp_path, root, CheckpointError, r"has no arguments.*args\.json")
    args.write_text(json.dumps(plain))
    tensors = load_file(path)
    save_file(tensors | {"module.embedding.word_embeddings.weight": torch.ones(48)}, path)
    refused(tmp_path, root, CheckpointError, r"has embedding\.word_embeddings\.weight twice")
    save_file(tensors | {"lm_head.dense.weight": torch.ones(48)}, path)
    refused(
        tmp_path,
        root,
        CheckpointError,
        r"the tensors do not match args:\n  - lm_head\.dense\.weight \[48\] is no",
    )
    path.write_bytes(path.read_bytes()[:100])
    refused(tmp_path, root, CheckpointError, "is damaged, truncated")
    assert "params_dtype" in arguments(model, layout)
