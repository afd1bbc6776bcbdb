"""Footprints of stages of any number of layers from those of few: a layer more takes what the layer before took.

Tracing a stage runs its code layer by layer; a planner asks for hundreds of stages. All that a footprint counts is a
sum over equal layers or the largest of them, so from `_FEW` layers on it grows evenly: exact (tested), but for the
norm's scratch space of some kilobytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from hybridpar.config import Config, DataConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
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
        """The footprint that `trace_stage` gives."""
        if not isinstance(config.model, ModelConfig):
            return trace_stage(config, blocks, recompute, buffers, device)
        last = config.model.num_blocks - 1
        first_layer = max(blocks.start, 1)
        layers = range(first_layer, min(blocks.stop, last))
        again = tuple(_way(recompute, n) for n in layers)
        shape = _Shape(blocks.start == 0, again, blocks.stop > last, recompute.whole)
        if len(layers) <= _FEW + 1 or not (recompute.whole or len(set(again)) == 1):
            return self._trace(config, shape, buffers, device)
        few, one_more = (
            asdict(self._trace(config, replace(shape, again=again[:n]), buffers, device)) for n in (_FEW, _FEW + 1))
        more = len(layers) - _FEW
        return Footprint(**{name: few[name] + more * (one_more[name] - few[name]) for name in few})

    def rough(
        self, config: Config, blocks: range, recompute: Recomputation, buffers: Buffers, device: torch.device
    ) -> Footprint:
        """About the same from fewer traces, for comparing many: of micro-batches of 1 and 2, two layers, no ZeRO.

        A stage without layers is exact.
        """
        last, parallel = config.model.num_blocks - 1, config.parallel
        layers = range(max(blocks.start, 1), min(blocks.stop, last))
        if not layers:
            return self(config, blocks, recompute, buffers, device)
        again = _way(recompute, layers[0])
        found = []
        for b in (1, 2):
            at = replace(config, parallel=replace(parallel, zero=0), train=replace(config.train, micro_batch_size=b))
            ends = _Shape(blocks.start == 0, (again,) * _FEW, blocks.stop > last, recompute.whole)
            few, inner, longer = (asdict(self._trace(at, shape, buffers, device)) for shape in (
                ends, _Shape(False, (again,) * _FEW, False, recompute.whole),
                _Shape(False, (again,) * (_FEW + 1), False, recompute.whole)))
            found.append({name: few[name] + (len(layers) - _FEW) * (longer[name] - inner[name]) for name in few})
        one, two = found
        b, share = config.train.micro_batch_size, parallel.dp if parallel.zero else 1
        values = {name: one[name] + (b - 1) * (two[name] - one[name]) for name in one}
        values |= {name: values[name] // share for name in ("master", "optimizer")}
        return Footprint(**values)

    def _trace(self, config: Config, shape: _Shape, buffers: Buffers, device: torch.device) -> Footprint:
        config = _what_counts(config, shape)
        key = (config, shape, buffers, device)
        if key not in self._known:
            self._known[key] = trace_stage(config, shape.blocks, shape.recompute, buffers, device)
        return self._known[key]


@dataclass(frozen=True)
class _Shape:
    """A stage, wherever in the model it is: its ends, and for each of its layers what is recomputed (see `_way`)."""

    embedding: bool
    again: tuple[str, ...]
    head: bool
    whole: bool

    @property
    def blocks(self) -> range:
        """Its blocks in a model that has these layers only, and one more where the stage has no head."""
        if self.head and not self.again:
            return range(2, 3)
        return range(0 if self.embedding else 1, 1 + len(self.again) + self.head)

    @property
    def recompute(self) -> Recomputation:
        blocks, selective = (frozenset(n + 1 for n, again in enumerate(self.again) if again == way)
                             for way in ("all", "selective"))
        return Recomputation(blocks | frozenset(self.blocks) if self.whole else blocks, self.whole, selective)


def _way(recompute: Recomputation, block: int) -> str:
    """Recomputation of a layer: 'all' of it, 'selective', or '': none."""
    return "all" if block in recompute.blocks else "selective" if block in recompute.selective else ""


def _what_counts(config: Config, shape: _Shape) -> Config:
    """The configuration in which all that does not bear on a stage's footprint is at its defaults."""
    parallel, train = config.parallel, config.train
    has_dp = config.replicas_differ or config.feeds_back
    return replace(
        config, model=replace(config.transformer, num_layers=max(1, len(shape.again)) + (not shape.head)),
        parallel=replace(parallel, pp=min(parallel.pp, 2), dp=parallel.dp if has_dp else 1),
        pipeline=PipelineConfig(split_backward=config.pipeline.split_backward), data=DataConfig(), run=RunConfig(),
        train=TrainConfig(
            micro_batch_size=train.micro_batch_size, dtype=train.dtype, device=train.device, seed=train.seed))
