"""Turn a folder of transformers' save_pretrained into a checkpoint with its configuration and
tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import starmap
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.format.files import new_folder, write_text
from hybridpar.checkpoint.huggingface.configuration import family_of, model_of
from hybridpar.checkpoint.huggingface.families import FAMILIES, Family
from hybridpar.checkpoint.huggingface.names import Entry, Match, Plan, match, plan_of
from hybridpar.checkpoint.huggingface.source import CONFIG, DTYPES, WeightFiles, Weights, read_json
from hybridpar.checkpoint.huggingface.tokens import TOKENIZER, tokenizer_of
from hybridpar.checkpoint.save import save_weights
from hybridpar.config import Config, ModelConfig, ParallelConfig, TrainConfig, to_short_toml
from hybridpar.errors import CheckpointError, config_error
from hybridpar.models.build import DTYPES as OUR_DTYPES
from hybridpar.nn.init import initialize
from hybridpar.reading import nearest_path

_BY_TENSOR = ("hidden_size", "num_heads", "num_kv_heads", "vocab_size")
_HEADS = ("nsp", "sop", "none")
_TOGETHER = 2**20
"""Elements that a pass over a tensor looks at together."""


@dataclass(frozen=True)
class Imported:
    """An imported folder. `notes`: what was ignored in it; `started_anew`: parameters that it
    lacks, which are initialized."""

    folder: Path
    checkpoint: Path
    model_type: str
    dtype: str
    num_tensors: int
    num_parameters: int
    notes: tuple[str, ...]
    started_anew: tuple[str, ...] = ()


def import_folder(source: str | Path, output: str | Path) -> Imported:
    """Create `output` with config.toml, a checkpoint of step 0 and, if the folder has a tokenizer,
    tokenizer.json and the files that belong beside it.

    `train.start_from` in that config.toml is `output`, so training from it runs on any grid.

    Raises:
        CheckpointError: Files are missing or damaged, or do not match each other.
        ConfigError: config.json describes a model that is not supported, or `output` exists.
        DataError: The tokenizer is damaged.
    """
    source = Path(source)
    output = Path(output)
    if not source.is_dir():
        near = nearest_path(source)
        works = f"try {near}" if near else "download the model first, such as by hf download"
        raise CheckpointError(
            f"{source}: is not a folder, and only local folders can be imported; {works}"
        )
    if not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source}: has neither a {CONFIG}, as Hugging Face models do, nor Megatron-LM's "
            f"iter_0000100/mp_rank_00/model_optim_rng.pt; name the folder that has one of these"
        )
    plain = read_json(source / CONFIG)
    files = WeightFiles(source)
    family = family_of(plain, files.shapes)
    model, unknown = model_of(plain, family)
    check_shape(model, files, CONFIG)
    if model.kind == "bert":
        model = replace(model, sentence_head=_sentence_head(plain, files))
    known = (
        [f"config.json: {', '.join(unknown)}: no keys of {family.model_type}, passed over"]
        if unknown
        else []
    )
    return make_checkpoint(files, model, family, output, known)


def make_checkpoint(
    files: Weights, model: ModelConfig, family: Family, output: Path, notes: list[str]
) -> Imported:
    """Create the folder of `import_folder` from a family's tensors. Raises: as `import_folder`."""
    plan = plan_of(model, family)
    matched = match(files.shapes, plan, family)
    dtype = _dtype(files, matched)
    tokenizer = tokenizer_of(files.folder, model)
    config = _config_of(model, dtype, output.resolve(), has_tokenizer=tokenizer is not None)
    if family.model_type in FAMILIES:  # Megatron-LM's are others
        kept = replace(config.checkpoint, family=family.model_type)
        config = replace(config, checkpoint=kept)
    with new_folder(output) as aside:
        write_text(aside / "config.toml", to_short_toml(config))
        for name, text in (tokenizer.files() if tokenizer is not None else {}).items():
            (aside / name).parent.mkdir(exist_ok=True)
            write_text(aside / name, text)
        _check_copies(files, matched, family.settings)
        placements = {entry.ours: entry.placement for entry in plan.entries}
        shapes = {
            name: torch.empty(placement.shape, dtype=OUR_DTYPES[dtype], device="meta")
            for name, placement in placements.items()
        }
        entries = {entry.ours: entry for entry in plan.entries}

        def read(name: str) -> Tensor:
            return _read(files, entries[name], plan, matched, OUR_DTYPES[dtype])

        saved = save_weights(aside / "checkpoints", config, shapes, placements, read)
    notes = [*notes, *_notes(matched, family, has_tokenizer=tokenizer is not None)]
    return Imported(
        output,
        output / "checkpoints" / saved.name,
        family.model_type,
        dtype,
        len(matched.names),
        plan.num_parameters,
        tuple(notes),
        tuple(matched.absent),
    )


def _notes(matched: Match, family: Family, *, has_tokenizer: bool) -> list[str]:
    notes = []
    if matched.unused:
        notes.append(
            f"{len(matched.unused)} tensors that take no part in {family.model_type} passed over: "
            f"{matched.unused[0]}{', ..' * (len(matched.unused) > 1)}"
        )
    if matched.absent:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in matched.absent)
        notes.append(
            f"the files have no {', '.join(modules)}, which are initialized as in a new model"
        )
    if not has_tokenizer:
        notes.append(
            f"the folder has no {TOKENIZER}: generate needs one, and so does data.tokenizer"
        )
    return notes


def check_shape(model: ModelConfig, files: Weights, settings: str) -> None:
    """Check sizes before anything is built. Raises: ConfigError if the settings name sizes that
    no tensor has."""
    largest = max((max(shape, default=1) for shape in files.shapes.values()), default=0)
    if model.num_layers > len(files.shapes):
        raise config_error(
            f"{settings}: the number of layers",
            model.num_layers,
            f"out of range: the files have only {len(files.shapes)} tensors in all",
        )
    if model.num_experts > len(files.shapes):
        raise config_error(
            f"{settings}: the number of experts",
            model.num_experts,
            f"out of range: the files have only {len(files.shapes)} tensors in all",
        )
    names = list(_BY_TENSOR)
    if model.num_experts:
        names.append("expert_ffn_hidden_size")
    if not model.num_experts or model.has_mixed_layers:
        names.append("ffn_hidden_size")
    sizes = {f"what is model.{name} here": getattr(model, name) for name in names}
    if model.position == "learned":
        sizes["the number of positions"] = model.num_positions
    for what, value in sizes.items():
        if value > largest:
            raise config_error(
                f"{settings}: {what}",
                value,
                f"out of range: the longest dimension of any tensor in the files is {largest}",
            )


def _sentence_head(plain: Mapping[str, Any], files: WeightFiles) -> Any:
    """Return the head that export wrote down, else the one that the tensors imply, since
    architectures often names another class than the files'. A pooler alone, as in files of the
    bare model, is kept for a head that is initialized."""
    poolers = {"cls.seq_relationship.weight", "bert.pooler.dense.weight", "pooler.dense.weight"}
    head = plain.get("sentence_head", "nsp" if poolers & files.shapes.keys() else "none")
    if head not in _HEADS:
        raise config_error(
            "config.json: sentence_head", head, f"must be one of {', '.join(_HEADS)}", "nsp"
        )
    return head


def _dtype(files: Weights, matched: Match) -> str:
    """Return the smallest training precision that holds all tensors exactly. Raises:
    CheckpointError."""
    for name in matched.names.values():
        if files.dtypes[name] not in DTYPES:
            raise CheckpointError(
                f"{files.folder}: {name} has type {files.dtypes[name]}; must be one of "
                f"{', '.join(DTYPES)}; convert quantized weights to BF16 first"
            )
    dtype = reduce(
        torch.promote_types, (DTYPES[files.dtypes[name]] for name in matched.names.values())
    )
    return next(name for name, value in OUR_DTYPES.items() if value == dtype)


def _config_of(model: ModelConfig, dtype: str, output: Path, *, has_tokenizer: bool) -> Config:
    config = Config(model, ParallelConfig(dp=1))
    return replace(
        config,
        train=replace(config.train, dtype=dtype, start_from=str(output)),  # type: ignore[arg-type]
        data=replace(config.data, tokenizer=str(output / TOKENIZER) if has_tokenizer else ""),
        run=replace(config.run, name=f"{output.name}-trained"),
    )


def _check_copies(files: Weights, matched: Match, settings: str) -> None:
    """Check that tensors that must be equal are. Raises: CheckpointError."""
    for copy, original in matched.copies.items():
        count = _rows_at_once(files.shapes[copy])
        rows = files.shapes[copy][0]
        # each read is of mapped files, of which a block alone is touched
        pairs = (
            (files.read(copy)[start : start + count], files.read(original)[start : start + count])
            for start in range(0, rows, count)
        )
        if files.shapes[copy] != files.shapes[original] or not all(starmap(torch.equal, pairs)):
            raise CheckpointError(
                f"{files.folder}: {copy} and {original} differ, but {settings} ties them; make "
                f"them equal, or set tie_word_embeddings to false there"
            )


def _rows_at_once(shape: tuple[int, ...]) -> int:
    """Return how many rows of a tensor a pass over it looks at together, so that what the pass
    allocates is small."""
    return max(1, _TOGETHER // max(1, prod(shape[1:])))


def _read(files: Weights, entry: Entry, plan: Plan, matched: Match, dtype: torch.dtype) -> Tensor:
    """Read the tensors of a parameter; initialize one that the files lack. Raises: CheckpointError
    if numbers are not finite."""
    if entry.ours in matched.absent:
        weight = torch.empty(entry.placement.shape, dtype=dtype)
        initialize([(entry.ours, weight, entry.placement)], TrainConfig().seed)
        return weight
    parts = [files.read(matched.names[name]).to(dtype) for name in entry.theirs]
    for name, part in zip(entry.theirs, parts, strict=True):
        blocks = part.split(_rows_at_once(tuple(part.shape)))
        if count := sum(block.numel() - int(block.isfinite().sum()) for block in blocks):
            raise CheckpointError(
                f"{files.folder}: {matched.names[name]} has {count} of {part.numel()} "
                f"values that are NaN or infinite; import an earlier checkpoint"
            )
    return entry.layout.join(parts, plan.heads).contiguous()
