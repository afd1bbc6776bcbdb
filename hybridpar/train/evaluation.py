"""Evaluation: losses and metrics of the newest weights on each validation set.

A single unnamed set has the name "" here, and is not named in metrics and messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridpar.config import Config
from hybridpar.config.row_names import valid_name
from hybridpar.data import BatchLoader, Samples, Tokenizer
from hybridpar.errors import config_error
from hybridpar.train.engine import Engine

PERPLEXITY = "perplexity"
BITS_PER_BYTE = "bits_per_byte"
_LARGEST = 700.0
"""Loss whose perplexity float64 still holds."""
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

    Raises:
        ConfigError: Bits per byte are asked for, and the tokenizer cannot tell bytes.

    Attributes:
        loaders: Loaders by set.
        best: The set whose loss selects the best checkpoint.
    """

    def __init__(
        self, engine: Engine, sets: Mapping[str, Samples], tokenizer: Tokenizer | None = None
    ):
        self._engine = engine
        self._num_batches = engine.config.train.eval_batches
        self.loaders = {name: batch_loader(engine, samples) for name, samples in sets.items()}
        self.best = engine.config.checkpoint.best_by or next(iter(sets), "")
        self._metrics = engine.config.train.eval_metrics
        self._num_bytes: dict[str, int] = {}
        self._byte_lengths = None if tokenizer is None else tokenizer.byte_lengths
        if BITS_PER_BYTE in self._metrics and self._byte_lengths is None:
            rule = (
                f"{BITS_PER_BYTE} requires a byte-level or SentencePiece tokenizer (data.tokenizer)"
            )
            works = str([one for one in self._metrics if one != BITS_PER_BYTE])
            raise config_error("train.eval_metrics", list(self._metrics), rule, works)

    def has_targets(self, name: str) -> bool:
        """Return whether any label in the evaluated batches of a set counts."""
        return any(map(self.loaders[name].num_targets, range(self._num_batches)))

    def evaluate(self) -> Numbers:
        """Evaluate all sets on a drained pipeline. Collectives: on all ranks of the grid."""
        numbers = {
            name: self._engine.evaluate(loader, self._num_batches)
            for name, loader in self.loaders.items()
            if self.has_targets(name)
        }
        for name, found in numbers.items():
            found |= self._derived(name, sum(found[loss] for loss in self._engine.loss_names))
        return numbers

    def _derived(self, name: str, loss: float) -> dict[str, float]:
        """Return the numbers that follow from the loss of a set, which is a mean over its labels."""
        found: dict[str, float] = {}
        if PERPLEXITY in self._metrics:
            found[PERPLEXITY] = math.exp(loss) if loss < _LARGEST else math.inf
        if BITS_PER_BYTE in self._metrics:
            loader = self.loaders[name]
            num_labels = sum(map(loader.num_targets, range(self._num_batches)))
            num_bytes = self._bytes_of(name)
            found[BITS_PER_BYTE] = (
                loss * num_labels / (math.log(2) * num_bytes) if num_bytes else math.nan
            )
        return found

    def _bytes_of(self, name: str) -> int:
        """Return how many bytes of text the labels of a set's evaluated batches stand for."""
        if name not in self._num_bytes:
            loader = self.loaders[name]
            assert self._byte_lengths is not None
            total = 0
            for start in range(0, self._num_batches * loader.batch_size, loader.batch_size):
                numbers = np.arange(start, start + loader.batch_size)
                labels = loader.samples.batch(numbers)["labels"]
                total += int(self._byte_lengths[labels[labels >= 0]].sum())
            self._num_bytes[name] = total
        return self._num_bytes[name]


def require_best_set(config: Config, sets: Mapping[str, Any]) -> None:
    """Check that checkpoint.best_by and train.stop_by name a validation set. Raises: ConfigError."""
    number, _, of_set = config.train.stop_by.partition("/")
    if config.train.stop_patience and of_set not in sets:
        named = [f'"{number}/{name}"' if name else f'"{number}"' for name in sets]
        rule = "must name a validation set of this run" if named else "requires a validation set"
        works = named[0] if named else "train.stop_patience = 0"
        raise config_error("train.stop_by", config.train.stop_by, rule, works)
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
