"""Footprints of stages of any number of layers from stages of few: every further layer adds the
same.

Tracing a stage runs its code layer by layer, and a planner asks for hundreds of stages. Every count
of a footprint is a sum over equal layers or the largest of them, so from `_FEW` layers on it grows
linearly: exact (tested), except for some kilobytes of the norm's scratch space.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from hybridpar.config import Config, DataConfig, PipelineConfig, RunConfig, TrainConfig
from hybridpar.models.build import Recomputation
from hybridpar.prediction.footprint import Buffers, Footprint, trace_stage
from hybridpar.prediction.work import block_kinds

_FEW = 2
_OF_STATE = frozenset({"weights", "master", "gradients", "optimizer", "norm", "update"})
"""Fields that do not depend on micro-batches."""
_ADD_UP = ("weights", "master", "gradients", "optimizer", "kept", "waiting", "factors", "moved")
"""Fields that add up over blocks."""


class Footprints:
    """A caching `trace_stage`. Stages whose layers are all equal are traced with few of them."""

    def __init__(self) -> None:
        self._known: dict[object, Footprint] = {}
        self._lines: dict[object, list[dict[str, int]]] = {}
        # results of operators, many of which stages have in common
        self._results: dict[Any, Any] = {}

    def __call__(
        self,
        config: Config,
        blocks: range,
        recompute: Recomputation,
        buffers: Buffers,
        device: torch.device,
    ) -> Footprint:
        """Return the footprint that `trace_stage` returns."""
        if not config.has_equal_layers:
            parallel = config.parallel
            b = config.train.micro_batch_size
            key = (
                _bears(config),
                config.pipeline.split_backward,
                parallel.zero and (parallel.zero, parallel.dp_cp),
                b,
                blocks,
                recompute,
                buffers,
                device,
            )
            if key not in self._known:
                self._known[key] = trace_stage(config, blocks, recompute, buffers, device)
            return self._known[key]
        last = config.model.num_blocks - 1
        first_layer = max(blocks.start, 1)
        layers = range(first_layer, min(blocks.stop, last))
        again = tuple(_way(recompute, n) for n in layers)
        shape = _Shape(blocks.start == 0, again, blocks.stop > last, recompute.whole)
        if len(layers) <= _FEW + 1 or not (recompute.whole or len(set(again)) == 1):
            return self._trace(config, shape, buffers, device)
        few, one_more = (
            asdict(self._trace(config, replace(shape, again=again[:n]), buffers, device))
            for n in (_FEW, _FEW + 1)
        )
        more = len(layers) - _FEW
        return Footprint(**{name: few[name] + more * (one_more[name] - few[name]) for name in few})

    def rough(
        self,
        config: Config,
        blocks: range,
        recompute: Recomputation,
        buffers: Buffers,
        device: torch.device,
    ) -> Footprint:
        """Return an approximate footprint from fewer traces, to compare many configurations.

        It is traced with micro-batches of 1 and 2, two layers, and no ZeRO. Every further layer
        adds what the second layer adds (if the stage is recomputed, the third) for one sample.
        """
        if not config.has_equal_layers:
            return self._joined(config, blocks, recompute, buffers, device)
        last = config.model.num_blocks - 1
        parallel = config.parallel
        layers = range(max(blocks.start, 1), min(blocks.stop, last))
        again = (_way(recompute, layers[0]),) * _FEW if layers else ()
        ends = (blocks.start == 0, blocks.stop > last)
        alike = (_bears(config), ends, again, recompute.whole, buffers, device)
        key = (config.pipeline.split_backward, alike)
        split = (True, alike)
        if key not in self._lines:
            self._lines[key] = _unsplit(self._lines.get(split)) or self._line(
                config, _Shape(ends[0], again, ends[1], recompute.whole), buffers, device
            )
        first, second, each = self._lines[key]
        more = len(layers) - len(again)
        one = {name: first[name] + more * each[name] for name in first}
        two = {
            name: second[name] + more * (1 if name in _OF_STATE else 2) * each[name]
            for name in first
        }
        b = config.train.micro_batch_size
        share = parallel.dp_cp if parallel.zero else 1
        values = {name: one[name] + (b - 1) * (two[name] - one[name]) for name in one}
        values |= {name: values[name] // share for name in ("master", "optimizer")}
        return Footprint(**values)

    def _joined(
        self,
        config: Config,
        blocks: range,
        recompute: Recomputation,
        buffers: Buffers,
        device: torch.device,
    ) -> Footprint:
        """Return an approximate footprint of a stage from the footprints of its blocks.

        Kept tensors add up, and the largest peak of a pass counts. A tensor between two blocks
        counts as kept, as if each block had to send it.
        """
        kinds = block_kinds(config.model)
        may_differ = any(
            group.frozen for group in config.optim.groups
        )  # which parameters of a kind are frozen

        def alone(number: int) -> dict[str, int]:
            n = number if may_differ else kinds.index(kinds[number])
            again, cheap = (
                frozenset({n} if number in numbers else ())
                for numbers in (recompute.blocks, recompute.selective)
            )
            return asdict(
                self(
                    config, range(n, n + 1), Recomputation(again, selective=cheap), buffers, device
                )
            )

        each = [alone(number) for number in blocks]
        joined = {name: max(one[name] for one in each) for name in each[0]}
        joined |= {name: sum(one[name] for one in each) for name in _ADD_UP}
        joined |= {name: each[0][name] for name in ("input", "received", "returning")}
        joined |= {name: each[-1][name] for name in ("output", "message", "returned")}
        joined["kept"] = (
            0 if recompute.whole else joined["kept"] + sum(one["input"] for one in each[1:])
        )
        return Footprint(**joined)

    def _line(
        self, config: Config, shape: _Shape, buffers: Buffers, device: torch.device
    ) -> list[dict[str, int]]:
        """Return the footprints of a stage of few layers with one sample and with two, and what a
        further layer adds with one sample."""
        at = [
            replace(
                config,
                parallel=replace(config.parallel, zero=0),
                train=replace(config.train, micro_batch_size=size),
            )
            for size in (1, 2)
        ]
        few = [asdict(self._trace(one, shape, buffers, device)) for one in at]
        if not shape.again:
            return [*few, dict.fromkeys(few[0], 0)]
        inner = replace(shape, embedding=False, head=False)
        again = (
            (*inner.again, inner.again[0]) if shape.whole else inner.again
        )  # with one layer the peak is at another place
        less, more = (
            asdict(self._trace(at[0], replace(inner, again=one), buffers, device))
            for one in (again[1:], again)
        )
        return [*few, {name: more[name] - less[name] for name in more}]

    def _trace(
        self, config: Config, shape: _Shape, buffers: Buffers, device: torch.device
    ) -> Footprint:
        config = _what_counts(config, shape)
        key = (config, shape, buffers, device)
        if key not in self._known:
            self._known[key] = trace_stage(
                config, shape.blocks, shape.recompute, buffers, device, self._results
            )
        return self._known[key]


@dataclass(frozen=True)
class _Shape:
    """A stage independent of its position in the model: its ends, and the recomputation of each
    layer (see `_way`)."""

    embedding: bool
    again: tuple[str, ...]
    head: bool
    whole: bool

    @property
    def blocks(self) -> range:
        """Its blocks in a model with only these layers, and one more block if the stage has no
        head."""
        if self.head and not self.again:
            return range(2, 3)
        return range(0 if self.embedding else 1, 1 + len(self.again) + self.head)

    @property
    def recompute(self) -> Recomputation:
        blocks, selective = (
            frozenset(n + 1 for n, again in enumerate(self.again) if again == way)
            for way in ("all", "selective")
        )
        return Recomputation(
            blocks | frozenset(self.blocks) if self.whole else blocks, self.whole, selective
        )


def _way(recompute: Recomputation, block: int) -> str:
    """Return the recomputation of a layer: 'all', 'selective', or '' for none."""
    if block in recompute.blocks:
        return "all"
    return "selective" if block in recompute.selective else ""


def _bears(config: Config) -> tuple[object, ...]:
    """Return what a rough footprint depends on in addition to its shape: everything that
    `_what_counts` keeps."""
    parallel = config.parallel
    train = config.train
    others = (
        getattr(config, f.name)
        for f in fields(config)
        if f.name not in ("parallel", "pipeline", "data", "run", "train")
    )
    has_dp = config.compression.replicas_differ or config.feeds_back
    replicas = parallel.dp if has_dp else parallel.least_dp
    return (
        *others,
        replace(parallel, zero=0, pp=min(parallel.pp, 2), dp=replicas),
        train.dtype,
        train.fp8,
        train.device,
        train.seed,
    )


def _unsplit(split: list[dict[str, int]] | None) -> list[dict[str, int]]:
    """Return footprints without split backwards, derived from footprints with them, whose unsplit
    backward is known.

    Returns [] if the first backward of a batch differs, because its unsplit form is unknown.
    """
    if split is None or any(one["first_backward"] != one["backward"] for one in split):
        return []
    return [
        one
        | {
            "first_backward": one["whole_backward"],
            "backward": one["whole_backward"],
            "whole_backward": 0,
            "waiting": 0,
            "weight_gradients": 0,
        }
        for one in split
    ]


def _what_counts(config: Config, shape: _Shape) -> Config:
    """Return the configuration with everything that does not affect a stage's footprint at its
    defaults."""
    parallel = config.parallel
    train = config.train
    has_dp = config.replicas_differ or config.feeds_back
    return replace(
        config,
        model=config.model.with_layers(max(1, len(shape.again)) + (not shape.head)),
        parallel=replace(
            parallel, pp=min(parallel.pp, 2), dp=parallel.dp if has_dp else parallel.least_dp
        ),
        pipeline=PipelineConfig(split_backward=config.pipeline.split_backward),
        data=DataConfig(),
        run=RunConfig(),
        train=TrainConfig(
            micro_batch_size=train.micro_batch_size,
            dtype=train.dtype,
            fp8=train.fp8,
            device=train.device,
            seed=train.seed,
        ),
    )
