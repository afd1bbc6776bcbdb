"""Token embedding split over the tp axis by vocabulary rows, and the learned position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from hybridpar.comm import reduce_from_
from hybridpar.errors import DataError, config_error
from hybridpar.grid import Axis
from hybridpar.nn.linear import Device
from hybridpar.nn.placement import Init, ParallelModule, Placement, Shard


class VocabParallelEmbedding(ParallelModule):
    """Rows of a table whose rows are split over the axis; a rank may hold none.

    `tied`: the name under which the table is shared with another pipeline stage (see Placement).
    `check_ids`: whether ids outside the table are looked for, which waits for the device; None: on the CPU only.
    Unchecked ones give a zero row where tp > 1.

    Shapes: ids int64 [..] -> [.., hidden], replicated. Collectives: forward one all-reduce, backward none.
    Raises: DataError for an id that is not in the table. Source: arXiv 1909.08053, section 3.
    """

    weight: Tensor

    def __init__(self, num_embeddings: int, hidden: int, axis: Axis, *, init_std: float = 0.02, tied: str = "",
                 check_ids: bool | None = None, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__(axis)
        shard = Shard.even(0, num_embeddings, axis.size)
        ((self.start, _),) = shard.ranges[axis.rank]
        self.num_embeddings, self.check_ids = num_embeddings, check_ids
        weight = Placement((num_embeddings, hidden), Init("normal", init_std), shard, tied=tied)
        self.add_parameter("weight", weight, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.device.type == "cpu" if self.check_ids is None else self.check_ids:
            check_range(ids, self.num_embeddings, "token id")
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        return reduce_from_(_LocalRows.apply(ids, self.weight, self.start), self.axis)


class LearnedPositionEmbedding(ParallelModule):
    """A vector for each position, replicated.

    Shapes: forward(s, start=0) -> [s, hidden], the positions start to start + s.
    Raises: ConfigError beyond `seq_length`.
    """

    weight: Tensor

    def __init__(self, seq_length: int, hidden: int, axis: Axis, *, init_std: float = 0.02, device: Device = None,
                 dtype: torch.dtype | None = None):
        super().__init__(axis)
        self.add_parameter("weight", Placement((seq_length, hidden), Init("normal", init_std)), device=device,
                           dtype=dtype)

    def forward(self, length: int, start: int = 0) -> Tensor:
        if start + length > (longest := self.weight.shape[0]):
            raise config_error("model.seq_length", longest, f"the input reaches position {start + length}",
                               str(start + length))
        return self.weight[start : start + length]


def check_range(ids: Tensor, stop: int, what: str) -> None:
    """Raises: DataError naming the first of `ids` that is not within 0 to stop - 1."""
    bad = (ids < 0) | (ids >= stop)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise DataError(f"{what} {ids[where].item()} at {list(where)} is not within 0 to {stop - 1}: was the data "
                        "made with another tokenizer?")


class _LocalRows(Function):
    """The rows of ids that this rank holds, zero for the others; sums each row's gradient in a fixed order."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, start: int) -> Tensor:
        num_rows = weight.shape[0]
        elsewhere = (ids < start) | (ids >= start + num_rows)
        rows = (ids - start).masked_fill_(elsewhere, num_rows)
        ctx.save_for_backward(rows)
        ctx.num_rows = num_rows
        if num_rows == 0:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        return F.embedding(rows.clamp(max=num_rows - 1), weight).masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Ids of other ranks point to a row past the end, which ATen skips as padding; it sums in a fixed order.
        (rows,) = ctx.saved_tensors
        extra = ctx.num_rows
        full = torch.ops.aten.embedding_dense_backward(grad.contiguous(), rows, extra + 1, extra, False)
        return None, full[:extra], None
