"""Knobs: settings that make a rank's peak smaller, and by how many bytes.

Each is judged at the peak, which may move: it is the difference of two predicted peaks.
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
    """Effect of a knob on the peak of a rank. peak: with the knob. Units: bytes."""

    knob: str
    saves: int
    peak: int


@dataclass(frozen=True)
class Knob:
    """Settings to change. bound: about the most bytes that it can save, from the columns of the
    prediction."""

    changes: Changes
    bound: int

    def __str__(self) -> str:
        return ", ".join(
            f"{section}.{key} = {json.dumps(value)}"
            for section, keys in self.changes.items()
            for key, value in keys.items()
        )


def knobs(config: Config, rank: int, memory: StageMemory) -> list[Knob]:
    """The knobs that change `config` and leave it valid; first those that may save most of a rank's
    predicted peak.

    `config`: resolved. rank: of the pipeline. memory: its prediction.
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
    if parallel.dp > 1:
        columns = (
            memory.master + memory.optimizer,
            memory.gradients,
            memory.weights,
        )  # split from 1, 2 and 3 on
        for zero in range(parallel.zero + 1, 4):
            split = sum(columns[parallel.zero : zero])
            yield Knob({"parallel": {"zero": zero}}, split - split // parallel.dp)
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
    """The savings of those knobs that make a rank's predicted peak smaller; the largest first.

    rank: of the pipeline. memory: its prediction without them.
    """
    found = []
    for knob in knobs:
        if knob.changes.keys() == {"checkpoint"}:  # a column of its own, whatever runs
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
