"""Rules by which a run may resume from a checkpoint of a different configuration, with or
without changes that the user has to name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hybridpar.config import Config, DataConfig, to_mapping
from hybridpar.errors import CheckpointError, shown

FREE = ("dropout", "attention_dropout", "init_std", "label_smoothing", "logits_chunk")
"""Keys of [model] that say how the model is trained, not what it computes."""
BATCH = ("train.micro_batch_size", "pipeline.num_microbatches", "parallel.dp", "parallel.sites")
"""Keys whose product is the global batch size, which must not change unless it is named."""
STREAM = (
    *(f"data.{f.name}" for f in fields(DataConfig) if f.name not in ("tokenizer", "cache")),
    "train.seed",
)
"""Keys that decide which samples are drawn, and in which order."""
Corpora = tuple[str, str] | None
"""Fingerprints of the checkpoint's data and of this run's data; None if not known yet."""
CONTINUABLE = (*(f"model.{key}" for key in FREE), *BATCH, *STREAM)
"""Names that train.continue_with accepts."""


def check_compatible(saved: Config, wanted: Config, where: Path, corpora: Corpora = None) -> None:
    """Check that a run with the configuration `wanted` may resume from the checkpoint (or run) of
    `saved`.

    The grid, the schedule, ZeRO, staleness and learning rates may change freely. The settings in
    `changes` must be named by `wanted`'s train.continue_with, and all other settings must be equal.

    Args:
        saved: Configuration of the checkpoint.
        wanted: Configuration of the run that resumes.
        where: Name of the checkpoint, for messages.
        corpora: Fingerprints of both data sets, if known.

    Raises:
        CheckpointError: Names every setting that keeps the run from resuming, and what would allow
            it.
    """
    if never := [f"{'; '.join(texts)} ({why})" for why, texts in _fixed(saved, wanted) if texts]:
        raise CheckpointError(
            f"{where} belongs to another run: {'; '.join(never)}. Choose another run.name"
        )
    named = wanted.train.continue_with
    if refused := [name for name in changes(saved, wanted, corpora) if name not in named]:
        reasons = "; ".join(_reasons(saved, wanted, corpora, refused))
        if corpora is None:  # what will be refused next, where these make other data
            refused += [
                name
                for name in _different(saved, wanted)
                if name in STREAM and name not in (*named, *refused)
            ]
        raise CheckpointError(
            f"{where} {reasons}. To continue with this configuration: train.continue_with = "
            f"{json.dumps([*named, *refused])}. Or choose another run.name"
        )


def changes(saved: Config, wanted: Config, corpora: Corpora = None) -> list[str]:
    """Return the keys, all in CONTINUABLE, whose changes the user must name. For the arguments
    see `check_compatible`."""
    found = [
        name
        for name in _different(saved, wanted)
        if name.startswith("model.") or name == "train.seed"
    ]
    if saved.global_batch_size != wanted.global_batch_size:
        found += [name for name in _different(saved, wanted) if name in BATCH]
    if corpora and corpora[0] != corpora[1]:
        stream = [name for name in _different(saved, wanted) if name in STREAM]
        found += [name for name in stream or ["data.corpus"] if name not in found]
    return found


def setting(config: Config, name: str) -> Any:
    """Return the value of a key such as "model.dropout", as TOML has it."""
    section, _, key = name.partition(".")
    return to_mapping(config)[section].get(key)


def _different(saved: Config, wanted: Config) -> Iterator[str]:
    return (name for name in CONTINUABLE if setting(saved, name) != setting(wanted, name))


def _fixed(saved: Config, wanted: Config) -> Iterator[tuple[str, list[str]]]:
    """Yield reasons why some keys cannot change, each with the keys that have changed."""
    saved = replace(saved, model=saved.model.canonical())
    wanted = replace(wanted, model=wanted.model.canonical())
    model = [f"model.{key}" for key in to_mapping(wanted)["model"] if key not in FREE]
    for why, names in (
        ("its weights belong to that model", model),
        ("the optimizer's state is of that one", ["optim.name", "optim.spec"]),
        ("its weights and their optimizer's state have that precision", ["train.dtype"]),
    ):
        yield (
            why,
            [
                _was(saved, wanted, name)
                for name in names
                if setting(saved, name) != setting(wanted, name)
            ],
        )


def _was(saved: Config, wanted: Config, name: str) -> str:
    return f"{name} is {shown(setting(saved, name))} there and {shown(setting(wanted, name))} here"


def _reasons(saved: Config, wanted: Config, corpora: Corpora, refused: list[str]) -> Iterator[str]:
    yield from (
        f"has another setting: {_was(saved, wanted, name)}"
        for name in refused
        if name.startswith("model.") or name == "train.seed"
    )
    if any(name in BATCH for name in refused):
        yield (
            f"was trained with batches of {_batch(saved)}, this configuration has "
            f"{_batch(wanted)}; {_remedy(saved, wanted)}"
        )
    if corpora and corpora[0] != corpora[1] and any(name in STREAM for name in refused):
        yield (
            f"was trained on data that does not match data.corpus = "
            f"{shown(list(wanted.data.corpus))} (fingerprint {corpora[0]}, now {corpora[1]}), "
            f"or by a version of hybridpar that computes fingerprints differently"
        )


def _batch(config: Config) -> str:
    return (
        f"{config.global_batch_size} samples (micro_batch_size {config.train.micro_batch_size} x "
        f"num_microbatches {config.pipeline.num_microbatches} x dp {config.parallel.dp}"
        + (f" x sites {config.parallel.sites})" if config.parallel.sites > 1 else ")")
    )


def _remedy(saved: Config, wanted: Config) -> str:
    """Return a hint how to keep the size of the batch."""
    size = saved.global_batch_size
    dp = wanted.parallel.replicas
    one = wanted.train.micro_batch_size
    if size % (dp * one) == 0:
        return f"try pipeline.num_microbatches = {size // (dp * one)}"
    if size % dp == 0:
        return f"try train.micro_batch_size = 1, pipeline.num_microbatches = {size // dp}"
    return f"try a parallel.dp that divides {size}"
