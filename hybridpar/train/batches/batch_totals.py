"""Sums over the grid that decide about a batch, in one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm import Work, all_reduce_async
from hybridpar.grid import Axis


@dataclass(frozen=True)
class BatchSums:
    """Totals of a batch, equal on all ranks that summed them.

    Attributes:
        square_norms: Squared gradient norm of each rank of the pipeline.
        stop_requested: Whether any rank asks to end training.
        numbers: Losses and metrics, in the order of their names.
    """

    square_norms: list[float]
    stop_requested: bool
    numbers: list[float]


class BatchTotals:
    """This rank's contribution to a batch's sums: gradient norm, stop request, losses and metrics.

    One float64 all-reduce, so that every rank takes the same decision.
    Layout: squared norm of each pipeline rank, stop requests, losses and metrics.
    """

    def __init__(self, num_ranks: int, names: Sequence[str], device: torch.device):
        self._num_ranks = num_ranks
        self._names = names
        self._values = torch.zeros(num_ranks + 1 + len(names), dtype=torch.float64, device=device)
        self._work: Work | None = None

    def set_square_norm(self, rank: int, value: Tensor) -> None:
        """Set the squared gradient norm of this rank of the pipeline."""
        self._values[rank] = value

    def set_stop_requested(self, requested: bool) -> None:
        """Say whether this rank asks to end training."""
        self._values[self._num_ranks] = float(requested)

    def set_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set losses and metrics, by name; those without a value are 0."""
        for i, name in enumerate(self._names):
            self._values[self._num_ranks + 1 + i] = numbers.get(name, 0.0)

    def all_reduce_async(self, axis: Axis) -> Work:
        """Start the sum over an axis."""
        self._work = all_reduce_async(self._values, axis)
        return self._work

    def wait(self) -> None:
        """Wait for the sum that was started."""
        assert self._work is not None, "no sum was started"
        self._work.wait()

    def read(self) -> BatchSums:
        """Return the sums, after `wait`. On a GPU this waits for the device."""
        values = self._values.tolist()
        stop = values[self._num_ranks]
        return BatchSums(values[: self._num_ranks], stop > 0, values[self._num_ranks + 1 :])
