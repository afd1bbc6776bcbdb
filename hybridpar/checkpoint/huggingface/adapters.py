"""Write the adapters (LoRA) of a checkpoint in the layout of PEFT: adapter_config.json and
adapter_model.safetensors.

    ours                                   theirs
    attention.qkv   A [r, h]               q_proj, k_proj, v_proj    A [r, h], three times the same
                    B [rows, r]                                      B: the rows of each

So an adapter of a layer that transformers has in parts has one A for all of them. GPT-2's layers
are [in, out] there, but not their adapters. Families with the same mathematics may name layers
differently, and PEFT leaves out adapters whose layers it does not find: layers are named as in the
family that was imported (checkpoint.family); if none was, a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hybridpar.checkpoint.finding import read_held
from hybridpar.checkpoint.format.files import new_folder
from hybridpar.checkpoint.huggingface.configuration import choose_family, families_of
from hybridpar.checkpoint.huggingface.families import Family
from hybridpar.checkpoint.huggingface.layouts import LAYOUTS
from hybridpar.checkpoint.huggingface.names import Plan, plan_of
from hybridpar.checkpoint.load import FullWeights
from hybridpar.config import ModelConfig
from hybridpar.errors import config_error
from hybridpar.models.build import DTYPES
from hybridpar.models.groups import adapter_of

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TRANSPOSED = (LAYOUTS["conv1d"], LAYOUTS["qkv_conv1d"])


@dataclass(frozen=True)
class ExportedAdapters:
    """An exported folder of adapters."""

    checkpoint: Path
    folder: Path
    dtype: str
    num_tensors: int
    num_parameters: int
    notes: tuple[str, ...] = ()


def export_adapters(
    path: str | Path,
    output: str | Path,
    *,
    dtype: str = "keep",
    say: Callable[[str], None] = print,
) -> ExportedAdapters:
    """Write the adapters of a run folder or checkpoint for PeftModel.from_pretrained, to be used
    with the exported base model, or the original one if its layers have the same names (`notes`).

    Args:
        path: Run folder or checkpoint.
        output: Folder to write.
        dtype: A value of train.dtype, or 'keep' for the checkpoint's.
        say: Called with lines for the user.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: It has no adapters, transformers has no class for the model, or `output`
            exists.
    """
    return read_held(path, say, lambda folder: _export(folder, Path(output), dtype))


def _export(folder: Path, output: Path, dtype: str) -> ExportedAdapters:
    full = FullWeights(folder)
    config = full.manifest.config
    model = config.transformer
    if not model.lora_rank:
        rule = f"{folder} has no adapters: it was not trained with model.lora_rank > 0"
        raise config_error("adapters", True, rule, "exporting without --adapters")
    base = model.without_adapters
    family = choose_family(base, config.checkpoint.family)
    plan = plan_of(base, family)
    dtype = config.train.dtype if dtype == "keep" else dtype
    tensors: dict[str, Tensor] = {}
    for name, tensor in _tensors(full, plan):
        tensors[name] = tensor.to(DTYPES[dtype]).contiguous().clone()
    with new_folder(output) as aside:
        text = json.dumps(_settings(model, plan, full), indent=1)
        (aside / SETTINGS).write_text(text, encoding="utf-8")
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    count = sum(tensor.numel() for tensor in tensors.values())
    is_known = family.model_type == config.checkpoint.family
    notes = () if is_known else _notes(base, family, plan)
    return ExportedAdapters(folder, output, dtype, len(tensors), count, notes)


def _notes(base: ModelConfig, family: Family, plan: Plan) -> tuple[str, ...]:
    others = [
        other.model_type
        for other in families_of(base)
        if plan_of(base, other).shapes.keys() != plan.shapes.keys()
    ]
    if not others:
        return ()
    return (
        f"layers are named as in {family.model_type}. A base model of {' or '.join(others)} names "
        f"them differently, so PEFT would leave adapters out: use its import, exported again",
    )


def _adapted(full: FullWeights, plan: Plan) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Yield the entries of weights that have adapters, with the names of A and B."""
    for entry in plan.entries:
        names = adapter_of(entry.ours)
        if names and names[0] in full.placements:
            yield entry, (names[0], names[1])


def _tensors(full: FullWeights, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    for entry, (a_name, b_name) in _adapted(full, plan):
        a = full.read(a_name)
        parts = entry.layout.split(full.read(b_name), plan.heads)
        for name, part in zip(entry.theirs, parts, strict=True):
            module = _PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", a
            yield (
                f"{module}.lora_B.weight",
                part.t() if entry.layout in _TRANSPOSED else part,
            )


def _settings(model: ModelConfig, plan: Plan, full: FullWeights) -> dict[str, Any]:
    entries = [entry for entry, _ in _adapted(full, plan)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.kind == "gpt" else None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(plan, {name for entry in entries for name in entry.theirs}),
        "fan_in_fan_out": any(entry.layout in _TRANSPOSED for entry in entries),
        "bias": "none",
        "use_rslora": False,
        "modules_to_save": None,
    }


def _targets(plan: Plan, adapted: set[str]) -> list[str]:
    """Return the modules with adapters: by their last names, if all modules of these names have
    one."""
    others = {
        _last(name) for name in plan.shapes if name.endswith(".weight") and name not in adapted
    }
    last = {_last(name) for name in adapted}
    if last & others:
        return sorted(name.removesuffix(".weight") for name in adapted)
    return sorted(last)


def _last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
