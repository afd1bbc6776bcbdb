"""Random arguments of Megatron-LM: what is imported computes what Megatron Core does, all else is
refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint.megatron_core import (
    HARMLESS,
    core_logits,
    core_model,
    one_process,
    random_arguments,
    save_core,
)

from hybridpar.checkpoint import load_full
from hybridpar.checkpoint.huggingface.verify import our_logits
from hybridpar.checkpoint.megatron import compare_megatron, import_megatron
from hybridpar.checkpoint.stages import whole_model
from hybridpar.cli import main
from hybridpar.errors import CheckpointError, ConfigError

TOLERANCE = 1e-4
"""Tolerance of logits up to some 50, both in float32."""


@pytest.fixture
def _core() -> Iterator[None]:
    """Here and not as this file is read, which all workers do, and which is a third of the time to
    read all."""
    pytest.importorskip("megatron.core.models.gpt")
    with one_process():
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("_core")
def test_random_arguments(tmp_path: Path, seed: int) -> None:
    args, wrong = random_arguments(seed)
    theirs = core_model(args)
    root = save_core(tmp_path / "megatron", theirs, args | wrong)
    if wrong:
        with pytest.raises(ConfigError) as refusal:
            import_megatron(root, tmp_path / "ours")
        named = {
            re.split(r"_alone| = ", problem.field.removeprefix("args: "))[0]
            for problem in refusal.value.problems
        }
        assert named == set(wrong)
        return
    config, weights = load_full(import_megatron(root, tmp_path / "ours").checkpoint)
    assert (config.model.dropout, config.model.attention_dropout) == (
        args["hidden_dropout"],
        args["attention_dropout"],
    )
    tokens = torch.randint(101, (2, 20), generator=torch.Generator().manual_seed(seed))
    ours = our_logits(config.model, whole_model(config.model, weights), {"tokens": tokens})["words"]
    torch.testing.assert_close(ours, core_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


def test_verify_compares_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core.models.gpt")
    args = random_arguments(1)[0] | {name: values[0] for name, values in HARMLESS.items()}
    with one_process():
        root = save_core(tmp_path / "megatron", core_model(args), args)
    assert main(["import", str(root), str(tmp_path / "ours"), "--verify"]) == 0
    assert "40 tokens" in capsys.readouterr().out
    (checkpoint,) = (tmp_path / "ours" / "checkpoints").iterdir()
    (path,) = root.glob("iter*/*/*.pt")
    whole = torch.load(path, weights_only=False)
    for name, value in (("qk_l2_norm", True), ("num_layers", 7), ("num_layers", "many")):
        setattr(whole["args"], name, value)  # as if the import had not looked at it
        torch.save(whole, path)
        if name == "qk_l2_norm":
            assert not compare_megatron(checkpoint, root).ok
            continue
        with pytest.raises(
            CheckpointError, match=r"Megatron Core (misses decoder|cannot compute it here)"
        ):
            compare_megatron(checkpoint, root)
