"""Footprints of stages of any number of layers from those of few: a layer more takes what the layer
before took.

Tracing a stage runs its code layer by layer; a planner asks for hundreds of stages. All that a
footprint counts is a sum over equal layers or the largest of them, so from `_FEW` layers on it
grows evenly: exact (tested), but for the norm's scratch space of some kilobytes.
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
"""What a layer takes of these does not depend on micro-batches."""
_ADD_UP = ("weights", "master", "gradients", "optimizer", "kept", "waiting", "factors", "moved")
"""Bytes of blocks that are there at the same time."""


class Footprints:
    """`trace_stage`, which remembers. Stages whose layers are all alike are traced with few of
    them."""

    def __init__(self) -> None:
        self._known: dict[object, Footprint] = {}
        self._lines: dict[object, list[dict[str, int]]] = {}
        self._results: dict[Any, Any] = {}  # of operators, many of which stages have in common

    def __call__(
        self,
        config: Config,
        blocks: range,
        recompute: Recomputation,
        buffers: Buffers,
        device: torch.device,
    ) -> Footprint:
        """The footprint that `trace_stage` gives."""
        if not config.has_equal_layers:
            parallel = config.parallel
            b = config.train.micro_batch_size
            key = (
                _bears(config),
                config.pipeline.split_backward,
                parallel.zero and (parallel.zero, parallel.dp),
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
        """About the same from fewer traces, for comparing many: of micro-batches of 1 and 2, two
        layers, no ZeRO; what each layer more takes is what the second takes (recomputed as a stage:
        the third) of one sample, and so of each.
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
        share = parallel.dp if parallel.zero else 1
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
        """About the footprint of a stage, from those of its blocks: what they keep adds up, and of
        what a pass takes besides the most counts. What goes from one to the next is kept, as where
        each has it to give."""
        kinds = block_kinds(config.model)
        may_differ = any(
            group.frozen for group in config.optim.groups
        )  # which of a kind are frozen

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
        """The footprint of a stage of few layers with one sample and with two, and what a layer
        more takes with one."""
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
        )  # of one layer the peak is another
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
    """A stage, wherever in the model it is: its ends, and for each of its layers what is recomputed
    (see `_way`)."""

    embedding: bool
    again: tuple[str, ...]
    head: bool
    whole: bool

    @property
    def blocks(self) -> range:
        """Its blocks in a model that has these layers only, and one more where the stage has no
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
    """Recomputation of a layer: 'all' of it, 'selective', or '': none."""
    return (
        "all" if block in recompute.blocks else "selective" if block in recompute.selective else ""
    )


def _bears(config: Config) -> tuple[object, ...]:
    """What bears on a rough footprint, besides its shape: what `_what_counts` leaves."""
    parallel = config.parallel
    train = config.train
    others = (
        getattr(config, f.name)
        for f in fields(config)
        if f.name not in ("parallel", "pipeline", "data", "run", "train")
    )
    replicas = parallel.dp if config.compression.replicas_differ or config.feeds_back else 1
    return (
        *others,
        replace(parallel, zero=0, pp=min(parallel.pp, 2), dp=replicas),
        train.dtype,
        train.fp8,
        train.device,
        train.seed,
    )


def _unsplit(split: list[dict[str, int]] | None) -> list[dict[str, int]]:
    """Footprints without split backwards, from those with them, which have a backward that stays
    whole; none where the first of a batch takes something else, which of a whole one is not
    known."""
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
    """The configuration in which all that does not bear on a stage's footprint is at its
    defaults."""
    parallel = config.parallel
    train = config.train
    has_dp = config.replicas_differ or config.feeds_back
    return replace(
        config,
        model=config.model.with_layers(max(1, len(shape.again)) + (not shape.head)),
        parallel=replace(parallel, pp=min(parallel.pp, 2), dp=parallel.dp if has_dp else 1),
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
