"""Knobs: settings that lower a rank's peak, and the bytes that each saves.

The saving is the difference of two predicted peaks, because a knob may move the peak to another
action.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridpar.config import Config, from_mapping
from hybridpar.job import JobPlan
from hybridpar.prediction.predict import predict
from hybridpar.prediction.walk import StageMemory
from hybridpar.schedules.action import COMPUTE, parse_action
from hybridpar.validate import problems

Changes = Mapping[str, Mapping[str, Any]]
"""Settings by section and key."""
_CHUNK = 1024
"""Largest number of tokens for model.logits_chunk: more chunks save little and take time."""


@dataclass(frozen=True)
class Saving:
    """Effect of a knob on the peak of a rank. `peak`: the peak with the knob. Units: bytes."""

    knob: str
    saves: int
    peak: int


@dataclass(frozen=True)
class Knob:
    """Settings to change. `bound`: approximate upper bound of the bytes saved, from the columns of
    the prediction."""

    changes: Changes
    bound: int

    def __str__(self) -> str:
        return ", ".join(
            f"{section}.{key} = {json.dumps(value)}"
            for section, keys in self.changes.items()
            for key, value in keys.items()
        )


def knobs(config: Config, rank: int, memory: StageMemory) -> list[Knob]:
    """Return the knobs that change `config` and leave it valid, ordered by their likely savings.

    Args:
        config: A resolved configuration.
        rank: The pipeline rank.
        memory: The predicted memory of the rank.
    """
    found = [
        knob
        for knob in _all(config, rank, memory)
        if (changed := from_mapping(knob.changes, config)) != config
        and not problems(changed, changed.parallel.num_ranks)
    ]
    return sorted(found, key=lambda knob: -knob.bound)


def _all(config: Config, rank: int, memory: StageMemory) -> Iterator[Knob]:
    train = config.train
    parallel = config.parallel
    micro_batches = config.pipeline.num_microbatches
    computing = (
        memory.transient if memory.during and parse_action(memory.during).kind in COMPUTE else 0
    )
    moving = memory.activations + memory.communication + computing
    if train.micro_batch_size % 2 == 0:
        yield Knob(
            {
                "train": {"micro_batch_size": train.micro_batch_size // 2},
                "pipeline": {"num_microbatches": 2 * micro_batches},
            },
            moving // 2,
        )
    yield from (
        Knob({"pipeline": {"recompute": what}}, memory.activations)
        for what in ("selective", "all", "stage")
    )
    if parallel.dp_cp > 1:
        columns = (
            memory.master + memory.optimizer,
            memory.gradients,
            memory.weights,
        )  # the ZeRO stages from which optimizer state, gradients and weights are sharded
        for zero in range(parallel.zero + 1, 4):
            split = sum(columns[parallel.zero : zero])
            yield Knob({"parallel": {"zero": zero}}, split - split // parallel.dp_cp)
    model = config.model
    tokens = train.micro_batch_size * config.model.tokens_per_sample
    chunk = min(_CHUNK, tokens // 4)
    can_chunk = model.logits_chunk is not None and rank == parallel.pp - 1
    if can_chunk and 0 < chunk < (model.logits_chunk or tokens):
        yield Knob({"model": {"logits_chunk": chunk}}, computing)
    if parallel.tp > 1:
        yield Knob({"parallel": {"sequence": True}}, moving - moving // parallel.tp)
    if config.pipeline.schedule == "2bw":
        yield Knob({"pipeline": {"gradient_buffers": 1}}, memory.gradients // 2)
    late = {"zero_bubble": False} if config.pipeline.zero_bubble else {}
    yield Knob({"pipeline": late}, memory.activations)
    yield Knob({"pipeline": {"split_backward": False} | late}, memory.activations)
    if memory.checkpoint:
        yield Knob({"checkpoint": {"asynchronous": False}}, memory.checkpoint)


def savings(
    config: Config,
    rank: int,
    memory: StageMemory,
    knobs: Iterable[Knob],
    device: torch.device | None = None,
) -> list[Saving]:
    """Return the savings of the knobs that lower a rank's predicted peak, the largest first.

    Args:
        config: A resolved configuration.
        rank: The pipeline rank.
        memory: The predicted memory without knobs.
        knobs: The knobs to try.
        device: The device; None for the configuration's.
    """
    found = []
    for knob in knobs:
        # the checkpoint copy is a separate column, so nothing needs to run
        if knob.changes.keys() == {"checkpoint"}:
            after = memory.total - memory.checkpoint
        else:
            job = JobPlan(from_mapping(knob.changes, config))
            after = predict(job, device=device, ranks=[rank])[0].total
        found.append(Saving(str(knob), memory.total - after, after))
    return sorted_savings(found)


def sorted_savings(found: Iterable[Saving]) -> list[Saving]:
    """Return the savings above zero, the largest first."""
    return sorted(
        (saving for saving in found if saving.saves > 0), key=lambda saving: -saving.saves
    )
