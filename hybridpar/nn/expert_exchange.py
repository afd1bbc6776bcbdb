"""Expert parallelism: rows of tokens travel to the ranks that hold their experts, and back.

The ranks of ep hold neighbouring experts, as many each as possible, and have tokens of their own:

    rank 0, experts 0 1       rows  [ 0 0 1 2 2 3 ]        sorted by expert, from its own tokens
    rank 1, experts 2 3       rows  [ 0 1 1 1 3 3 ]
                                       |  all-to-all
    rank 0                    [ 0 0 1 | 0 1 1 1 ]          by rank they come from, then by expert
                              [ 0 0 0 1 1 1 1 ]            sorted by expert, which computes them
    rank 1                    [ 2 2 3 | 3 3 ]

The outputs take the same way back. An expert sees the rows of all ranks of ep, so the gradient of
its weights is a sum over their tokens, which no factor of ep corrects: a loss is divided by the
whole batch's number of targets.

Source: GShard, arXiv 2006.16668, section 3; without a capacity, so pieces are uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_to_all
from hybridpar.grid import Axis
from hybridpar.nn.placement import split_ranges


def own_experts(num_experts: int, axis: Axis) -> range:
    """Return the experts of this rank of ep."""
    return range(*split_ranges(num_experts, axis.size)[axis.rank])


@dataclass(frozen=True)
class RowExchange:
    """The way of a micro-batch's rows to the experts of other ranks.

    Attributes:
        axis: The ep axis.
        sent: Number of rows that go to each rank.
        received: Number of rows that come from each rank.
        order: Places of the received rows, sorted by expert. Shapes: [sum(received)].
        place: Place of each received row among the sorted ones. Shapes: [sum(received)].
        loads: Number of rows of each expert of this rank.
    """

    axis: Axis
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    place: Tensor
    loads: tuple[int, ...]

    @staticmethod
    def of(loads: Sequence[int], axis: Axis, like: Tensor) -> RowExchange:
        """Return the way of this rank's rows.

        Args:
            loads: Number of its rows for each expert of all ranks.
            axis: The ep axis.
            like: A tensor of these rows. One without values stands for rows of a balanced load.

        Collectives: an all-to-all of the loads.
        """
        parts = split_ranges(len(loads), axis.size)
        sent = tuple(sum(loads[start:stop]) for start, stop in parts)
        own = own_experts(len(loads), axis)
        outgoing = torch.tensor(loads, device=like.device)
        sizes = [stop - start for start, stop in parts]
        incoming = all_to_all(outgoing, axis, sizes, [len(own)] * axis.size)
        has_values = getattr(like, "has_values", True) and not like.is_meta
        by_rank = [[loads[expert] for expert in own]] * axis.size
        if has_values:
            by_rank = incoming.view(axis.size, len(own)).tolist()
        experts = torch.arange(len(own)).repeat(axis.size)
        counts = torch.tensor(by_rank).flatten()
        order = torch.argsort(experts.repeat_interleave(counts), stable=True)
        return RowExchange(
            axis,
            sent,
            tuple(map(sum, by_rank)),
            order.to(like.device),
            torch.argsort(order).to(like.device),
            tuple(map(sum, zip(*by_rank, strict=True))),
        )

    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts, sorted by expert, from all ranks' rows.

        Shapes: [sum(sent), h] -> [sum(received), h]. Collectives: forward one all-to-all, backward
        another.
        """
        moved: Tensor = _Exchanged.apply(rows, self._to_experts, self._from_experts)
        return moved

    def from_experts(self, rows: Tensor) -> Tensor:
        """Return the outputs of this rank's rows, from the experts of all ranks.

        Shapes: [sum(received), h] -> [sum(sent), h]. Collectives: as `to_experts`.
        """
        moved: Tensor = _Exchanged.apply(rows, self._from_experts, self._to_experts)
        return moved

    def _to_experts(self, rows: Tensor) -> Tensor:
        return _send(rows, self.axis, self.sent, self.received).index_select(0, self.order)

    def _from_experts(self, rows: Tensor) -> Tensor:
        return _send(rows.index_select(0, self.place), self.axis, self.received, self.sent)


def _send(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange rows. Shapes: [sum(sent), h] -> [sum(received), h]."""
    width = rows.shape[1]
    flat = all_to_all(
        rows.reshape(-1), axis, [n * width for n in sent], [n * width for n in received]
    )
    return flat.view(-1, width)


Move = Callable[[Tensor], Tensor]


class _Exchanged(Function):
    """Moves rows; the backward moves their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move, move_back: Move) -> Tensor:
        ctx.move_back = move_back
        return move(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.move_back(grad), None, None
