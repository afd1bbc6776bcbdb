"""A micro-batch in pieces of equal numbers of samples, which a stage computes by turns: sums over tp of one piece are
under way while another one is computed, forward and backward.

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
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge

from hybridpar.autograd import backward_from, once_differentiable
from hybridpar.models.blocks import MicroBatch
from hybridpar.random import RandomKey
from hybridpar.turns import Turns

Block = Callable[[Any, MicroBatch, RandomKey | None], Any]


def by_turns(turns: Turns, block: Block, x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> Any:
    """`block(x, batch, key)`, a piece of the samples at a time; losses are the sums of the pieces'.

    Shapes: x [b, ..] -> [b, ..], or 0-d losses; b is a multiple of `turns.number`, and what of the batch has dimensions
    has b samples in the first one. Collectives: those of the block, for each piece.
    """
    names: list[str] = []

    def of_piece(x: Tensor | None, batch: MicroBatch, key: RandomKey | None) -> Tensor:
        out = block(x, batch, key)
        if isinstance(out, dict):
            names[:] = out
            out = torch.stack(list(out.values()))
        return out

    number, samples = turns.number, len(batch["tokens"])
    batches = _pieces_of(batch, number)
    keys = [key and replace(key, counter=key.counter + key.counter.new_tensor([0, i * samples // number]))
            for i in range(number)]
    functions = [partial(of_piece, batch=batch, key=key) for batch, key in zip(batches, keys, strict=True)]
    xs = [None] * number if x is None else x.chunk(number)
    if torch.is_grad_enabled():
        start = torch.empty(0, requires_grad=True)
        out = _Turns.apply(start, x, turns, functions)
    else:
        out = _joined(turns.run([partial(_without_graph, *each) for each in zip(functions, xs, strict=True)]))
    return dict(zip(names, out.unbind(), strict=True)) if names else out


def _pieces_of(batch: MicroBatch, number: int) -> list[dict[str, Tensor]]:
    chunks = {name: tensor.chunk(number) if tensor.dim() else [tensor] * number for name, tensor in batch.items()}
    return [{name: of[i] for name, of in chunks.items()} for i in range(number)]


def _joined(outs: Sequence[Tensor]) -> Tensor:
    """The activation, or the losses, of all pieces."""
    return torch.cat(list(outs)) if outs[0].dim() > 1 else torch.stack(list(outs)).sum(0)


def _without_graph(function: Callable[[Tensor | None], Tensor], x: Tensor | None) -> Tensor:
    with torch.no_grad():
        return function(x)


class _Turns(Function):
    """A graph for each piece, and the backwards of these by turns. `start` has a gradient where x has none."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, x: Tensor | None, turns: Turns,
                functions: Sequence[Callable[[Tensor | None], Tensor]]) -> Tensor:
        leaves = [None] * turns.number if x is None else [
            piece.detach().requires_grad_(x.requires_grad) for piece in x.chunk(turns.number)]

        def run(function: Callable[[Tensor | None], Tensor], leaf: Tensor | None) -> Any:
            with torch.enable_grad():
                out = function(leaf)
                return out.detach(), get_gradient_edge(out)

        outs, edges = zip(*turns.run([partial(run, *each) for each in zip(functions, leaves, strict=True)]),
                          strict=True)
        ctx.turns, ctx.pieces = turns, list(zip(edges, leaves, strict=True))
        return _joined(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        turns, pieces, ctx.pieces = ctx.turns, ctx.pieces, None
        gradients = gradient.chunk(turns.number) if gradient.dim() > 1 else [gradient] * turns.number
        turns.run([partial(backward_from, edge, each) for (edge, _), each in zip(pieces, gradients, strict=True)])
        dx = torch.cat([leaf.grad for _, leaf in pieces]) if ctx.needs_input_grad[1] else None
        return None, dx, None, None
