"""Context parallelism: each rank of cp holds some tokens of every sample.

A sample's tokens are cut into two pieces for each rank, one from the front and one from the back,
as causal attention costs more the later a token is:

    rank 0   [ a . . . . . . a ]
    rank 1   [ . b . . . . b . ]         c = 4: every rank has equally many tokens, and equal work
    rank 2   [ . . c . . c . . ]
    rank 3   [ . . . d d . . . ]

Everything but attention acts on single tokens. For attention every rank receives the keys and
values of the others, in the order of the positions, so that each query sees its keys in the order
in which one process has them; context_attention.py has two other ways. `token_ranges` alone says
which tokens a rank has, and for packed documents `document_ranges`.

Sources: the cut: Megatron-LM's context parallelism; all-gathered keys: Llama 3, arXiv 2407.21783,
section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_gather, exchange, reduce_scatter
from hybridpar.grid import Axis
from hybridpar.nn.placement import Range, split_sizes
from hybridpar.nn.sequence import SequencePart
from hybridpar.ops.dropout import Rows


@lru_cache(maxsize=64)
def token_ranges(
    length: int, size: int, windows: tuple[int, ...] = (0,)
) -> tuple[tuple[Range, ...], ...]:
    """Return the tokens of a sample that each rank of cp has, ascending, as half-open ranges.

    Ranks have equally many tokens, to one. Rank after rank takes them from both ends of what is
    left, the front and the back in the ratio that gives it its share of the pairs of a query and a
    key. Without windows, and if 2 size divides the length, rank r has the pieces r and
    2 size - 1 - r of 2 size equal pieces. Adjacent pieces are joined.

    Args:
        length: Tokens of a sample.
        size: Ranks of cp.
        windows: Most keys that a query of each layer sees; 0: all earlier ones.
    """
    keys = torch.arange(1, length + 1)
    pairs = torch.zeros(length, dtype=torch.int64)
    for window in windows:
        pairs += keys.clamp(max=window) if window else keys
    before = torch.cat([pairs.new_zeros(1), pairs.cumsum(0)])
    left = 0
    right = length
    found: list[tuple[Range, ...]] = []
    for rank, tokens in enumerate(split_sizes(length, size)[:-1]):
        front = torch.arange(tokens + 1)
        own = before[left + front] - before[left] + before[right] - before[right - tokens + front]
        fair = before[right] - before[left]
        most = int((own * (size - rank) - fair).abs().argmin())
        ranges = (left, left + most), (right - tokens + most, right)
        found.append(tuple((start, stop) for start, stop in ranges if start < stop))
        left += most
        right -= tokens - most
    return (*found, ((left, right),))


def document_ranges(
    document_start: Tensor, size: int, windows: tuple[int, ...] = (0,)
) -> tuple[tuple[Range, ...], ...]:
    """Return the tokens of packed rows that each rank of cp has, as `token_ranges` does.

    A token costs as many pairs as its document has tokens up to it, so the costly ones are anywhere.
    Rank after rank takes neighbours of what is left, from the place that gives it its share of the
    pairs most closely; what is left is a circle, on which there is always such a place.

    Args:
        document_start: First position that each token attends to. Shapes: [rows, length].
        size: Ranks of cp.
        windows: See `token_ranges`.
    """
    length = document_start.shape[1]
    keys = torch.arange(length) - document_start.long() + 1
    pairs = torch.zeros(length, dtype=torch.int64)
    for window in windows:
        pairs += (keys.clamp(max=window) if window else keys).sum(0)
    left = torch.arange(length)
    found: list[tuple[Range, ...]] = []
    for rank, tokens in enumerate(split_sizes(length, size)):
        of_left = pairs[left]
        before = torch.cat([of_left.new_zeros(1), of_left.repeat(2).cumsum(0)])
        own = before[tokens : tokens + len(left)] - before[: len(left)]
        start = int((own * (size - rank) - of_left.sum()).abs().argmin())
        taken = torch.zeros(len(left), dtype=torch.bool)
        taken[torch.arange(start, start + tokens) % len(left)] = True
        found.append(_ranges_of(left[taken]))
        left = left[~taken]
    return tuple(found)


def _ranges_of(positions: Tensor) -> tuple[Range, ...]:
    """Return ascending positions as ranges."""
    if not len(positions):
        return ()
    gaps = (positions.diff() > 1).nonzero().flatten() + 1
    runs = positions.tensor_split(gaps)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


ContextComm = Literal["all_gather", "ring", "ulysses"]
CUT = "context_ranges"
"""Name in a micro-batch of its cut: int64 [ranks, ranges, 2] on the CPU, where empty ranges mean
nothing."""


class Piece(NamedTuple):
    """Neighbouring tokens of one rank.

    Attributes:
        start: Position of the first one in the sample.
        at: Index of the first one if the tokens of all ranks follow each other in rank order.
        length: Number of tokens.
    """

    start: int
    at: int
    length: int


@dataclass(frozen=True)
class Context:
    """The ranks that share the tokens of each sample.

    On an axis of size 1 every method is the identity, whatever the length.

    Attributes:
        axis: The cp axis.
        length: Tokens of a sample, over all ranks.
        windows: See `token_ranges`.
        comm: How attention reaches the tokens of other ranks (parallel.cp_comm).
        follows_documents: Whether a micro-batch of packed documents is cut for equal work on these;
            blocks then ask for the context `of` each micro-batch.
        cut_ranges: The tokens of each rank in such a micro-batch. None: see `token_ranges`.
    """

    axis: Axis = field(default_factory=lambda: Axis("cp"))
    length: int = 0
    windows: tuple[int, ...] = (0,)
    comm: ContextComm = "all_gather"
    follows_documents: bool = False
    cut_ranges: tuple[tuple[Range, ...], ...] | None = None

    @cached_property
    def is_split(self) -> bool:
        """Whether several ranks share a sample."""
        return self.axis.size > 1

    @property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """The tokens of each rank."""
        if self.cut_ranges is not None:
            return self.cut_ranges
        return token_ranges(self.length, self.axis.size, self.windows)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def own(self) -> tuple[Range, ...]:
        """The tokens of this rank."""
        return self.ranges[self.axis.rank]

    def full_length(self, tokens: int) -> int:
        """Return the length of a sample of which this rank has `tokens` tokens."""
        return self.length if self.is_split else tokens

    def local_length(self, tokens: int) -> int:
        """Return how many of a sample's `tokens` tokens this rank has."""
        return self.sizes[self.axis.rank] if self.is_split else tokens

    def pieces(self) -> Iterator[Piece]:
        """Yield the tokens of all ranks, rank by rank."""
        at = 0
        for ranges in self.ranges:
            for start, stop in ranges:
                yield Piece(start, at, stop - start)
                at += stop - start

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a micro-batch with this rank's tokens alone.

        Every tensor whose second dimension counts a sample's tokens is cut. Two are added:
        `positions` ([tokens] int64), unless there are some, and `rows` ([tokens] int32), the place
        of each token in its sample. With `follows_documents` a packed one also has its `CUT`.
        Shapes: [b, length, ..] -> [b, tokens, ..].
        """
        if not self.is_split:
            return dict(batch)
        if self.follows_documents and self.cut_ranges is None and "document_start" in batch:
            ranges = document_ranges(batch["document_start"], self.axis.size, self.windows)
            return replace(self, cut_ranges=ranges).cut(batch) | {CUT: _as_tensor(ranges)}
        mine = {name: self._take(x) if self._counts_tokens(x) else x for name, x in batch.items()}
        device = next(iter(batch.values())).device
        places = torch.cat([torch.arange(*tokens, device=device) for tokens in self.own])
        mine.setdefault("positions", places)
        mine["rows"] = places.to(torch.int32)
        return mine

    def of(self, batch: Mapping[str, Tensor]) -> Context:
        """Return the context with the cut of a micro-batch."""
        if (given := batch.get(CUT)) is None:
            return self
        ranges = tuple(
            tuple((start, stop) for start, stop in of_rank if start < stop)
            for of_rank in given.tolist()
        )
        return replace(self, cut_ranges=ranges)

    def _counts_tokens(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.shape[1] == self.length

    def _take(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, start:stop] for start, stop in self.own], 1)

    def rows_of(self, part: SequencePart) -> Rows:
        """Return the rows of the sample that this rank holds between blocks, for dropout.

        `part`: its part of this rank's tokens (sequence parallelism).
        """
        if not self.is_split:
            return part.start
        found = []
        at = 0
        for start, stop in self.own:
            first = max(part.start - at, 0)
            last = min(part.start + part.length - at, stop - start)
            if first < last:
                found.append((start + first, start + last))
            at += stop - start
        return tuple(found) if len(found) > 1 else found[0][0] if found else 0

    @property
    def next(self) -> int:
        """The rank of cp after this one, in a ring."""
        return (self.axis.rank + 1) % self.axis.size

    @property
    def previous(self) -> int:
        """The rank of cp before this one, in a ring."""
        return (self.axis.rank - 1) % self.axis.size

    def take(self, x: Tensor, rank: int) -> Tensor:
        """Return the tokens of a rank. Shapes: [b, n, length, d] -> [b, n, tokens, d]."""
        return torch.cat([x[:, :, start:stop] for start, stop in self.ranges[rank]], 2)

    def place(self, x: Tensor, rank: int, ordered: Tensor) -> None:
        """Write the tokens of a rank to their positions. Shapes: x [.., tokens, d], ordered
        [.., length, d]."""
        at = 0
        for start, stop in self.ranges[rank]:
            ordered[..., start:stop, :] = x[..., at : at + stop - start, :]
            at += stop - start

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions, ascending.

        Shapes: [b, n, tokens, d] -> [b, n, length, d].
        Collectives: forward one all-gather of both, backward one reduce-scatter; without NCCL both
        are c - 1 transfers to the next rank.
        """
        return _GatheredKeys.apply(k, v, self) if self.is_split else (k, v)


ALONE = Context()
"""A rank that has all tokens of its samples."""


def _as_tensor(ranges: Sequence[Sequence[Range]]) -> Tensor:
    """Return the ranges of each rank, filled up with empty ones. Shapes: [ranks, ranges, 2]."""
    most = max(map(len, ranges))
    return torch.tensor([[*of_rank, *[(0, 0)] * (most - len(of_rank))] for of_rank in ranges])


class _GatheredKeys(Function):
    """Keys and values go in one message."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        ctx.context = context
        b, n, _, d = k.shape
        ordered = k.new_empty(2, b, n, context.length, d)
        for owner, both in gathered(torch.stack((k, v)), context):
            context.place(both, owner, ordered)
        return ordered[0], ordered[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        context = ctx.context
        mine = reduced(lambda rank: torch.stack([context.take(x, rank) for x in (dk, dv)]), context)
        return mine[0], mine[1], None


def gathered(own: Tensor, context: Context) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank of cp and its tensor, beginning with this rank's.

    Tokens are the fourth dimension. With NCCL it is one all-gather. Otherwise tensors travel from
    rank to rank, and the next one arrives while the caller uses the one before: with Gloo that
    takes a third of the time of its all-gather (2.8 against 9.4 ms, 2 MB on two ranks).
    """
    axis = context.axis
    if own.is_cuda and not axis.via_host:
        by_rank = all_gather(own, axis, 3, context.sizes).split(context.sizes, 3)
        yield from enumerate(by_rank)
        return
    yield from travelling(own, context)


def travelling(own: Tensor, context: Context) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank of cp and its tensor, in the order in which they arrive in a ring.

    The next one arrives while the caller uses the one before. Tokens are the fourth dimension.
    """
    axis = context.axis
    current = own
    for step in range(axis.size):
        owner = (axis.rank - step) % axis.size
        work = None
        if step < axis.size - 1:
            shape = list(current.shape)
            shape[3] = context.sizes[(owner - 1) % axis.size]
            buffer = current.new_empty(shape)
            work = exchange(current, context.next, buffer, context.previous, axis)
        yield owner, current
        if work is not None:
            work.wait()
            current = buffer


def reduced(part: Callable[[int], Tensor], context: Context) -> Tensor:
    """Return the sum over the ranks of cp of this rank's part.

    Args:
        part: Returns what this rank adds to the part of a rank. Tokens are the fourth dimension.

    With NCCL it is one reduce-scatter. Otherwise sums travel from rank to rank, which with Gloo
    takes less time than its reductions (4.9 against 8.2 ms, 4 MB on two ranks).
    """
    axis = context.axis
    size = axis.size
    first = part((axis.rank - 1) % size)
    if first.is_cuda and not axis.via_host:
        parts = [part(rank) for rank in range(size)]
        return reduce_scatter(torch.cat(parts, 3), axis, 3, context.sizes)
    current = first
    for step in range(size - 1):
        owner = (axis.rank - 2 - step) % size
        shape = list(current.shape)
        shape[3] = context.sizes[owner]
        buffer = current.new_empty(shape)
        work = exchange(current, context.next, buffer, context.previous, axis)
        added = part(owner)
        work.wait()
        current = buffer.add_(added)
    return current
