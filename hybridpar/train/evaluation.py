"""Evaluation: losses and metrics of the newest weights on each validation set.

A single unnamed set has the name "" here, and is not named in metrics and messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridpar.config import Config
from hybridpar.config.row_names import valid_name
from hybridpar.data import BatchLoader, Samples
from hybridpar.errors import config_error
from hybridpar.train.engine import Engine

Numbers = dict[str, dict[str, float]]
"""Losses and metrics by set, then by name. A set in which no label counts is missing."""


def batch_loader(engine: Engine, samples: Samples) -> BatchLoader:
    """Return a loader of this rank's micro-batches."""
    train = engine.config.train
    return BatchLoader(
        samples,
        micro_batch_size=train.micro_batch_size,
        dp_rank=engine.grid.replica,
        dp_size=engine.grid.num_replicas,
        num_microbatches=engine.config.pipeline.num_microbatches,
    )


class Evaluator:
    """Evaluate an engine on the first train.eval_batches batches of each validation set.

    Args:
        sets: Samples by set.

    Attributes:
        loaders: Loaders by set.
        best: The set whose loss selects the best checkpoint.
    """

    def __init__(self, engine: Engine, sets: Mapping[str, Samples]):
        self._engine = engine
        self._num_batches = engine.config.train.eval_batches
        self.loaders = {name: batch_loader(engine, samples) for name, samples in sets.items()}
        self.best = engine.config.checkpoint.best_by or next(iter(sets), "")

    def has_targets(self, name: str) -> bool:
        """Return whether any label in the evaluated batches of a set counts."""
        return any(map(self.loaders[name].num_targets, range(self._num_batches)))

    def evaluate(self) -> Numbers:
        """Evaluate all sets on a drained pipeline. Collectives: on all ranks of the grid."""
        return {
            name: self._engine.evaluate(loader, self._num_batches)
            for name, loader in self.loaders.items()
            if self.has_targets(name)
        }


def require_best_set(config: Config, sets: Mapping[str, Any]) -> None:
    """Check that checkpoint.best_by names a validation set. Raises: ConfigError."""
    best = config.checkpoint.best_by
    if best and best not in sets:
        named = [f'"{name}"' for name in sets if name]
        rule = (
            "must be the name of a validation set, and this run's only set has no name "
            "(data.valid_sets gives names)"
        )
        if named:
            rule = f"must be the name of a validation set: {', '.join(named)}"
        raise config_error("checkpoint.best_by", best, rule, named[0] if named else '""')


def row_of(numbers: Numbers, losses: Sequence[str]) -> dict[str, float]:
    """Return an evaluation as a row of metrics.jsonl: val_loss, val_accuracy, val_loss/wiki, ..

    losses: names of the partial losses, whose sum is the loss.
    """
    row = {}
    for valid_set, found in numbers.items():
        row[valid_name("loss", valid_set)] = sum(found[name] for name in losses)
        row |= {
            valid_name(name, valid_set): value
            for name, value in found.items()
            if name not in losses
        }
    return row


def as_told(numbers: Numbers) -> dict[str, Any]:
    """Return an evaluation as programs see it: by name, or by set and name if sets have names."""
    return numbers[""] if "" in numbers else dict(numbers)
