"""Adapters (LoRA) on imported models of today's families: one training on a grid and in one
process, equal when merged, and equal in transformers, merged or in PEFT's layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.lifted import exact_logits
from checkpoint.test_families import batch_of, difference, made
from engines import samples
from ranks import run_ranks
from torch import Tensor
from verify.test_grids import holds

from hybridpar import checkpoint
from hybridpar.checkpoint.huggingface import export_adapters, export_folder, import_folder
from hybridpar.checkpoint.huggingface.adapters import SETTINGS
from hybridpar.checkpoint.huggingface.source import read_json
from hybridpar.checkpoint.huggingface.verify import our_logits
from hybridpar.checkpoint.load import MergedWeights
from hybridpar.checkpoint.stages import whole_model
from hybridpar.config import Config, ModelConfig, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.groups import is_adapter
from hybridpar.train.engine import Engine

pytest.importorskip("transformers")

LORA = {"lora_rank": 3, "lora_alpha": 12.0}
NAMES = [
    "gemma3",  # norms on both sides, (1 + w), GeGLU, windows, two rotary bases
    "qwen3",  # norms of queries and keys, tied embeddings
    "qwen2",  # bias of queries, keys and values
    "qwen2-window",
    "olmo2",  # norms after blocks, and of all heads' queries at once
    "llama3.2",
    "phi3",  # one tensor for queries, keys and values, one for gate and up
    "smollm3",
    "gemma2",
]


def sections_of(tp: int, pp: int) -> dict[str, dict[str, Any]]:
    return {
        "parallel": {"tp": tp, "pp": pp, "dp": 1},
        "pipeline": {"num_microbatches": 3},
        "train": {"dtype": "fp64", "micro_batch_size": 2, "num_steps": 2},
        "optim": {"lr": 3e-2, "warmup_steps": 0},
    }


def adapted(start: Path) -> ModelConfig:
    return replace(checkpoint.read_manifest(start).config.transformer, **LORA)


def trained(start: Path, root: Path, tp: int, pp: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of two steps from an imported checkpoint."""
    kept = checkpoint.read_manifest(start).config.checkpoint
    config = from_mapping(sections_of(tp, pp), Config(adapted(start), checkpoint=kept))
    engine = Engine(JobPlan(config), ProcessGrid(tp=tp, pp=pp, dp=1), torch.device("cpu"))
    checkpoint.start_from(start, engine)
    found: list[tuple[float, float]] = []
    engine.train(samples(engine), 2, lambda step: found.append((step.loss, step.grad_norm)))
    checkpoint.save(root, engine, "corpus")
    return found


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """All but adapters to the bit, adapters up to the order of sums in float64. Several stages may
    have a second copy of a tied weight."""
    assert got.keys() >= want.keys()
    for name, tensor in want.items():
        tolerance = 1e-9 * float(tensor.abs().max()) if is_adapter(name) else 0
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_imported_models(tmp_path: Path, name: str) -> None:
    theirs = made(tmp_path / "theirs", name)
    start = import_folder(theirs, tmp_path / "ours").checkpoint
    expected = trained(start, tmp_path / "one", 1, 1)
    steps = run_ranks(trained, 4, start, tmp_path / "grid", 2, 2)[-1]
    for step, want in zip(steps, expected, strict=True):
        assert step == pytest.approx(want, rel=1e-9)
    one, folder = (tmp_path / root / "step_00000002" for root in ("one", "grid"))
    config, weights = checkpoint.load_full(folder)
    equal(weights, checkpoint.load_full(one)[1])
    _, imported = checkpoint.load_full(start)
    equal({n: w for n, w in weights.items() if not is_adapter(n)}, as_float64(imported))

    model = config.transformer
    batch = batch_of(model)
    logits = our_logits(model, whole_model(model, weights, torch.float64), batch)["words"]
    merged = MergedWeights(folder)
    plain = merged.manifest.config.transformer
    assert plain == model.without_adapters
    of_merged = {name: merged.read(name) for name in merged.placements}
    stage = whole_model(plain, of_merged, torch.float64)
    assert difference(our_logits(plain, stage, batch)["words"], logits) < 1e-12
    unchanged = exact_logits(theirs, batch["tokens"])
    assert difference(unchanged, logits) > 0.01

    back = export_folder(folder, tmp_path / "merged").folder
    assert read_json(back / "config.json")["model_type"] == config.checkpoint.family
    assert read_json(theirs / "config.json")["model_type"] == config.checkpoint.family
    assert difference(exact_logits(back, batch["tokens"]), logits) < 1e-9
    peft = pytest.importorskip("peft")
    written = export_adapters(folder, tmp_path / "adapters")
    assert not written.notes
    found = exact_logits(
        theirs,
        batch["tokens"],
        lambda model: peft.PeftModel.from_pretrained(model, written.folder),
    )
    assert difference(found, logits) < 1e-9


def test_adapters_of_a_run_that_knows_no_family_are_named_by_the_first(tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", "phi3")
    start = import_folder(theirs, tmp_path / "ours").checkpoint
    model = adapted(start)
    config = from_mapping(sections_of(1, 1), Config(model))
    engine = Engine(JobPlan(config), ProcessGrid(), torch.device("cpu"))
    folder = checkpoint.save(tmp_path / "run", engine, "corpus")
    written = export_adapters(folder, tmp_path / "adapters")
    assert "A base model of phi3 names them differently" in written.notes[0]
    named = [name.split(".")[-1] for name in read_json(written.folder / SETTINGS)["target_modules"]]
    assert {"q_proj", "k_proj", "v_proj"} <= set(named)


def as_float64(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.double() for name, weight in weights.items()}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "qwen2-window", "olmo2-biased"])
def test_adapters_windows_and_packed_documents_on_a_grid(tmp_path: Path, name: str) -> None:
    """It holds with sequence parallelism, replicas and dropout, too."""
    start = import_folder(made(tmp_path / "theirs", name), tmp_path / "ours").checkpoint
    sections = {
        "data": {"packing": "best_fit"},
        "parallel": {"sequence": True},
        "pipeline": {"num_microbatches": 2, "schedule": "2bw", "recompute": "selective"},
        "train": {"micro_batch_size": 2},
    }
    config = from_mapping(sections, Config(replace(adapted(start), attention_dropout=0.1)))
    holds({"tp": 2, "pp": 2, "dp": 2}, config, num_batches=2)
