"""The local passes of an embedding: looking up a rank's rows of a table, and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.ops.backends.libraries import Shapes, nothing
from hybridpar.ops.backends.registry import resolve


def embedding(weight: Tensor, backend: str = "auto") -> Any:
    """Return the two passes for a table like `weight` [rows, h], outside of autograd.

        rows(ids, weight, start) -> [.., h]: weight[id - start] for ids int64 [..], zero if there is
            no
        such row. start None: the table is unsharded, and an id that is not in it an IndexError (on
            a
        GPU, a failed assertion).
        add_gradient_(gradient [rows, h], dy [.., h], ids, start, overwrite) adds each row's
            gradients,
        in an order that depends on the ids alone; overwrite: to zero. `gradient` has dy's type, or
        float32.

    Raises: ConfigError if the backend cannot run.
    """
    return resolve("embedding", backend, weight)()


class Passes:
    """The torch reference."""

    @staticmethod
    def rows(ids: Tensor, weight: Tensor, start: int | None) -> Tensor:
        if start is None:
            return F.embedding(ids, weight)
        num_rows = len(weight)
        if num_rows == 0:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        elsewhere = _elsewhere(ids, num_rows, start)
        return F.embedding((ids - start).clamp(0, num_rows - 1), weight).masked_fill_(
            elsewhere.unsqueeze(-1), 0
        )

    @staticmethod
    def add_gradient_(
        gradient: Tensor, dy: Tensor, ids: Tensor, start: int | None, overwrite: bool
    ) -> None:
        # Ids of other ranks point to a row past the end, which ATen skips as padding; it sums in a
        # fixed order.
        extra = len(gradient)
        rows = ids
        if start is not None:
            rows = (ids - start).masked_fill_(_elsewhere(ids, extra, start), extra)
        full = torch.ops.aten.embedding_dense_backward(
            dy.contiguous(), rows, extra + 1, extra, False
        )[:extra]
        if overwrite:
            gradient.copy_(full)
        else:
            gradient.add_(full)


class Compiled:
    """The passes of a library, such as torch.ops.hybridpar, which keep no table of gradients."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def rows(self, ids: Tensor, weight: Tensor, start: int | None) -> Tensor:
        if start is None:
            return F.embedding(ids, weight)
        return self._library.embedding(ids.contiguous(), weight, start)

    def add_gradient_(
        self, gradient: Tensor, dy: Tensor, ids: Tensor, start: int | None, overwrite: bool
    ) -> None:
        self._library.embedding_backward_(
            gradient, dy.contiguous(), ids.contiguous(), start or 0, overwrite
        )
        torch.autograd.graph.increment_version(gradient)


def _elsewhere(ids: Tensor, num_rows: int, start: int) -> Tensor:
    return (ids < start) | (ids >= start + num_rows)


PASSES: Shapes = {
    "embedding": lambda ids, weight, start: weight.new_empty((*ids.shape, weight.shape[1])),
    "embedding_backward_": nothing,
}
