"""Token embedding split over the tp axis by vocabulary rows, and the learned position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hybridpar import ops
from hybridpar.autograd import once_differentiable
from hybridpar.comm import reduce_from_, scatter_sequence
from hybridpar.config import AUTO, KernelsConfig
from hybridpar.errors import DataError, config_error
from hybridpar.grid import Axis
from hybridpar.nn import matmul
from hybridpar.nn.binding import GradientConsumer
from hybridpar.nn.linear import Device
from hybridpar.nn.placement import Init, ParallelModule, Placement, Shard


class VocabParallelEmbedding(ParallelModule):
    """A table whose rows are split over the axis; a rank may hold none.

    Args:
        tied: Name under which another pipeline stage shares the table (see Placement).
        check_ids: Whether to look for ids outside the table, which waits for the device. None: on
            the CPU only. Unchecked ids give a zero row if tp > 1.

    Shapes: ids int64 [..] -> [.., hidden], replicated; with `sizes` [b, s] -> [b, sizes[rank],
    hidden].
    Collectives: forward one all-reduce, backward none. With `sizes`: forward one reduce_scatter,
    backward one all-gather.
    Raises: DataError for an id that is not in the table.
    Source: arXiv 1909.08053, section 3.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        hidden: int,
        axis: Axis,
        *,
        init_std: float = 0.02,
        tied: str = "",
        check_ids: bool | None = None,
        kernels: KernelsConfig = AUTO,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(axis)
        shard = Shard.even(0, num_embeddings, axis.size)
        ((self.start, _),) = shard.ranges[axis.rank]
        self.num_embeddings = num_embeddings
        self.check_ids = check_ids
        self.kernels = kernels
        weight = Placement((num_embeddings, hidden), Init("normal", init_std), shard, tied=tied)
        self.add_parameter("weight", weight, device=device, dtype=dtype)

    def forward(self, ids: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        if ids.device.type == "cpu" if self.check_ids is None else self.check_ids:
            check_range(ids, self.num_embeddings, "token id")
        start = None if self.axis.size == 1 else self.start
        rows = _LocalRows.apply(
            ids, self.weight, start, self.kernels.embedding, self.binding("weight").consumer
        )
        if sizes is not None:
            return scatter_sequence(rows, self.axis, sizes)
        return rows if start is None else reduce_from_(rows, self.axis)


class LearnedPositionEmbedding(ParallelModule):
    """A vector for each position, replicated.

    Args:
        sequence: Whether calls ask for this rank's rows only.

    Shapes: forward(s, start=0) -> [s, hidden], for positions start to start + s.
    Raises: ConfigError beyond `num_positions`.
    """

    weight: Tensor

    def __init__(
        self,
        num_positions: int,
        hidden: int,
        axis: Axis,
        *,
        init_std: float = 0.02,
        sequence: bool = False,
        **factory: Any,
    ):
        super().__init__(axis, sequence)
        placement = Placement((num_positions, hidden), Init("normal", init_std))
        self.add_parameter("weight", placement, **factory)

    def forward(self, length: int, start: int = 0) -> Tensor:
        if start + length > (longest := self.weight.shape[0]):
            raise config_error(
                "model.max_positions",
                longest,
                f"must be at least {start + length}, the length of the input",
                str(start + length),
            )
        return self.weight if length == longest else self.weight[start : start + length]

    def at(self, positions: Tensor) -> Tensor:
        """Return the vectors of any positions below `seq_length`. Shapes: int64 [..] -> [..,
        hidden]."""
        return F.embedding(positions, self.weight)


def within(ids: Tensor, stop: int) -> bool:
    """Whether every id is from 0 to stop - 1."""
    if not ids.numel():
        return True
    low, high = ids.aminmax()
    return low.item() >= 0 and high.item() < stop


def check_range(ids: Tensor, stop: int, what: str) -> None:
    """Require ids from 0 to stop - 1. Raises: DataError naming the first other one."""
    if not within(ids, stop):
        bad = (ids < 0) | (ids >= stop)
        where = tuple(bad.nonzero()[0].tolist())
        raise DataError(
            f"{what} {ids[where].item()} at {list(where)} is out of range: 0 to {stop - 1}. Was "
            f"the data tokenized with another tokenizer?"
        )


class Rows(NamedTuple):
    """A part of a table's gradient: rows `dy` for the table rows `ids`, added in a fixed order.

    Attributes:
        start: Id of the table's first row; None: 0.
        passes: The backend that adds them up.

    Shapes: dy [.., hidden], ids [..].
    """

    dy: Tensor
    ids: Tensor
    start: int | None
    passes: Any

    def add_to(self, gradient: Tensor, overwrite: bool) -> None:
        """See `GradientPart`."""
        self.passes.add_gradient_(gradient, self.dy, self.ids, self.start, overwrite)


class _LocalRows(Function):
    """Look up the rows of ids that this rank holds; other ids get zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        start: int | None,
        backend: str,
        consumer: GradientConsumer | None,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        # the leaf itself: recomputation would bring back a copy, without its .grad
        ctx.passes = ops.embedding(weight, backend)
        ctx.leaf = weight
        ctx.consumer = consumer
        ctx.start = start
        return ctx.passes.rows(ids, weight, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        part = Rows(dy, ids, ctx.start, ctx.passes)
        if ctx.consumer is not None:
            ctx.consumer.add(part)
            return None, matmul.nothing(ctx.leaf), None, None, None
        gradient = torch.empty_like(ctx.leaf)
        part.add_to(gradient, True)
        return None, gradient, None, None, None
