"""Footprints of stages of any number of layers from those of few: a layer more takes what the layer before took.

Tracing a stage runs its code layer by layer; a planner asks for hundreds of stages. All that a footprint counts is a sum
over equal layers or the largest of them, so from `_FEW` layers on it grows evenly: exact (tested), but for the norm's
scratch space of some kilobytes.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from hybridpar.config import Config, DataConfig, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from hybridpar.memory.footprint import Buffers, Footprint, trace_stage
from hybridpar.models.build import Recomputation

_FEW = 2


class Footprints:
    """`trace_stage`, which remembers. Stages whose layers are all alike are traced with few of them."""

    def __init__(self) -> None:
        self._known: dict[object, Footprint] = {}

    def __call__(
        self, config: Config, blocks: range, recompute: Recomputation, buffers: Buffers, device: torch.device
    ) -> Footprint:
        """As `trace_stage`."""
        last = config.model.num_blocks - 1
        layers = [n for n in blocks if 0 < n < last]
        alike = recompute.whole or not recompute.blocks or set(layers) <= recompute.blocks
        if not alike or len(layers) <= _FEW + 1:
            return self._trace(config, blocks, recompute, buffers, device)
        few, one_more = (
            self._trace(*_without(config, blocks, recompute, len(layers) - n), buffers, device)
            for n in (_FEW, _FEW + 1))
        more = len(layers) - _FEW
        return Footprint(*(
            getattr(few, f.name) + more * (getattr(one_more, f.name) - getattr(few, f.name)) for f in fields(Footprint)))

    def _trace(
        self, config: Config, blocks: range, recompute: Recomputation, buffers: Buffers, device: torch.device
    ) -> Footprint:
        config = _what_counts(config)
        last = config.model.num_blocks - 1
        ends = (0 in blocks, last in blocks)
        again = tuple(number in recompute.blocks for number in blocks)
        key = (config, len(blocks), ends, again, recompute.whole, buffers, device)
        if key not in self._known:
            self._known[key] = trace_stage(config, blocks, recompute, buffers, device)
        return self._known[key]


def _without(
    config: Config, blocks: range, recompute: Recomputation, layers: int
) -> tuple[Config, range, Recomputation]:
    """The same stage with so many layers less, of a model with so many less."""
    model = replace(config.model, num_layers=config.model.num_layers - layers)
    fewer = range(blocks.start, blocks.stop - layers)
    again = recompute.blocks.intersection(fewer) - {model.num_blocks - 1}
    return replace(config, model=model), fewer, Recomputation(again, recompute.whole)


def _what_counts(config: Config) -> Config:
    """The configuration with all that does not bear on a stage's footprint at its defaults."""
    parallel, train = config.parallel, config.train
    return replace(
        config, parallel=ParallelConfig(
            parallel.tp, min(parallel.pp, 2), parallel.dp if parallel.zero else 1, parallel.zero),
        pipeline=PipelineConfig(), data=DataConfig(), run=RunConfig(), train=TrainConfig(
            micro_batch_size=train.micro_batch_size, dtype=train.dtype, device=train.device, seed=train.seed))
