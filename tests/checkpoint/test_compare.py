"""The comparison of logits: what counts as equal, and what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.exchange import OURS, edit_config, edit_tensors, make_theirs, save_ours
from torch import Tensor

from hybridpar.checkpoint.huggingface import compare, compare_logits, export_folder, import_folder
from hybridpar.cli import main
from hybridpar.errors import CheckpointError

pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 70, "max_position_embeddings": 20}
GPT2 = {"vocab_size": 101, "n_positions": 20, "n_embd": 48, "n_layer": 2, "n_head": 3, "tie_word_embeddings": False}


def test_verify_sees_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_ours(tmp_path / "checkpoints", OURS["llama"])
    made = export_folder(folder, tmp_path / "theirs")
    assert compare(folder, made.folder).difference < 1e-5
    edit_tensors(made.folder, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"].mul_(1.01))
    assert not compare(folder, made.folder).ok
    assert main(["import", str(made.folder), str(tmp_path / "ours"), "--verify"]) == 0  # equal to what was changed
    edit_config(made.folder, rope_theta=20.0)
    assert compare(folder, made.folder).difference > 1e-2
    capsys.readouterr()
    edit_tensors(made.folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing keys of .*model\.norm\.weight"):
        compare(folder, made.folder)


def test_verify_measures_by_the_largest_logit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A right model with large logits is right, a wrong one with small ones is wrong."""
    for factor in (1e6, 1e-6):
        theirs = make_theirs(tmp_path / f"{factor}", "gpt2", **GPT2)
        edit_tensors(theirs, lambda t, factor=factor: t["lm_head.weight"].mul_(factor))  # type: ignore[misc]
        capsys.readouterr()
        assert main(["import", str(theirs), str(tmp_path / f"{factor}-ours"), "--verify", "--json"]) == 0
        out, err = capsys.readouterr()
        assert re.search(r"verify: logits of 40 tokens in float64: largest difference .* of the largest value .*e", err)
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


@pytest.mark.parametrize(("change", "largest"), [
    (lambda x: x, 5.0), (lambda x: x + 4e-5, 5.0), (lambda x: x + 6e-5, 5.0), (lambda x: x * torch.nan, 5.0),
    (lambda x: x / 0, 5.0), (torch.zeros_like, 5.0), (lambda x: x + 1e-12, 0.0)])
def test_what_counts_as_equal_logits(change: Callable[[Tensor], Tensor], largest: float) -> None:
    theirs = torch.linspace(-largest, largest, 24).view(1, 4, 6)
    real = torch.tensor([[True, True, True, False]])
    ours = change(theirs.double())
    ours[0, 3] = 99.0  # padding
    found = compare_logits({"words": ours}, {"words": theirs}, real, Path("there"))
    assert found.num_tokens == 3
    assert found.ok is (0 <= float((ours - theirs)[0, :3].abs().max()) <= 1e-5 * largest)
    with pytest.raises(CheckpointError, match=r"there: its logits of words have shape \[1, 4, 6\], ours \[1, 3, 6\]"):
        compare_logits({"words": ours[:, :3]}, {"words": theirs}, real, Path("there"))
