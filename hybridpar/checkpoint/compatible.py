"""Which run may go on from what another one has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridpar.config import Config, to_mapping
from hybridpar.errors import CheckpointError

FIXED = {
    "model": None,  # every key
    "optim": ("name",),
    "train": ("dtype", "seed"),
}
"""What must be as it was. The grid, the schedule, ZeRO, staleness and learning rates may change."""


def check_compatible(saved: Config, wanted: Config, where: Path) -> None:
    """Raises: CheckpointError naming every field in which a run cannot go on from what another left at `where`.

    The global batch must have the size it had: then the number of steps says which data come next, whatever the grid.
    """
    old, new = _settings(saved), _settings(wanted)
    changed = [
        f"{section}.{key} is {old[section].get(key)!r} there and {new[section].get(key)!r} here"
        for section, keys in FIXED.items() for key in keys or new[section]
        if old[section].get(key) != new[section].get(key)
    ]
    if changed:
        raise CheckpointError(f"{where} belongs to another run: {'; '.join(changed)}. Choose another run.name")
    if saved.global_batch_size != wanted.global_batch_size:
        raise CheckpointError(f"{where} was trained on batches of {_batch(saved)}, here they are {_batch(wanted)}; "
                              f"{_remedy(saved, wanted)}, or another run.name")


def _settings(config: Config) -> dict[str, Any]:
    """By section and key; max_positions where it is the size of a table, with what its zero stands for."""
    model = config.model
    rows = model.num_positions if model.position == "learned" else 0
    return to_mapping(replace(config, model=replace(model, max_positions=rows)))


def _batch(config: Config) -> str:
    return (f"{config.global_batch_size} samples (micro_batch_size {config.train.micro_batch_size} x "
            f"num_microbatches {config.pipeline.num_microbatches} x dp {config.parallel.dp})")


def _remedy(saved: Config, wanted: Config) -> str:
    size, dp, one = saved.global_batch_size, wanted.parallel.dp, wanted.train.micro_batch_size
    if size % (dp * one) == 0:
        return f"try pipeline.num_microbatches = {size // (dp * one)}"
    if size % dp == 0:
        return f"try train.micro_batch_size = 1, pipeline.num_microbatches = {size // dp}"
    return f"try a parallel.dp that divides {size}"
