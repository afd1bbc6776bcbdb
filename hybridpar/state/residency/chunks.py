"""Flat buffers in chunks: contiguous ranges of complete parameters that are needed at the same
times.

    layout   [ tied | norms, biases | 0 1 2 3 ]      each kind of reduction has a contiguous run of parameters
    chunks   [ a    | b             | c d e f ]      blocks 0 to 3, in segments of one block each

A stage that is not divided into segments has buffers of one chunk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from hybridpar.cpu import numa_node, zeros
from hybridpar.optim.base import StateMemory
from hybridpar.state.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class BufferUsage:
    """How a chunk is used.

    Attributes:
        parts: The rank's segments that compute with it, ascending. Its gradient is final after the
            backward of the first one.
        group: Part of an UPDATE that updates it.
        stays: It never leaves fast memory.
        hosted: The host updates it (only chunks of a master copy).
    """

    parts: tuple[int, ...] = (0,)
    group: int = 0
    stays: bool = False
    hosted: bool = False


WHOLE = BufferUsage()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int
    use: BufferUsage = WHOLE


@dataclass(frozen=True, slots=True)
class StateItem:
    """A chunk of a kind of state: 'weights/0', 'weights/1' (two versions), 'gradients/0', 'master',
    'optimizer/..'.
    """

    kind: str
    use: BufferUsage
    num_bytes: int


EMPTY = Chunk(0, 0, BufferUsage(stays=True))
"""Chunk of a buffer that has no memory and therefore nothing to offload."""


class Memory:
    """Memory of a device, allocated once and kept. Chunks that a host updates are in host memory.

    Attributes:
        is_of_host: A host optimizer updates the state in this memory, without copies.
    """

    is_of_host = False

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Return the flat tensor of a chunk, filled with zeros. kind: kind of state."""
        if self._is_on_host(chunk):
            return self._host.zeros(kind, chunk, dtype)
        return zeros(chunk.stop - chunk.start, dtype, self.device)

    def _is_on_host(self, chunk: Chunk) -> bool:
        """Return whether a chunk is updated on the host, in memory of its own."""
        return chunk.use.hosted and not self.is_of_host

    @cached_property
    def _host(self) -> HostMemory:
        return HostMemory(self.device)

    def for_optimizer(self, uses: Callable[[str], BufferUsage]) -> StateMemory | None:
        """Return the memory for optimizer state; None: the device's. uses: by parameter name."""
        return None

    def seal(self, allocate: Callable[[], object], unsharded: int) -> None:
        """End the allocation. Call it once all state is allocated except the optimizer's, which
        `allocate` allocates. unsharded: most bytes of chunks that are unsharded at once.
        """

    def close(self) -> None:
        """Free files and other resources outside this process."""

    def viewing(self, chunk: Tensor) -> AbstractContextManager[object]:
        """Return a context in which views of a chunk, or of its base, can be made."""
        return nullcontext()

    def writing(self, *views: Tensor) -> AbstractContextManager[object]:
        """Return a context to write these views' chunks in. Use it only while no plan runs."""
        return nullcontext()

    def read(self, view: Tensor) -> Tensor:
        """Return the view, or a copy of equal content. Read it at once; do not write to it."""
        return view

    def forget(self) -> None:
        """Drop the copy that was read, because its content is about to change."""


class HostMemory(Memory):
    """Host memory that a device copies to and from.

    For a GPU it is pinned, on the NUMA node of the GPU, in tensors of exact size; torch's own
    pinned memory is rounded up to powers of two.

    Raises:
        RuntimeError: CUDA cannot pin more memory.
    """

    is_of_host = True

    def __init__(self, device: torch.device):
        super().__init__()
        self._pins = device.type == "cuda"
        self._pinned = list[Tensor]()
        self._node = numa_node(device)
        weakref.finalize(self, _unpin, self._pinned)

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        tensor = zeros(chunk.stop - chunk.start, dtype, self.device, node=self._node)
        if self._pins and type(tensor) is Tensor and tensor.nbytes:  # not a ghost
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
            )
            self._pinned.append(tensor)
        return tensor


def _unpin(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def block_of(name: str) -> int:
    """Return the number of a parameter's block: 3 for blocks.3.mlp.up.weight; -1 outside blocks."""
    number = name.split(".")[1] if name.startswith("blocks.") else ""
    return int(number) if number.isdecimal() else -1


def cut(
    layout: FlatLayout, use: Callable[[str], BufferUsage], absent: Container[str] = ()
) -> tuple[Chunk, ...]:
    """Cut a layout into chunks, joining neighbouring parameters of equal use.

    Args:
        use: Returns a parameter's use by its name.
        absent: Parameters that get no memory.
    """
    runs = [
        (key, [layout.ranges[name] for name in run])
        for key, run in groupby(layout.names, lambda name: None if name in absent else use(name))
    ]
    return tuple(Chunk(run[0][0], run[-1][1], key) for key, run in runs if key) or (EMPTY,)


class Buffer:
    """A flat buffer of a layout: one tensor for each chunk.

    Slices count from the buffer's start and must lie within one chunk. kind: kind of state, for the
    memory.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        memory: Memory,
        chunks: Sequence[Chunk] = (),
        kind: str = "",
    ):
        self.layout = layout
        self.dtype = dtype
        self.memory = memory
        self.chunks = tuple(chunks) or (Chunk(0, layout.numel),)
        self.tensors = [memory.zeros(kind, chunk, dtype) for chunk in self.chunks]

    def detached(self) -> Buffer:
        """Return the same memory as tensors that autograd does not watch."""
        made = copy(self)
        made.tensors = [tensor.data for tensor in self.tensors]
        return made

    def __getitem__(self, where: slice) -> Tensor:
        number = self._number(where.start, where.stop)
        start = self.chunks[number].start
        with self.memory.viewing(self.tensors[number]):
            return self.tensors[number][where.start - start : where.stop - start]

    def _number(self, start: int, stop: int) -> int:
        # an empty slice belongs to the chunk that starts there
        for number in reversed(range(len(self.chunks))):
            chunk = self.chunks[number]
            if chunk.start <= start <= stop <= chunk.stop:
                return number
        raise AssertionError(f"elements {start} to {stop} are not in one chunk")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def views(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Return the views of these parameters (None: all), in the order of the layout."""
        layout = self.layout
        found = dict[str, Tensor]()
        places = [
            (name, layout.shapes[name], start, start + prod(layout.shapes[name]))
            for name, (start, _) in layout.ranges.items()
            if names is None or name in names
        ]
        for number, inside in groupby(places, lambda place: self._number(*place[2:])):
            with self.memory.viewing(self.tensors[number]):  # once, not for each
                found |= {name: self[start:stop].view(shape) for name, shape, start, stop in inside}
        return found

    def home(self, use: BufferUsage, start: int) -> tuple[FlatLayout, int]:
        """Return the layout of a use, and the element at which the memory of element `start`
        starts.
        """
        within = (c for c in self.chunks if c.use == use and c.start <= start <= c.stop)
        return self.layout, max(chunk.start for chunk in within)

    def group(self, group: int) -> list[int]:
        """Return the numbers of the chunks that are updated together."""
        return [i for i, chunk in enumerate(self.chunks) if chunk.use.group == group]

    def take(self, other: Buffer, number: int) -> None:
        """Copy a chunk from a buffer of the same offsets, in which one chunk holds it."""
        chunk = self.chunks[number]
        self.tensors[number].copy_(other[chunk.start : chunk.stop])
