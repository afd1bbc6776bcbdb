"""What links lose, in one process: the layer y = C(x) behind each stage's last block, and sums of
C(part) over tp.

Forward and backward, what went over a link there goes through its codec here. A codec's bytes
depend on a token's features alone, so neither slices over tp nor replicas nor larger micro-batches
make a difference. The parts of a layer's sum are products with those columns of the weight
(forward) or rows (backward) that ranks of tp hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F

from hybridpar.config import Config
from hybridpar.models.build import build_blocks
from hybridpar.nn.linear import ColumnParallelLinear, RowParallelLinear
from hybridpar.pipeline.run.codecs import Codecs, PartialSums, coded_layers, through
from hybridpar.pipeline.run.stage_split import stage_split
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.state.compression.codec import Codec

Layer = ColumnParallelLinear | RowParallelLinear


def add_boundaries(blocks: Mapping[int, nn.Module], config: Config) -> None:
    """Puts the links of `config` behind a whole model's blocks, by number; without gradients those
    of an evaluation."""
    _add_sums(blocks, config)
    codecs = Codecs.of(config)
    split = stage_split(config)
    for before, after in pairwise(split):
        forward, backward = (codecs.on(flow, after.start) for flow in (1, -1))
        if forward is None and backward is None:
            continue
        evaluating = codecs.on(1, after.start, training=False)

        def cross(
            module: nn.Module,
            inputs: Any,
            out: Tensor,
            forward: Codec | None = forward,
            backward: Codec | None = backward,
            evaluating: Codec | None = evaluating,
        ) -> Tensor:
            return (
                _Crossing.apply(out, forward, backward)
                if torch.is_grad_enabled()
                else through(evaluating, out)
            )

        blocks[before.stop - 1].register_forward_hook(cross)


def _add_sums(blocks: Mapping[int, nn.Module], config: Config) -> None:
    """Has layers add up what arrives of the parts that ranks of tp compute."""
    sums = PartialSums.of(config)
    if sums is None or config.parallel.tp == 1:
        return
    split = build_blocks(config.model, silent_grid(config).tp, blocks)
    for whole, part in zip(coded_layers(blocks), coded_layers(split), strict=True):
        shard = part.placements["weight"].shard
        assert shard is not None
        parts = [shard.index(rank) for rank in range(config.parallel.tp)]
        product = _by_columns if isinstance(whole, RowParallelLinear) else _by_rows
        for method in ("forward", "without_bias"):
            setattr(whole, method, partial(product, whole, parts, sums, method == "forward"))


def _by_columns(
    layer: Layer,
    parts: list[Tensor],
    sums: PartialSums,
    biased: bool,
    x: Tensor,
    sizes: None = None,
) -> Tensor:
    """The sum of products of the parts of x and of the weight's columns."""
    products = [F.linear(x[..., part], layer.weight[:, part]) for part in parts]
    if torch.is_grad_enabled():
        products = [_Part.apply(product, sums) for product in products]
    y = torch.stack(products).sum(0)
    return y + layer.bias if biased and layer.bias is not None else y


def _by_rows(
    layer: Layer,
    parts: list[Tensor],
    sums: PartialSums,
    biased: bool,
    x: Tensor,
    sizes: None = None,
) -> Tensor:
    """x times the weight, of whose rows each part gives a part of the gradient of x."""
    y = torch.cat([F.linear(_Part.apply(x, sums, True), layer.weight[part]) for part in parts], -1)
    y = y[..., torch.cat(parts).argsort()]
    return y + layer.bias if biased and layer.bias is not None else y


class _Part(Function):
    """What arrives of a part of a sum; `backward_only`: of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: PartialSums, backward_only: bool = False) -> Tensor:
        ctx.sums = sums
        ctx.marks = None
        ctx.backward_only = backward_only
        if backward_only:
            return x.view_as(x)
        rows = x.reshape(-1, x.shape[-1])
        ctx.marks = sums.marks(sums.encode(rows), rows.shape[1])
        return through(sums.codec, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (
            through(ctx.sums.codec, dy) if ctx.backward_only else ctx.sums.gradient(dy, ctx.marks),
            None,
            None,
        )


class _Crossing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Codec | None, backward: Codec | None) -> Tensor:
        if forward is not None and backward is not None and backward.follows:
            rows = x.reshape(-1, x.shape[-1])
            backward = backward.at(forward.places(forward.encode(rows), rows.shape[1]))
        ctx.codec = backward
        return x.view_as(x) if forward is None else through(forward, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return through(ctx.codec, dy), None, None
