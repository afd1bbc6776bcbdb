"""Sums over tp of parts that travel as bytes: every rank gets all of them and adds what they say,
in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybridpar.comm import start_all_gather
from hybridpar.grid import Axis


class SumCodec(Protocol):
    """Rows of a part of a sum as bytes. All of it depends on nothing but the arguments."""

    def encode(self, x: Tensor) -> Tensor:
        """Shapes: [rows, cols] -> uint8 [rows, bytes of a row]."""

    def decode_(self, x: Tensor, message: Tensor) -> None:
        """Fills x [rows, cols] with what `message` says."""

    def marks(self, message: Tensor, cols: int) -> Tensor | None:
        """What `gradient` needs of a message; None: nothing."""

    def gradient(self, dy: Tensor, marks: Tensor | None) -> Tensor:
        """The gradient of a part of a sum, of which that of the sum is dy. Shapes: [.., cols] ->
        the same."""


def start_coded_sum(
    x: Tensor, axis: Axis, codec: SumCodec
) -> tuple[Callable[[], Tensor], Tensor | None]:
    """Starts the sum of `x` over the axis; a function that waits for it, and the codec's marks of
    this rank's part.

    Shapes: x [.., cols] -> the same, with equal bits on all ranks. Collectives: one all-gather.
    """
    rows = x.reshape(-1, x.shape[-1])
    message = codec.encode(rows)
    gather = start_all_gather(message, axis, 0)

    def finish() -> Tensor:
        total, part = (
            torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(2)
        )
        for rank, one in enumerate(gather().view(axis.size, *message.shape)):
            codec.decode_(part if rank else total, one)
            if rank:
                total += part
        return total.view(x.shape)

    return finish, codec.marks(message, rows.shape[1])
