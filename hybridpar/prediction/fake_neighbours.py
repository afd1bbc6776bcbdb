"""Run one process as one rank of many: its collectives and messages send nothing, and use the
memory that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridpar.config import Config
from hybridpar.grid import Axis, ProcessGrid, sizes_of

Note = Callable[[str, Iterable[Tensor], Iterable[Tensor]], object]
"""Callback for a call: its operator, the tensors that it reads, and the tensors that it writes."""


def _nobody(op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Ignore a call."""


class _Done(dist.Work):
    def wait(self, *args: Any) -> bool:
        """Return at once."""
        return True


def _in_place(op: str) -> Callable[..., Any]:
    """Return a collective that reads and writes each of its tensors."""

    def call(self: SilentGroup, tensors: Any, *args: Any) -> Any:
        self.note(op, tensors, tensors)
        return _Done()

    return call


def _into(op: str) -> Callable[..., Any]:
    """Return a collective that reads one tensor and writes another."""

    def call(self: SilentGroup, output: Tensor, input: Tensor, *args: Any) -> Any:
        self.note(op, [input], [output])
        return _Done()

    return call


class SilentGroup(dist.ProcessGroup):
    """A communicator whose calls change nothing, and are noted by torch's names of their
    operators."""

    note: Note = staticmethod(_nobody)
    allreduce, broadcast, reduce = map(
        _in_place, ("c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_")
    )
    alltoall_base = _into("c10d::alltoall_base_")
    _allgather_base = all_gather_single = _into(
        "c10d::_allgather_base_"
    )  # the name before torch 2.13, and the name since then
    _reduce_scatter_base = reduce_scatter_single = _into("c10d::_reduce_scatter_base_")  # likewise

    def send(self, tensors: Any, *args: Any) -> Any:
        self.note("c10d::send", tensors, [])
        return _Done()

    def recv(self, tensors: Any, *args: Any) -> Any:
        self.note("c10d::recv_", [], tensors)
        return _Done()


def silent_group(rank: int, size: int, note: Note = _nobody) -> SilentGroup:
    """Return the communicator of rank `rank` of `size`."""
    group = SilentGroup(rank, size)  # type: ignore[call-arg]
    group.note = note  # type: ignore[method-assign]
    return group


def silent_axis(name: str, size: int) -> Axis:
    """Return an axis with this process as the first of `size` ranks, whose collectives send and
    change nothing."""
    return Axis(name, 0, tuple(range(size)), silent_group(0, size) if size > 1 else None)


def silent_grid(config: Config, rank: int = 0, note: Note = _nobody) -> ProcessGrid:
    """Return the grid of a configuration as its rank `rank` sees it."""
    return ProcessGrid.imagined(
        sizes_of(config.parallel),
        rank,
        lambda _, ranks: silent_group(ranks.index(rank), len(ranks), note),
    )
