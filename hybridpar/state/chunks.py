"""A flat buffer in chunks: contiguous ranges of whole blocks, each with a place of its own.

    layout   [ tied | 0 1 2 3 | 0 1 2 3 ]      each kind of reduction has its run of blocks
    chunks   [ a        | b       | c   ]      cuts lie between blocks

Today every buffer is one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from hybridpar.cpu import zeros
from hybridpar.state.layout import FlatLayout


class Location(Enum):
    """Memory that holds a chunk: of the device, of the host, none. SHARDED: this rank has its part of the elements."""

    DEVICE = "device"
    HOST = "host"
    SHARDED = "sharded"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int


def block_of(name: str) -> int:
    """3 for blocks.3.mlp.up.weight; -1 for a parameter that is in no block."""
    number = name.split(".")[1] if name.startswith("blocks.") else ""
    return int(number) if number.isdecimal() else -1


def cut(layout: FlatLayout, chunk_bytes: int) -> tuple[Chunk, ...]:
    """The layout in chunks of at least `chunk_bytes` but for the last; none ends within the parameters of a block."""
    ends = (*layout.offsets[1:], layout.numel)
    runs = [list(run) for _, run in groupby(range(len(layout.names)), lambda i: block_of(layout.names[i]))]
    stops, start = [], 0
    for run in runs:
        stop = ends[run[-1]]
        if run is runs[-1] or (stop - start) * layout.dtype.itemsize >= chunk_bytes:
            stops.append(stop)
            start = stop
    return tuple(Chunk(start, stop) for start, stop in zip((0, *stops), stops, strict=False))


class Buffer:
    """A flat buffer of a layout: one tensor for each chunk, zeros at first.

    Slices are of the whole buffer and must lie within one chunk. `places`: one for each chunk.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device,
                 chunks: Sequence[Chunk] = (), place: Location = Location.DEVICE):
        self.layout, self.chunks = layout, tuple(chunks) or (Chunk(0, layout.numel),)
        self.tensors = [zeros(c.stop - c.start, dtype, device) for c in self.chunks]
        self.places = [place] * len(self.chunks)

    def __getitem__(self, where: slice) -> Tensor:
        start, stop = where.start, where.stop
        for chunk, tensor in zip(self.chunks, self.tensors, strict=True):
            if chunk.start <= start <= stop <= chunk.stop:
                return tensor[start - chunk.start : stop - chunk.start]
        raise AssertionError(f"elements {start} to {stop} are not in one chunk")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def views(self) -> dict[str, Tensor]:
        """Every parameter's view, in the order of the layout."""
        layout = self.layout
        return {name: self[offset : offset + prod(shape)].view(shape)
                for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True)}

    def copy_(self, other: Buffer) -> None:
        """Takes the elements of another buffer of the same offsets, which is one chunk or has the same ones."""
        for chunk, tensor in zip(self.chunks, self.tensors, strict=True):
            tensor.copy_(other[chunk.start : chunk.stop])
