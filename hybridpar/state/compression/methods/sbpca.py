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
from hybridpar.nn.placement import Placement, split_ranges
from hybridpar.state.compression.low_rank import LowRank, basis, factor_share
from hybridpar.state.compression.method import Entry
from hybridpar.state.compression.wire import Reader

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
    """Sends a message with P and one with S for each block. The first message also carries the
    uncompressed tensors.
    """

    name = "sbpca"
    scaled = frozenset({_S})

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Two messages for each block."""
        return 2 * self.settings.gradients_blocks

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

    @property
    def _keys(self) -> list[list[str]]:
        return [[f"{entry.name}.{what}" for what in (_X, _D, _S)] for entry in self.packed]

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: two broadcasts for each rank and block."""
        tracked = [Tracked(*(self.feedback.learned[key] for key in keys)) for keys in self._keys]
        # number of blocks that an estimate counts as when the batch begins
        before = [(~of.is_new).to(self.dtype) for of in tracked]
        parts = [self._take(entry.name) for entry in self.packed]
        number = max(1, min(self.settings.gradients_blocks, max(map(len, parts))))
        blocks = [[own[a:b] for a, b in split_ranges(len(own), number)] for own in parts]
        rows, columns = ([entry.shape[dim] for entry in self.packed] for dim in range(2))
        for i in range(number):
            weights = [((i + more) / (i + more + 1), 1 / (i + more + 1)) for more in before]
            tracked = [self._begun(of) if of.is_new else of for of in tracked]
            first = message if i == 0 else self.other.own
            for entry, of, own in zip(self.packed, tracked, blocks, strict=True):
                self._project(first, entry, 1, own[i], of.d)
            yield from self._gather(first, is_first=i == 0)
            totals = self._sums(self.messages() if i == 0 else self.other.readers(), columns)
            tracked = [
                of.with_x(p, *pair) for of, p, pair in zip(tracked, totals, weights, strict=True)
            ]
            second = self.other.own
            for entry, of, own in zip(self.packed, tracked, blocks, strict=True):
                self._project(second, entry, 0, own[i], of.x)
            yield from self._gather(second)
            totals = self._sums(self.other.readers(), rows)
            tracked = [
                of.with_d(s, *pair) for of, s, pair in zip(tracked, totals, weights, strict=True)
            ]
        for total, keys, of in zip(self.totals(gradients), self._keys, tracked, strict=True):
            torch.mm(of.d * (number * of.s), of.x.t(), out=total)
            for key, tensor in zip(keys, of, strict=True):
                self.feedback.next_learned[key].copy_(tensor)

    def _begun(self, of: Tracked) -> Tracked:
        """Return a starting estimate: a random D, and an X without weight."""
        return Tracked(torch.zeros_like(of.x), basis(self._random(*of.d.shape)), of.s)

    def _take(self, name: str) -> list[Product]:
        """Remove and return the factors of this rank's gradient, in the order of the backwards."""
        parts = self.parts.pop(name, [])
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


GRADIENTS = StreamingPCA
