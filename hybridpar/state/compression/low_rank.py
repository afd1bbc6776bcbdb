"""The base of methods that send thin matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from hybridpar import random
from hybridpar.config import Config
from hybridpar.models.cost import block_placements
from hybridpar.nn.placement import Placement
from hybridpar.state.compression.method import Entry, Method, add
from hybridpar.state.compression.wire import Reader
from hybridpar.state.reduction.precision import Precision


class LowRank(Method):
    """Base of methods whose messages are thin matrices, which are added in rank order."""

    @staticmethod
    def packs(shape: Sequence[int], placement: Placement) -> bool:
        return len(shape) == 2

    def _rank(self, entry: Entry) -> int:
        return min(self.settings.gradients_rank, *entry.shape)

    @cached_property
    def _form(self) -> Precision:
        """Precision of the factors."""
        return Precision("full", self.dtype)

    def _read(self, message: Reader, numel: int) -> Tensor:
        """Return the next numbers of a message. Shapes: -> [numel]."""
        part = message.take(self._form.size(numel), self._form.unit)
        return self._form.read(torch.empty(numel, dtype=self.dtype, device=self.device), part)

    def _sums(self, messages: Iterable[Reader], rows: Sequence[int]) -> list[Tensor]:
        """Return the matrices of all messages, added in rank order. Shapes: [rows, rank] each,
        column-major.
        """
        totals = [
            torch.empty(self._rank(entry), n, dtype=self.dtype, device=self.device)
            for entry, n in zip(self.packed, rows, strict=True)
        ]
        for rank, message in enumerate(messages):
            for total in totals:
                add(total.view(-1), self._read(message, total.numel()), overwrite=rank == 0)
        return [total.t() for total in totals]

    def _random(self, rows: int, rank: int) -> Tensor:
        """Return a starting matrix, equal for all parameters of a shape. Shapes: -> [rows,
        rank].
        """
        site = random.site(f"{self.name} {rows} {rank}")
        block = random.CounterBlock(rows, rank, stride=rank, start=0)
        return random.normal(0, site, block, self.dtype).to(self.device)


def factor_share(config: Config) -> float:
    """Return the ratio of factor elements to matrix elements, over the transformer blocks (all
    blocks, if there are only two).
    """
    blocks = block_placements(config.model, config.optim.groups)
    matrices = [
        one.shape
        for block in blocks[1:-1] or blocks
        for one in block
        if one.trainable and len(one.shape) > 1
    ]
    sent = sum(shape[0] + prod(shape[1:]) for shape in matrices)
    rank = config.compression.gradients_rank
    return min(1.0, rank * sent / max(1, sum(map(prod, matrices))))


def basis(x: Tensor) -> Tensor:
    """Return orthonormal columns with the span of x's columns, each in the direction of the column
    of x. Linearly dependent columns are replaced by others.

    Shapes: [rows, k], k <= rows -> [rows, k].
    """
    q, r = torch.linalg.qr(x.double())
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).to(x.dtype)
