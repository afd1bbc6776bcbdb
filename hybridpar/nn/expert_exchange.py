"""Expert parallelism: rows of tokens travel to the ranks that hold their experts, and back.

The ranks of ep hold neighbouring experts, as many each as possible, and have tokens of their own:

    rank 0, experts 0 1       rows  [ 0 0 1 2 2 3 ]        sorted by expert, from its own tokens
    rank 1, experts 2 3       rows  [ 0 1 1 1 3 3 ]
                                       |  all-to-all
    rank 0                    [ 0 0 1 | 0 1 1 1 ]          by rank they come from, then by expert
                              [ 0 0 0 1 1 1 1 ]            sorted by expert, which computes them
    rank 1                    [ 2 2 3 | 3 3 ]

The outputs take the same way back. Meanwhile the shared expert computes, if there is one: its first
product while rows go out, its second one while outputs come back.

A rank keeps the rows that come to it, whose number depends on the routing. With a bound
(memory.expert_load) rows beyond it move in further rounds, which keep the rows of their sender alone
and run again in the backward pass.

An expert sees the rows of all ranks of ep, so the gradient of its weights is a sum over their
tokens, which no factor of ep corrects: a loss is divided by the whole batch's number of targets.

Source: GShard, arXiv 2006.16668, section 3; without a capacity, so pieces are uneven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_gather, all_to_all, start_all_to_all
from hybridpar.grid import Axis
from hybridpar.nn.placement import split_ranges, split_sizes


def own_experts(num_experts: int, axis: Axis) -> range:
    """Return the experts of this rank of ep."""
    return range(*split_ranges(num_experts, axis.size)[axis.rank])


def plan_rounds(loads: Sequence[int], axis: Axis, like: Tensor, load_bound: float) -> Tensor:
    """Return how many rows each rank of ep sends to each expert in each round.

    Without a bound there is one round. With one, no rank receives more rows in a round than the
    bound times its share of all rows at balanced load. A rank takes the rows of its first expert
    first, of each rank in turn, so all ranks know what all others do.

    Args:
        loads: Number of this rank's rows for each expert of all ranks.
        axis: The ep axis.
        like: A tensor of tokens. One without values stands for rows of a balanced load; with a bound
            for two rounds that are full.
        load_bound: Largest load of a round, over the balanced one. 0: none.

    Shapes: [rounds, ranks, experts], on the CPU. Without a bound, other ranks' rows for experts that
    are not this rank's are left out.
    Collectives: an all-to-all of the loads; with a bound an all-gather.
    """
    own = own_experts(len(loads), axis)
    outgoing = torch.tensor(loads, device=like.device)
    if load_bound:
        gathered = all_gather(outgoing, axis, 0)
    else:
        sizes = [stop - start for start, stop in split_ranges(len(loads), axis.size)]
        gathered = all_to_all(outgoing, axis, sizes, [len(own)] * axis.size)
    if like.is_meta or not getattr(like, "has_values", True):
        return _balanced_rounds(loads, axis, load_bound)
    gathered = gathered.cpu().view(axis.size, -1)
    if load_bound:
        return _bounded_rounds(gathered, load_bound)
    rows = torch.zeros(axis.size, len(loads), dtype=torch.int64)
    rows[axis.rank] = torch.tensor(loads)
    rows[:, own.start : own.stop] = gathered
    return rows[None]


def _bounded_rounds(rows: Tensor, load_bound: float) -> Tensor:
    """Return the rounds of rows that all ranks know. Shapes: [ranks, experts] -> [rounds, ranks,
    experts]."""
    num_ranks, num_experts = rows.shape
    total = int(rows.sum())
    ranges = split_ranges(num_experts, num_ranks)
    limits = [_limit(total, stop - start, num_experts, load_bound) for start, stop in ranges]
    received = [int(rows[:, start:stop].sum()) for start, stop in ranges]
    number = max(1, *(-(-n // limit) for n, limit in zip(received, limits, strict=True)))
    rounds = torch.zeros(number, num_ranks, num_experts, dtype=torch.int64)
    for (start, stop), limit in zip(ranges, limits, strict=True):
        counts = rows[:, start:stop].t().flatten()  # its first expert's first
        ends = counts.cumsum(0)
        for place in range(number):
            until = ends.clamp(max=(place + 1) * limit)
            since = (ends - counts).clamp(min=place * limit)
            taken = (until - since).clamp(min=0)
            rounds[place, :, start:stop] = taken.view(stop - start, num_ranks).t()
    return rounds


def _balanced_rounds(loads: Sequence[int], axis: Axis, load_bound: float) -> Tensor:
    """Return the rounds of a balanced load. With a bound there are two that are full, and this rank
    sends all of its rows in the second, which has the most in memory."""
    if not load_bound:
        return torch.tensor([[list(loads)] * axis.size])
    own = own_experts(len(loads), axis)
    limit = _limit(axis.size * sum(loads), len(own), len(loads), load_bound)
    kept = sum(loads[expert] for expert in own)
    rounds = []
    for mine, others in (([0] * len(loads), limit), (list(loads), max(limit - kept, 0))):
        sizes = iter(split_sizes(others, (axis.size - 1) * len(own)))
        ranks = [
            mine
            if rank == axis.rank
            else [next(sizes) if e in own else 0 for e in range(len(loads))]
            for rank in range(axis.size)
        ]
        rounds.append(ranks)
    return torch.tensor(rounds)


def _limit(total: int, own: int, num_experts: int, load_bound: float) -> int:
    """Return how many rows a rank with `own` experts receives in a round at most."""
    return max(1, math.ceil(load_bound * total * own / num_experts))


def order_by_round(rounds: Tensor, rank: int) -> Tensor:
    """Return the order in which a rank sends its rows, which are sorted by expert: round by round.

    Shapes: [rounds, ranks, experts] -> [rows], on the CPU.
    """
    of_rank = rounds[:, rank].t()
    numbers = torch.arange(len(rounds)).repeat(len(of_rank))
    return torch.argsort(numbers.repeat_interleave(of_rank.flatten()), stable=True)


@dataclass(frozen=True)
class RowExchange:
    """The way of a round's rows to the experts of other ranks.

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
    def of(rows: Tensor, axis: Axis, device: torch.device) -> RowExchange:
        """Return the way of a round's rows.

        Args:
            rows: Number of rows of each rank for each expert.
            axis: The ep axis.
            device: The device of the rows.
        """
        num_experts = rows.shape[1]
        own = own_experts(num_experts, axis)
        of_rank = rows[axis.rank].tolist()
        received = rows[:, own.start : own.stop]
        experts = torch.arange(len(own)).repeat(axis.size)
        order = torch.argsort(experts.repeat_interleave(received.flatten()), stable=True)
        return RowExchange(
            axis,
            tuple(sum(of_rank[start:stop]) for start, stop in split_ranges(num_experts, axis.size)),
            tuple(received.sum(1).tolist()),
            order.to(device),
            torch.argsort(order).to(device),
            tuple(received.sum(0).tolist()),
        )

    def to_experts(self) -> Transfer:
        """Return the way of rows to the experts that compute them.

        Shapes: [sum(sent), h] -> [sum(received), h], sorted by expert of this rank, from all ranks.
        """
        return Transfer(self._start_to_experts, self._start_from_experts)

    def from_experts(self) -> Transfer:
        """Return the way of outputs back to the ranks of their tokens.

        Shapes: [sum(received), h] -> [sum(sent), h].
        """
        return Transfer(self._start_from_experts, self._start_to_experts)

    def _start_to_experts(self, rows: Tensor) -> Receive:
        receive = _start(rows, self.axis, self.sent, self.received)
        return lambda: receive().index_select(0, self.order)

    def _start_from_experts(self, rows: Tensor) -> Receive:
        return _start(rows.index_select(0, self.place), self.axis, self.received, self.sent)


Receive = Callable[[], Tensor]
"""Waits for rows and returns them."""


def _start(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Receive:
    """Start to exchange rows. Shapes: [sum(sent), h] -> [sum(received), h]."""
    width = rows.shape[1]
    receive = start_all_to_all(
        rows.reshape(-1), axis, [n * width for n in sent], [n * width for n in received]
    )
    return lambda: receive().view(-1, width)


class Transfer:
    """Rows that move to other ranks while this one computes, and later their gradients, back.

        forward    start     products that do not need the rows          arrive
        backward   arrive    gradients of the same products              start

    Autograd runs the backward of what was computed last first. So whatever is computed between
    `start` and `arrive` hides both ways.

    Args:
        start: Starts to move rows.
        start_back: Starts to move their gradients.

    Collectives: one all-to-all, and another in the backward pass.
    """

    def __init__(self, start: Callable[[Tensor], Receive], start_back: Callable[[Tensor], Receive]):
        self._start = start
        self._start_back = start_back
        self._receive: Receive | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Start to move rows; return what `arrive` takes."""
        ticket: Tensor = _Started.apply(rows, self)
        return ticket

    def arrive(self, ticket: Tensor) -> Tensor:
        """Wait for the rows, and return them."""
        rows: Tensor = _Arrived.apply(ticket, self)
        return rows

    def send(self, rows: Tensor) -> None:
        """Start to move rows."""
        self._receive = self._start(rows)

    def send_back(self, gradients: Tensor) -> None:
        """Start to move the gradients of rows."""
        self._receive = self._start_back(gradients)

    def take(self) -> Tensor:
        """Wait for what was sent last, and return it."""
        assert self._receive is not None, "nothing is under way"
        receive = self._receive
        self._receive = None
        return receive()


class _Started(Function):
    """Returns an empty tensor, which ties the arrival to these rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.send(rows)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transfer.take(), None


class _Arrived(Function):
    """Returns the rows that have arrived; their gradients leave in the backward."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.send_back(grad)
        return grad.new_empty(0), None
