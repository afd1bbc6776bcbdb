"""Splits a micro-batch into equal pieces that a stage computes by turns: while one piece is
computed, another one's sums over tp are under way, forward and backward.

    forward     A attention | B attention | A mlp         | B mlp ...
    A's sums                  ===========                   =======
    B's sums                                ============

Source: DeepSpeed-Domino, arXiv 2409.15241 (rows of a micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from, once_differentiable
from hybridpar.models.blocks import MicroBatch
from hybridpar.random import RandomKey
from hybridpar.turns import Turns

Block = Callable[[Any, MicroBatch, RandomKey | None], Any]
Function = Callable[[Tensor | None], Tensor]


def by_turns(
    turns: Turns, block: Block, x: Tensor | None, batch: MicroBatch, key: RandomKey | None
) -> Any:
    """`block(x, batch, key)`, a piece of the samples at a time; losses are the sums of the pieces'.

    Shapes: x [b, ..] -> [b, ..], or 0-d losses; b is a multiple of `turns.number`. Tensors of the
        batch are 0-d or
    [b, ..]. Collectives: those of the block, for each piece.
    """
    number = turns.number
    names = list[str]()
    joined = list[Tensor]()

    def compute(i: int, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> Tensor:
        out = block(x, batch, key)
        if isinstance(out, dict):
            names[:] = out
            out = torch.stack(list(out.values()))
        if not joined:  # by the first piece to end, which is the first: its thread keeps the memory
            joined.append(torch.empty((number, *out.shape), dtype=out.dtype, device=out.device))
        joined[0][i].copy_(out.detach())
        return out

    functions = [
        partial(compute, i, batch=of_piece, key=key and _later(key, i * len(of_piece["tokens"])))
        for i, of_piece in enumerate(_pieces_of(batch, number))
    ]
    xs = [None] * number if x is None else x.detach().chunk(number)
    if torch.is_grad_enabled():
        out = _Turns.apply(torch.empty(0, requires_grad=True), x, turns, functions, xs, joined)
    else:
        turns.run([partial(_without_graph, *each) for each in zip(functions, xs, strict=True)])
        (out,) = joined
    return dict(zip(names, out.sum(0).unbind(), strict=True)) if names else out.flatten(0, 1)


def _pieces_of(batch: MicroBatch, number: int) -> list[dict[str, Tensor]]:
    chunks = {
        name: tensor.chunk(number) if tensor.dim() else [tensor] * number
        for name, tensor in batch.items()
    }
    return [{name: of[i] for name, of in chunks.items()} for i in range(number)]


def _later(key: RandomKey, samples: int) -> RandomKey:
    """The key of the micro-batch so many samples later."""
    return replace(key, counter=key.counter + key.counter.new_tensor([0, samples]))


def _without_graph(function: Function, x: Tensor | None) -> None:
    with torch.no_grad():
        function(x)


class _Turns(torch.autograd.Function):
    """A graph for each piece, and the backwards of these by turns. `start` has a gradient where x
    has none."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        x: Tensor | None,
        turns: Turns,
        functions: Sequence[Function],
        xs: Sequence[Tensor | None],
        joined: Sequence[Tensor],
    ) -> Tensor:
        def run(function: Function, leaf: Tensor | None) -> GradientEdge:
            with torch.enable_grad():
                return get_gradient_edge(function(leaf))

        for leaf in xs if x is not None else ():
            leaf.requires_grad_()  # type: ignore[union-attr]
        edges = turns.run([partial(run, *each) for each in zip(functions, xs, strict=True)])
        ctx.turns, ctx.pieces, ctx.shape = (
            turns,
            list(zip(edges, xs, strict=True)),
            None if x is None else x.shape,
        )
        return joined[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> Any:
        turns = ctx.turns
        pieces = ctx.pieces
        ctx.pieces = None
        dx = None if ctx.shape is None else gradients.new_empty(ctx.shape)
        parts = [None] * turns.number if dx is None else dx.chunk(turns.number)

        def run(
            edge: GradientEdge, leaf: Tensor | None, gradient: Tensor, part: Tensor | None
        ) -> None:
            backward_from(edge, gradient)
            if leaf is not None and part is not None:
                assert leaf.grad is not None
                part.copy_(leaf.grad)
                leaf.grad = None  # here: its memory is of this thread

        turns.run(
            [
                partial(run, edge, leaf, gradient, part)
                for (edge, leaf), gradient, part in zip(
                    pieces, gradients.unbind(), parts, strict=True
                )
            ]
        )
        return None, dx, None, None, None, None
