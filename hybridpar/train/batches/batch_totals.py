"""The all-reduce over the grid that decides about a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.comm import all_reduce_async
from hybridpar.grid import ProcessGrid


@dataclass(frozen=True)
class BatchSums:
    """Totals of a batch, equal on all ranks of a site. numbers: losses, then metrics. loads: tokens
    that each expert got, block by block."""

    square_norms: list[float]
    stop_requested: bool
    numbers: list[float]
    loads: list[float]


class BatchTotals:
    """A batch's sums under way: one float64 all-reduce, so that every rank takes the same decision.

    Layout: squared norm of each pipeline rank, number of stop requests, losses and metrics, loads of
    experts.

    Args:
        numbers: This rank's share of losses and metrics, in order.
        loads: This rank's share of the loads of experts, on its device.

    Attributes:
        work: The all-reduce, over the site's ranks.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        square_norm: Tensor,
        stop_requested: bool,
        numbers: Sequence[Tensor | float],
        loads: Tensor,
    ):
        pp = grid.pp
        self._num_ranks = pp.size
        self._end = pp.size + 1 + len(numbers)
        self._values = torch.zeros(self._end + len(loads), dtype=torch.float64, device=loads.device)
        self._values[pp.rank] = square_norm
        self._values[pp.size] = float(stop_requested)
        for place, number in enumerate(numbers, pp.size + 1):
            self._values[place] = number
        self._values[self._end :] = loads
        self.work = all_reduce_async(self._values, grid.site_group)

    def read(self) -> BatchSums:
        """Return the sums; wait for `work` first. On a GPU this blocks until the device has them."""
        values = self._values.tolist()
        stop = values[self._num_ranks]
        return BatchSums(
            values[: self._num_ranks],
            stop > 0,
            values[self._num_ranks + 1 : self._end],
            values[self._end :],
        )
