"""Adapters leave as PEFT's, or merged into the weights of an export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.exchange import OURS, save_ours, tensors_of
from safetensors.torch import load_file

from hybridpar.checkpoint.huggingface import compare, export_adapters, export_folder
from hybridpar.cli import main
from hybridpar.errors import ConfigError

LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 12.0}
SOME = LORA | {"lora_targets": ("*.qkv.*", "blocks.2.mlp.down.*")}


def logits_of(model: Any, vocab_size: int) -> torch.Tensor:
    tokens = torch.randint(vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out: torch.Tensor = model.double().eval()(tokens).logits
    return out


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("settings", [LORA, SOME], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_peft_reads_the_adapters_and_they_are_the_merged_export(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = replace(OURS[kind], **settings)
    adapted = save_ours(tmp_path / "adapted" / "checkpoints", model)
    plain = save_ours(tmp_path / "plain" / "checkpoints", OURS[kind])
    base = export_folder(plain, tmp_path / "base").folder
    merged = export_folder(adapted, tmp_path / "merged").folder
    made = export_adapters(adapted, tmp_path / "adapters")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(load(base), made.folder)
    found = logits_of(theirs, model.vocab_size)
    expected = logits_of(load(merged), model.vocab_size)
    unchanged = logits_of(load(base), model.vocab_size)
    assert (expected - unchanged).abs().max() > 0.1 * unchanged.abs().max()
    # fp32 weights, of which the merged ones are rounded
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    names = set(theirs.state_dict())
    written = load_file(made.folder / "adapter_model.safetensors")
    assert made.num_tensors == len(written) == sum("lora_" in name for name in names)
    merging = theirs.merge_and_unload()
    for name, tensor in tensors_of(merged).items():
        if name in merging.state_dict():
            torch.testing.assert_close(
                merging.state_dict()[name].float(), tensor, rtol=1e-5, atol=1e-5
            )


def test_commands_write_adapters_or_merge_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(OURS["llama"], **LORA)
    folder = save_ours(tmp_path / "run" / "checkpoints", model)
    assert main(["export", str(folder), str(tmp_path / "a"), "--adapters", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["num_tensors"] == len(load_file(tmp_path / "a" / "adapter_model.safetensors"))
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 12.0)
    assert set(settings["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert main(["export", str(folder), str(tmp_path / "b"), "--dtype", "bf16"]) == 0
    assert not [name for name in tensors_of(tmp_path / "b") if "lora" in name]
    assert compare(folder, tmp_path / "b").ok
    capsys.readouterr()
    assert main(["export", str(folder), str(tmp_path / "c"), "--adapters", "--verify"]) == 1
    assert "verify = True: not supported with --adapters" in capsys.readouterr().err


def test_a_checkpoint_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    folder = save_ours(tmp_path / "run" / "checkpoints", OURS["llama"])
    with pytest.raises(ConfigError, match=r"not trained with model\.lora_rank > 0"):
        export_adapters(folder, tmp_path / "a")
