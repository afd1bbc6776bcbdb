"""Streaming batch PCA: tracks gradients as D diag(s) X^T from their factors, and multiplies out
only the result.

A batch's micro-batches are divided into blocks, in order. For block i, G = sum of dy^T x over its
rows on all ranks, dy [rows, m] and x [rows, n]; w = (i + 1) / (i + 2), v = 1 / (i + 2):

    P = G^T D = sum of x^T (dy D)        X <- Q of (w X + v P / s)
    S = G X   = sum of dy^T (x X)        D <- Q of (w D + v S / s)
    s <- w s + v diag(D^T S)

    the sum of the batch's gradients is taken to be (number of blocks) D diag(s) X^T

Q is the factor of a QR decomposition in which R has a positive diagonal. A batch's initial estimate
counts as one block, so each estimate includes part of the earlier batches' estimates. Without an
initial estimate w = i / (i + 1), and D is random. If G does not change, X and D come a step of
power iteration closer to its singular vectors.

Settings: gradients_rank, gradients_blocks.

Source: doi 10.1145/3577214, with sums over rows instead of means, and summed over ranks: X, D and s
equal the result of one process that has all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.config import CompressionConfig, Config
from hybridpar.nn.matmul import Product
from hybridpar.nn.placement import Placement
from hybridpar.state.compression.low_rank import LowRank, basis, factor_share
from hybridpar.state.compression.method import Entry
from hybridpar.state.compression.wire import Reader
from hybridpar.state.gradients import BlockParts
from hybridpar.state.residency.shares import Shares

_X = "basis_in"
_D = "basis_out"
_S = "scale"


class Tracked(NamedTuple):
    """Estimate of a gradient. Shapes: x [n, k], d [m, k], s [k]."""

    x: Tensor
    d: Tensor
    s: Tensor

    @property
    def is_new(self) -> Tensor:
        """Whether there is no estimate yet. Shapes: bool []."""
        return (self.s == 0).all()

    def divisor(self) -> Tensor:
        """Return s, kept away from zero relative to its largest element; 1 if there is no estimate
        yet. Shapes: [k].
        """
        sizes = self.s.abs()
        least = sizes.max() * torch.finfo(self.s.dtype).eps ** 0.5
        return torch.where(
            self.is_new, 1.0, torch.where(self.s < 0, -1.0, 1.0) * torch.maximum(sizes, least)
        )

    def with_x(self, p: Tensor, w: Tensor, v: Tensor) -> Tracked:
        """Return the estimate with X updated from P."""
        return self._replace(x=basis(w * self.x + v * p / self.divisor()))

    def with_d(self, s: Tensor, w: Tensor, v: Tensor) -> Tracked:
        """Return the estimate with D and s updated from S."""
        kept = torch.where(self.is_new, 0.0, w)
        d = basis(kept * self.d + v * s / self.divisor())
        return Tracked(self.x, d, w * self.s + v * (d * s).sum(0))


class StreamingPCA(LowRank):
    """Sends a message with P and one with S for each block. The first message of the last block also
    carries the uncompressed tensors.
    """

    name = "sbpca"
    scaled = frozenset({_S})
    _next_block = 0

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Two messages for each block that is not exchanged yet."""
        return 2 * (self.num_blocks - self._next_block)

    @staticmethod
    def packs(shape: Sequence[int], placement: Placement) -> bool:
        """Return whether the parameter is a hidden matrix of a layer that hands its gradient over
        as factors. Layers of torch.nn do not.
        """
        return len(shape) == 2 and bool(placement.matrices) and placement.factored

    @classmethod
    def learned(
        cls, shape: Sequence[int], settings: CompressionConfig
    ) -> dict[str, tuple[int, ...]]:
        k = min(settings.gradients_rank, *shape)
        return {_X: (shape[1], k), _D: (shape[0], k), _S: (k,)}

    def most_bytes(self) -> tuple[int, int]:
        rows, columns = (
            sum(entry.shape[dim] * self._rank(entry) for entry in self.packed) for dim in range(2)
        )
        return self.dtype.itemsize * columns, self.dtype.itemsize * max(rows, columns)

    @classmethod
    def element_bytes(cls, config: Config, item: int) -> float:
        return config.compression.gradients_blocks * factor_share(config) * item

    def begin(self, parts: BlockParts, sums: Shares | None) -> None:
        super().begin(parts, sums)
        self._next_block = 0

    def block_steps(self) -> Iterator[Works]:
        """See Method. Collectives: two broadcasts for each rank."""
        yield from self._block(self.other.own)

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: two broadcasts for each rank and block."""
        while self._next_block + 1 < self.num_blocks:
            yield from self._block(self.other.own)
        yield from self._block(message, is_last=True)
        if self.keeps_factors:
            return
        for total, entry in zip(self.totals(gradients), self.packed, strict=True):
            self._multiply(entry.name, out=total)

    def total(self, name: str) -> Tensor:
        return self._multiply(name)

    def _multiply(self, name: str, out: Tensor | None = None) -> Tensor:
        """Return the sum that is taken for the batch's gradients."""
        x, d, s = self._next(name)
        scales = self.num_blocks * s
        # in the memory layout of a QR factor, so that the product has the same bits each time
        return torch.mm(_by_columns(d) * scales, _by_columns(x).t(), out=out)

    def _block(self, first: Reader, *, is_last: bool = False) -> Iterator[Works]:
        """Exchange the next block, and update the estimates by it. first: the message for P.

        The factors are freed before the message with S is waited for.
        """
        block = self._next_block
        self._next_block = block + 1
        tracked = [self._estimate(entry.name, block) for entry in self.packed]
        weights = [self._weights(entry.name, block) for entry in self.packed]
        parts = [self._take(entry.name, block) for entry in self.packed]
        rows, columns = ([entry.shape[dim] for entry in self.packed] for dim in range(2))
        for entry, of, own in zip(self.packed, tracked, parts, strict=True):
            self._project(first, entry, 1, own, of.d)
        yield from self._gather(first, is_first=is_last)
        totals = self._sums(self.messages() if is_last else self.other.readers(), columns)
        tracked = [
            of.with_x(p, *pair) for of, p, pair in zip(tracked, totals, weights, strict=True)
        ]
        second = self.other.own
        for entry, of, own in zip(self.packed, tracked, parts, strict=True):
            self._project(second, entry, 0, own, of.x)
        for own in parts:
            own.clear()
        yield from self._gather(second)
        totals = self._sums(self.other.readers(), rows)
        for entry, of, s, pair in zip(self.packed, tracked, totals, weights, strict=True):
            for place, tensor in zip(self._next(entry.name), of.with_d(s, *pair), strict=True):
                place.copy_(tensor)

    def _learned(self, name: str) -> Tracked:
        """Return the estimate that the batch began with."""
        return Tracked(*(self.feedback.learned[f"{name}.{what}"] for what in (_X, _D, _S)))

    def _next(self, name: str) -> Tracked:
        """Return the estimate after the blocks of the batch so far."""
        return Tracked(*(self.feedback.next_learned[f"{name}.{what}"] for what in (_X, _D, _S)))

    def _estimate(self, name: str, block: int) -> Tracked:
        """Return the estimate that a block updates."""
        found = self._next(name) if block else self._learned(name)
        if found.is_new:
            return self._begun(found)
        return Tracked(_by_columns(found.x), _by_columns(found.d), found.s) if block else found

    def _weights(self, name: str, block: int) -> tuple[Tensor, Tensor]:
        """Return w and v. The estimate that a batch begins with counts as one block."""
        before = (~self._learned(name).is_new).to(self.dtype)
        return (block + before) / (block + before + 1), 1 / (block + before + 1)

    def _begun(self, of: Tracked) -> Tracked:
        """Return a starting estimate: a random D, and an X without weight."""
        return Tracked(torch.zeros_like(of.x), basis(self._random(*of.d.shape)), of.s)

    def _take(self, name: str, block: int) -> list[Product]:
        """Remove and return the factors of this rank's gradient, in the order of the backwards."""
        parts = self.parts.pop((name, block), [])
        assert all(isinstance(part, Product) for part in parts), (
            f"{name}: a part that is no product"
        )
        return cast("list[Product]", parts)

    def _project(
        self, message: Reader, entry: Entry, dim: int, parts: Sequence[Product], onto: Tensor
    ) -> None:
        """Write this rank's part of G onto (dim 0) or of G^T onto (dim 1) into a message.

        The product is computed in a tensor of its own and then copied: its place in the message may
        be unaligned, which would change the bits of the product.
        """
        columns = torch.zeros(onto.shape[1], entry.shape[dim], dtype=self.dtype, device=self.device)
        for dy, x in parts:
            left, right = (dy, x) if dim == 0 else (x, dy)
            columns.t().addmm_(left.t().to(self.dtype), right.to(self.dtype) @ onto)
        message.take(columns.numel(), self.dtype).copy_(columns.view(-1))

    def _gather(self, message: Reader, *, is_first: bool = False) -> Iterator[Works]:
        """Start to broadcast a message to all ranks."""
        elements = message.num_bytes // self.dtype.itemsize - is_first * self._dense_numel
        self.sent.add(elements, message.num_bytes)
        yield (self.wire if is_first else self.other).gather([message.num_bytes] * self.axis.size)


def _by_columns(x: Tensor) -> Tensor:
    """Return a copy of a matrix, one column after the other in memory."""
    return x.t().contiguous().t()


GRADIENTS = StreamingPCA
