"""Start a run from the weights of a checkpoint that another grid, or another program, has
written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hybridpar.checkpoint.compatible import FREE
from hybridpar.checkpoint.finding import hold_found
from hybridpar.checkpoint.folders import Hold
from hybridpar.checkpoint.format.manifest import read_manifest
from hybridpar.checkpoint.format.part import Trainee
from hybridpar.checkpoint.load import FullWeights, MergedWeights, failures_together
from hybridpar.config import ModelSpec, spec_name
from hybridpar.data import Tokenizer
from hybridpar.errors import CheckpointError, ConfigError, Problem, config_error
from hybridpar.models.groups import is_adapter
from hybridpar.nn.init import initialize


def find_start(path: str | Path, model: ModelSpec) -> Path:
    """Return the checkpoint that `train.start_from` names, without reading its weights.

    Raises:
        CheckpointError: The path is not a checkpoint.
        ConfigError: Names every key in which its model does not match.
    """
    with hold_start(path, model) as hold:
        return hold.folder


def hold_start(path: str | Path, model: ModelSpec) -> Hold:
    """Return a hold on the checkpoint that `train.start_from` names, so that a job that saves there
    does not remove it.

    Raises:
        CheckpointError: As for `find_start`.
        ConfigError: As for `find_start`.
    """
    return hold_found(path, lambda text: None, lambda folder: _check_model(folder, path, model))


def _check_model(folder: Path, path: str | Path, model: ModelSpec) -> None:
    saved = read_manifest(folder).config.model
    if type(saved) is not type(model):
        rule = f"does not match the model of train.start_from = {str(path)!r}"
        works = f"kind = {saved.kind!r}" if not saved.spec else f"spec = {saved.spec!r}"
        raise config_error("model", spec_name(type(model)), rule, works)
    there = saved.settings_table()
    here = model.settings_table()
    # the size of a position table is compared separately
    free = [*FREE, "seq_length", "max_positions"]
    # without adapters here, the saved ones are merged; without saved ones, ours start from zero
    if not (there.get("lora_rank") and here.get("lora_rank")):
        free += ["lora_rank", "lora_alpha", "lora_targets"]
    wrong = [
        Problem(
            f"model.{key}",
            here[key],
            f"does not match train.start_from = {str(path)!r}, which has {value!r}",
            repr(value),
        )
        for key, value in there.items()
        if key not in free and here[key] != value
    ]
    rows = saved.position_rows
    if rows and model.position_rows and rows != model.position_rows:
        rule = f"does not match train.start_from = {str(path)!r}, which has a table of {rows} positions"
        wrong.append(Problem("model.max_positions", here.get("max_positions"), rule, str(rows)))
    if wrong:
        raise ConfigError(*wrong)


def check_tokens(run: Path, tokenizer: Tokenizer | None, named: str) -> None:
    """Compare the tokenizer of a run folder's weights with the data's, if both are known. `named`:
    data.tokenizer.

    Raises:
        ConfigError: The tokenizers differ.
        DataError: A tokenizer is damaged.
    """
    path = run / "tokenizer.json"
    if tokenizer is None or not os.path.lexists(path):
        return
    if Tokenizer.load(path, within=run).vocabulary != tokenizer.vocabulary:
        rule = f"does not match the weights in {run}, which were trained with another tokenizer"
        raise config_error("data.tokenizer", named, rule, repr(str(path)))


def start_from(folder: Path, engine: Trainee) -> None:
    """Load the weights of a checkpoint of any grid into `engine`; its optimizer starts from zero.

    Adapters (LoRA) of the checkpoint are merged if `engine` has none. Adapters that the checkpoint
    lacks keep their initial values, with which they change nothing.

    Each rank reads what it needs, one parameter at a time.
    Collectives: on all ranks of the grid.

    Raises:
        CheckpointError: On all ranks, if any cannot read.
    """
    grid = engine.grid
    state = engine.state

    def load() -> None:
        has_adapters = any(map(is_adapter, state.whole_slots))
        full = (FullWeights if has_adapters else MergedWeights)(folder, grid.flight)

        def write(tensors: Mapping[str, Tensor]) -> None:
            for name, target in tensors.items():
                slot = state.whole_slots[name]
                if is_adapter(name) and name not in full.placements:
                    new = [(name, target, slot.placement)]
                    initialize(new, engine.config.train.seed, grid.place)
                else:
                    target.copy_(full.read_part(slot))

        state.fill(write)

    if failures := failures_together(grid.world, load):
        raise CheckpointError(failures[0])
