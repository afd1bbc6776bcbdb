"""The all-reduce over the grid that decides about a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm import Work, all_reduce_async
from hybridpar.grid import Axis


@dataclass(frozen=True)
class BatchSums:
    """Totals of a batch, equal on all ranks.

    Attributes:
        square_norms: Squared gradient norm of each pipeline rank.
        stop_requested: Whether any rank asks to end training.
        numbers: Losses and metrics, in the order of `BatchTotals`' names.
    """

    square_norms: list[float]
    stop_requested: bool
    numbers: list[float]


class BatchTotals:
    """This rank's share of a batch's sums: gradient norm, stop request, losses, metrics.

    One float64 all-reduce, so that every rank takes the same decision.
    Layout: squared norm of each pipeline rank, number of stop requests, losses and metrics.

    Args:
        num_ranks: Number of pipeline ranks.
        names: Names of losses and metrics, in order.
        device: Device of the buffer.
    """

    def __init__(self, num_ranks: int, names: Sequence[str], device: torch.device):
        self._num_ranks = num_ranks
        self._names = names
        self._values = torch.zeros(num_ranks + 1 + len(names), dtype=torch.float64, device=device)
        self._work: Work | None = None

    def set_square_norm(self, rank: int, value: Tensor) -> None:
        """Set this pipeline rank's squared gradient norm."""
        self._values[rank] = value

    def set_stop_requested(self, requested: bool) -> None:
        """Set whether this rank asks to end training."""
        self._values[self._num_ranks] = float(requested)

    def set_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set losses and metrics by name; a missing name counts as 0."""
        for i, name in enumerate(self._names):
            self._values[self._num_ranks + 1 + i] = numbers.get(name, 0.0)

    def all_reduce_async(self, axis: Axis) -> Work:
        """Start the all-reduce over an axis of the grid."""
        self._work = all_reduce_async(self._values, axis)
        return self._work

    def wait(self) -> None:
        """Wait for the all-reduce."""
        assert self._work is not None, "no sum was started"
        self._work.wait()

    def read(self) -> BatchSums:
        """Return the sums; call `wait` first. On a GPU this blocks until the device has them."""
        values = self._values.tolist()
        stop = values[self._num_ranks]
        return BatchSums(values[: self._num_ranks], stop > 0, values[self._num_ranks + 1 :])
