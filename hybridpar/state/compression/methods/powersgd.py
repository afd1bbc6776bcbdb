"""PowerSGD: sends a matrix of gradients as a product of two thin ones, by one step of power
iteration in each batch.

    P = sum of M Q       over ranks, M [m, n] = G + E of a rank, Q [n, r] of the batch before
    P <- orthonormal
    Q = sum of M^T P     over ranks
    the sum of all M is taken to be P Q^T; each rank's E is its M - P (its M^T P)^T

Factors may be sent in fewer bits (gradients_values): then P and Q are sums of rounded messages, and
the rounding error of a rank's M^T P goes into its E. P is made orthonormal after that, so its
rounding only turns the basis.

Settings: gradients_rank, gradients_values.

Source: arXiv 1905.13727, algorithms 1 and 2, with sums instead of means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from hybridpar.comm import Works
from hybridpar.config import CompressionConfig, Config
from hybridpar.state.compression.low_rank import LowRank, factor_share
from hybridpar.state.compression.method import Entry
from hybridpar.state.compression.wire import Reader
from hybridpar.state.reduction.precision import Precision

_FACTOR = "factor"


class PowerSGD(LowRank):
    """Sends two messages: P after the uncompressed tensors, then Q."""

    name = "powersgd"
    rounds = 2
    scaled = frozenset({_FACTOR})

    @classmethod
    def learned(
        cls, shape: Sequence[int], settings: CompressionConfig
    ) -> dict[str, tuple[int, ...]]:
        return {_FACTOR: (shape[1], min(settings.gradients_rank, *shape))}

    @cached_property
    def _form(self) -> Precision:
        return Precision(self.settings.gradients_values, self.dtype, self.kernels.quantize)

    def most_bytes(self) -> tuple[int, int]:
        first, second = (
            sum(self._form.num_bytes(entry.shape[dim] * self._rank(entry)) for entry in self.packed)
            for dim in range(2)
        )
        return first, second

    @classmethod
    def element_bytes(cls, config: Config, item: int) -> float:
        values = Precision.bytes_per_number(config.compression.gradients_values, item)
        return factor_share(config) * values

    def exchange(self, gradients: list[Tensor], batch: int, message: Reader) -> Iterator[Works]:
        """See Method. Collectives: two broadcasts for each rank."""
        matrices = [self.feedback.next_kept[entry.name] for entry in self.packed]
        self._multiply(message, matrices, [self._start(entry) for entry in self.packed])
        yield self.wire.gather([message.num_bytes] * self.axis.size)
        bases = [orthonormal(p) for p in self._sums(self.messages(), [len(x) for x in matrices])]
        second = self.other.own
        for matrix, base, own in zip(
            matrices, bases, self._multiply(second, [x.t() for x in matrices], bases), strict=True
        ):
            matrix.addmm_(base, own.t(), alpha=-1.0)
        self._count_factors(message, second)
        yield self.other.gather([second.num_bytes] * self.axis.size)
        totals = self._sums(self.other.readers(), [x.shape[1] for x in matrices])
        for out, entry, base, total in zip(
            self.totals(gradients), self.packed, bases, totals, strict=True
        ):
            torch.mm(base, total.t(), out=out)
            self.feedback.next_learned[f"{entry.name}.{_FACTOR}"].copy_(total)

    def _start(self, entry: Entry) -> Tensor:
        """Return the Q to start from: the previous batch's, with columns scaled to length 1. Zero
        columns are replaced by random ones, equal for all matrices of a shape.
        """
        factor = self.feedback.learned[f"{entry.name}.{_FACTOR}"]
        fresh = self._random(*factor.shape)
        lengths = torch.linalg.vector_norm(factor, dim=0)
        return torch.where(
            lengths > 0, factor / lengths.clamp(min=torch.finfo(self.dtype).tiny), fresh
        )

    def _multiply(
        self, message: Reader, matrices: Sequence[Tensor], factors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Write products into a message, and return them as the receivers will decode them.
        Products are written column by column, because they differ in size.
        """
        products = []
        for matrix, factor in zip(matrices, factors, strict=True):
            columns = factor.t() @ matrix.t()
            part = message.take(self._form.size(columns.numel()), self._form.unit)
            self._form.write(part, columns.view(-1))
            products.append(self._form.read(columns.view(-1), part).view_as(columns).t())
        return products

    def _count_factors(self, first: Reader, second: Reader) -> None:
        elements = sum(sum(entry.shape) * self._rank(entry) for entry in self.packed)
        self.sent.add(elements, first.num_bytes + second.num_bytes)


def orthonormal(x: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of x's columns, by Gram-Schmidt in float64, twice;
    dependent columns become zero. Shapes: [rows, columns] -> [rows, columns].
    """
    basis = x.to(torch.float64, copy=True)
    for _ in range(2):
        for i, column in enumerate(basis.unbind(1)):
            done = basis[:, :i]
            column -= done @ (done.t() @ column)
            length = torch.linalg.vector_norm(column)
            column /= torch.where(length == 0, 1.0, length)
    return basis.to(x.dtype)


GRADIENTS = PowerSGD
