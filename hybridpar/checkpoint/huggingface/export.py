"""Write a checkpoint as a folder that transformers' from_pretrained reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridpar.checkpoint.finding import read_held
from hybridpar.checkpoint.format.files import new_folder
from hybridpar.checkpoint.huggingface.configuration import choose_family, plain_of
from hybridpar.checkpoint.huggingface.names import Plan, plan_of
from hybridpar.checkpoint.huggingface.source import CONFIG, INDEX, WEIGHTS
from hybridpar.checkpoint.huggingface.tokens import TOKENIZER, no_tokenizer, tokenizer_files
from hybridpar.checkpoint.load import FullWeights, MergedWeights
from hybridpar.data.tokenizer_folder import GENERATION
from hybridpar.errors import CheckpointError, config_error
from hybridpar.models.build import DTYPES

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """An exported folder. `notes`: parts of the checkpoint that were left out."""

    checkpoint: Path
    folder: Path
    architecture: str
    dtype: str
    num_tensors: int
    num_parameters: int
    notes: tuple[str, ...]


def export_folder(
    path: str | Path,
    output: str | Path,
    *,
    dtype: str = "keep",
    max_file_bytes: int = 5 * 10**9,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the newest weights of a run folder or checkpoint of any grid, with their tokenizer if
    there is one.

    One file of tensors is in memory at a time.

    Args:
        path: Run folder or checkpoint.
        output: Folder to write.
        dtype: A value of train.dtype, or 'keep' for the checkpoint's.
        max_file_bytes: Largest size of a file of tensors.
        say: Called with lines for the user.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or has weights that are not finite.
        ConfigError: transformers has no class for the model, a weight is out of the range of
            `dtype`, or `output` exists.
        DataError: The tokenizer is damaged.
    """
    return read_held(path, say, lambda folder: _export(folder, Path(output), dtype, max_file_bytes))


def _export(folder: Path, output: Path, dtype: str, max_file_bytes: int) -> Exported:
    full = MergedWeights(folder)
    config = full.manifest.config
    model = config.transformer
    dtype = config.train.dtype if dtype == "keep" else dtype
    family = choose_family(model, config.checkpoint.family)
    plan, plain = plan_of(model, family), plain_of(model, family)
    notes: list[str] = []
    files: dict[str, str] = {}
    ids = no_tokenizer()
    tokenizer = folder.parent.parent / TOKENIZER
    if os.path.lexists(tokenizer):
        files, ids = tokenizer_files(tokenizer, model)
    else:
        notes.append(f"{tokenizer} is missing, so the folder has no tokenizer")
    if model.dropout and all(key.ours != "dropout" for key in family.keys):
        notes.append(
            f"model.dropout = {model.dropout}: {family.model_type} has no such dropout there"
        )
    if model.num_experts and model.router_z_loss:
        notes.append(f"model.router_z_loss = {model.router_z_loss}: {family.model_type} has none")
    plain |= {**ids, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    files[CONFIG] = json.dumps(plain, indent=1)
    if model.kind == "gpt":
        files.setdefault(GENERATION, json.dumps(ids, indent=1))
    with new_folder(output) as aside:
        for name, text in files.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(text, encoding="utf-8")
        groups = _groups(plan, max_file_bytes // _ITEM_BYTES[dtype])
        _write(aside, groups, lambda names: dict(_tensors(full, plan, names, DTYPES[dtype])))
    return Exported(
        folder,
        output,
        plain["architectures"][0],
        dtype,
        sum(map(len, groups)),
        plan.num_parameters,
        tuple(notes),
    )


def _groups(plan: Plan, most: int) -> list[list[str]]:
    """Return the tensors of each file, in order, with at most `most` elements in all (but at
    least one tensor)."""
    sizes = {name: torch.Size(shape).numel() for name, shape in plan.shapes.items()}
    if not plan.is_tied:  # without ties transformers expects these as separate parameters
        sizes |= {
            copy: sizes[original] for copy, original in plan.copies.items() if original in sizes
        }
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _tensors(
    full: FullWeights, plan: Plan, names: list[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the exported model with these names. Raises: ConfigError if one is out of
    the range of `dtype`."""
    wanted = set(names)
    for entry in plan.entries:
        copies = {
            plan.copies[copy]: copy
            for copy in wanted & plan.copies.keys()
            if plan.copies[copy] in entry.theirs
        }
        if not wanted & entry.theirs.keys() and not copies:
            continue
        ours = full.find_tied(entry.ours, entry.placement.tied)
        if ours is None:
            raise CheckpointError(f"{full.folder}: has no {entry.ours}")
        parts = entry.layout.split(full.read(ours), plan.heads)
        for name, part in zip(entry.theirs, parts, strict=True):
            for target in {name, copies.get(name, name)} & wanted:
                rounded = part.to(dtype, copy=True, memory_format=torch.contiguous_format)
                _check_finite(rounded, part, f"{target} of {full.folder}")
                yield target, rounded


def _check_finite(rounded: Tensor, exact: Tensor, name: str) -> None:
    """Raise a ConfigError for weights that become infinite in their type. `exact` is finite, as
    all loaded weights are."""
    if rounded.isfinite().all():
        return
    largest = torch.finfo(rounded.dtype).max
    dtype = next(ours for ours, theirs in DTYPES.items() if theirs == rounded.dtype)
    raise config_error(
        "dtype",
        dtype,
        f"too small a range: it holds numbers up to {largest:.3g}, and {name} has "
        f"{float(exact.abs().max()):.3g}",
        "bf16",
    )


def _write(
    folder: Path, groups: list[list[str]], read: Callable[[list[str]], dict[str, Tensor]]
) -> None:
    """Write model.safetensors, or numbered files and their index."""
    many = len(groups) > 1
    total = 0
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else WEIGHTS
        tensors = read(names)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file}: cannot be written ({error})") from None
        where |= dict.fromkeys(names, file)
        total += sum(t.nbytes for t in tensors.values())
    if many:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
