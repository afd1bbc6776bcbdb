"""What travels between neighbouring stages, and over which axes.

    tp rank 0    [ a | b ]   sends a    ---- link ---->    receives a   [ a | b ]   gathered over tp,
    tp rank 1    [ a | b ]   sends b    ---- link ---->    receives b   [ a | b ]   behind the link
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from hybridpar.comm import all_gather
from hybridpar.config import Config
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn.placement import Range, split_ranges, split_sizes
from hybridpar.nn.sequence import SequencePart


@dataclass(frozen=True)
class Lane:
    """The pipeline's neighbours and what travels between them: one activation, or its gradient, of `shape`.

    `slicing`: axis whose ranks all hold the same activation, so that each sends a slice of it. None: each rank sends
    all of what it holds.
    """

    pp: Axis
    reverse: Axis
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    slicing: Axis | None = None

    @classmethod
    def of(cls, config: Config, grid: ProcessGrid, dtype: torch.dtype, device: torch.device) -> Lane:
        """The lane of a rank of `grid`.

        Shapes: an activation is [b, s, h], equal on all ranks of tp; with parallel.sequence each has its own rows.
        """
        sequence = config.parallel.sequence
        rows = SequencePart.of(config.model.seq_length, grid.tp, sequence).length
        shape = (config.train.micro_batch_size, rows, config.model.hidden_size)
        return cls(grid.pp, grid.pp_reverse, shape, dtype, device, None if sequence else grid.tp)

    def whole(self) -> Tensor:
        """An empty activation."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def room(self) -> Tensor:
        """An empty tensor for what this rank receives of an activation. Shapes: `shape`, or [n] where it is sliced."""
        if self._slice is None:
            return self.whole()
        start, stop = self._slice
        return torch.empty(stop - start, dtype=self.dtype, device=self.device)

    def cut(self, x: Tensor) -> Tensor:
        """What this rank sends of `x`: a copy of its slice, which does not keep `x` alive; else `x` itself."""
        if self._slice is None:
            return x
        start, stop = self._slice
        return x.flatten()[start:stop].clone()

    def join(self, part: Tensor) -> Tensor:
        """The activation of which this rank has received `part`.

        Shapes: as `room` -> `shape`. Collectives: one all-gather over `slicing`.
        """
        if self._slice is None or self.slicing is None:
            return part
        return all_gather(part, self.slicing, 0, split_sizes(prod(self.shape), self.slicing.size)).view(self.shape)

    @cached_property
    def _slice(self) -> Range | None:
        """Where the numbers that this rank sends are in the activation, read in order; None: it sends all of them."""
        if self.slicing is None or self.slicing.size == 1:
            return None
        return split_ranges(prod(self.shape), self.slicing.size)[self.slicing.rank]
