"""The comparison of logits: what counts as equal, and what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.exchange import (
    OURS,
    edit_config,
    edit_tensors,
    make_theirs,
    same_bits,
    save_ours,
    tensors_of,
)
from torch import Tensor
from train.runs import write_config

from hybridpar.checkpoint import load_full, save_weights
from hybridpar.checkpoint.huggingface import compare, compare_logits, export_folder, import_folder
from hybridpar.cli import main
from hybridpar.config import Launch, from_mapping, load_toml
from hybridpar.errors import CheckpointError, ConfigError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.placement import named_placements
from hybridpar.runtime.stage import Stage
from hybridpar.train.job import train

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 70,
    "max_position_embeddings": 20,
}
GPT2 = {
    "vocab_size": 101,
    "n_positions": 20,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "tie_word_embeddings": False,
}


def test_verify_sees_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_ours(tmp_path / "checkpoints", OURS["llama"])
    made = export_folder(folder, tmp_path / "theirs")
    assert compare(folder, made.folder).difference < 1e-5
    edit_tensors(
        made.folder, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"].mul_(1.01)
    )
    assert not compare(folder, made.folder).ok
    assert (
        main(["import", str(made.folder), str(tmp_path / "ours"), "--verify"]) == 0
    )  # equal to what was changed
    edit_config(made.folder, rope_theta=20.0)
    assert compare(folder, made.folder).difference > 1e-2
    capsys.readouterr()
    edit_tensors(made.folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing keys of .*model\.norm\.weight"):
        compare(folder, made.folder)


def test_verify_measures_by_the_largest_logit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A right model with large logits is right, a wrong one with small ones is wrong."""
    for factor in (1e6, 1e-6):
        theirs = make_theirs(tmp_path / f"{factor}", "gpt2", **GPT2)
        edit_tensors(theirs, lambda t, factor=factor: t["lm_head.weight"].mul_(factor))  # type: ignore[misc]
        capsys.readouterr()
        assert (
            main(["import", str(theirs), str(tmp_path / f"{factor}-ours"), "--verify", "--json"])
            == 0
        )
        out, err = capsys.readouterr()
        assert re.search(
            r"verify: logits of 40 tokens in float64: largest difference .* of the largest value "
            r".*e",
            err,
        )
        assert json.loads(out)["relative_difference"] < json.loads(out)["tolerance"]
        edit_tensors(theirs, lambda t: t["transformer.h.1.attn.c_attn.weight"].mul_(1.01))
        found = compare(tmp_path / f"{factor}-ours" / "checkpoints" / "step_00000000", theirs)
        assert found.relative > 1e-4
        assert not found.ok


def test_another_form_of_gelu_is_a_difference(tmp_path: Path) -> None:
    theirs = make_theirs(tmp_path / "theirs", "gpt_neox", **SIZES)
    made = import_folder(theirs, tmp_path / "ours")
    edit_config(theirs, hidden_act="gelu_new")
    assert not compare(made.checkpoint, theirs).ok


@pytest.mark.parametrize(
    ("change", "largest"),
    [
        (lambda x: x, 5.0),
        (lambda x: x + 4e-5, 5.0),
        (lambda x: x + 6e-5, 5.0),
        (lambda x: x * torch.nan, 5.0),
        (lambda x: x / 0, 5.0),
        (torch.zeros_like, 5.0),
        (lambda x: x + 1e-12, 0.0),
    ],
)
def test_equality_of_logits(change: Callable[[Tensor], Tensor], largest: float) -> None:
    theirs = torch.linspace(-largest, largest, 24).view(1, 4, 6)
    real = torch.tensor([[True, True, True, False]])
    ours = change(theirs.double())
    ours[0, 3] = 99.0  # padding
    found = compare_logits({"words": ours}, {"words": theirs}, real, Path("there"))
    assert found.num_tokens == 3
    assert found.ok is (0 <= float((ours - theirs)[0, :3].abs().max()) <= 1e-5 * largest)
    with pytest.raises(
        CheckpointError,
        match=r"there: its logits of words have shape \[1, 4, 6\], ours \[1, 3, 6\]",
    ):
        compare_logits({"words": ours[:, :3]}, {"words": theirs}, real, Path("there"))


NARROW = [("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "fp32"), ("fp64", "bf16"), ("bf16", "fp16")]
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(("master", "dtype"), NARROW, ids=str)
def test_a_narrower_export_is_what_was_to_be_written(
    tmp_path: Path, kind: str, master: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_ours(tmp_path / "checkpoints", OURS[kind], DTYPES[master])
    assert (
        main(
            [
                "export",
                str(folder),
                str(tmp_path / "theirs"),
                "--dtype",
                dtype,
                "--verify",
                "--json",
            ]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)
    assert plain["ok"]
    assert plain["different_tensors"] == []
    assert plain["relative_difference"] < 1e-5, "rounding of weights is in both models"


@pytest.mark.parametrize("kind", OURS)
def test_verify_sees_a_bit_of_a_narrower_export(tmp_path: Path, kind: str) -> None:
    """Logits alone would not show it."""
    folder = save_ours(tmp_path / "checkpoints", OURS[kind])
    made = export_folder(folder, tmp_path / "theirs", dtype="bf16")
    names = []

    def flip(tensors: dict[str, Tensor]) -> None:
        names.append(
            next(
                name
                for name in tensors
                if "down" in name or "output.dense" in name or "mlp" in name
            )
        )
        smallest = tensors[names[0]].view(torch.int16).flatten()
        smallest[0] ^= 1

    edit_tensors(made.folder, flip)
    found = compare(folder, made.folder)
    assert found.different == tuple(names)
    assert not found.ok
    assert f"tensors that differ from the checkpoint's: {names[0]}" in str(found)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("staleness", ["none", "prediction"])
def test_an_export_of_a_run_in_bf16_is_its_rounded_master(tmp_path: Path, staleness: str) -> None:
    """The newest weights, not those that 2bw predicts or those that steps ran on."""
    path = write_config(tmp_path, schedule="2bw")
    config = from_mapping(
        {"train": {"dtype": "bf16"}, "optim": {"staleness": staleness}}, load_toml(path)
    )
    run = train(config, Launch(0, 0, 1, 1)).folder
    assert main(["export", str(run), str(tmp_path / "theirs"), "--verify"]) == 0
    assert main(["export", str(run), str(tmp_path / "exact"), "--dtype", "fp32", "--verify"]) == 0
    assert (
        json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    )
    exact = tensors_of(tmp_path / "exact")
    same_bits(
        tensors_of(tmp_path / "theirs"), {name: tensor.bfloat16() for name, tensor in exact.items()}
    )
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in exact.values())


def test_a_weight_beyond_the_range_of_the_export_is_refused(tmp_path: Path) -> None:
    folder = save_with(tmp_path / "checkpoints", 1e5)
    with pytest.raises(
        ConfigError,
        match=r"dtype = 'fp16': .* holds numbers up to 6\.55e\+04, .* has 1e\+05; try bf16",
    ):
        export_folder(folder, tmp_path / "theirs", dtype="fp16")
    assert not (tmp_path / "theirs").exists()
    assert (
        main(["export", str(folder), str(tmp_path / "theirs"), "--dtype", "bf16", "--verify"]) == 0
    )


def save_with(root: Path, number: float) -> Path:
    """A checkpoint of ours with one such weight."""
    folder = save_ours(root / "first", OURS["llama"])
    config, weights = load_full(folder)
    weights["blocks.1.mlp.down.weight"][0, 0] = number
    stage = Stage(build_blocks(config.model, Axis("tp"), range(config.model.num_blocks)))
    return save_weights(
        root, config, weights, {name: place for name, _, place in named_placements(stage)}
    )
