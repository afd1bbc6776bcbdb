"""Places of parameters in a flat buffer, and the buckets in which the buffer is reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hybridpar.cpu import zeros

ALIGN_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of a flat buffer, and the names of its parameters, in order."""

    start: int
    stop: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Owned:
    """The shard of a parameter that this rank updates: elements [start, stop) of the flat buffer.

    Attributes:
        part: The same range, counted in the parameter itself; None: the complete parameter.
        shared: Other ranks update this shard as well.
    """

    name: str
    start: int
    stop: int
    part: tuple[int, int] | None = None
    shared: bool = True


class FlatLayout:
    """Parameters one after the other in one flat buffer, each aligned to 64 bytes.

    Padding is part of every buffer: it is allocated as zeros and stays zero. A parameter without
    elements has 64 bytes of padding, so that no two parameters start at one offset.

    Args:
        shapes: Shapes of the parameters, by name.
        offset_dtype: Narrowest dtype of the buffers that use these offsets, such as a master copy
            and its working copies; each parameter is aligned in all of them.

    Attributes:
        ranges: Elements (start, stop) of each parameter with its padding, by name.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        offset_dtype: torch.dtype | None = None,
    ):
        self.names = tuple(shapes)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        self.ranges: dict[str, tuple[int, int]] = {}
        self.numel = 0
        align = ALIGN_BYTES // (offset_dtype or dtype).itemsize
        for name, shape in shapes.items():
            start = self.numel
            self.numel = start + max(-(-prod(shape) // align), 1) * align
            self.ranges[name] = start, self.numel

    def zeros(self, device: torch.device | str | None = None) -> Tensor:
        """Allocate a flat buffer of zeros."""
        return zeros(self.numel, self.dtype, device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every parameter's view into `flat`, in the order of the layout."""
        assert flat.shape == (self.numel,), (
            f"expected {self.numel} elements, got {tuple(flat.shape)}"
        )
        return {
            name: flat[start : start + prod(self.shapes[name])].view(self.shapes[name])
            for name, (start, _) in self.ranges.items()
        }

    def joined(self, parts: Sequence[Tensor], base: int = 0) -> list[Tensor]:
        """Join neighbouring parts of a flat buffer, with the padding between them, into fewer
        tensors.

        Args:
            parts: Contiguous parts, ascending.
            base: Element of the buffer at which the parts' storage starts.
        """
        padded = {
            start + prod(self.shapes[name]): stop for name, (start, stop) in self.ranges.items()
        }
        spans: list[list[int]] = []
        for part in parts:
            start = base + int(part.storage_offset())
            stop = start + part.numel()
            if spans and start in (spans[-1][1], padded.get(spans[-1][1])):
                spans[-1][1] = stop
            else:
                spans.append([start, stop])
        return [
            parts[0].as_strided((stop - start,), (1,), start - base)
            for start, stop in spans
            if start < stop
        ]

    def buckets(
        self, bucket_bytes: int, group: Callable[[str], object] = lambda name: None
    ) -> tuple[Bucket, ...]:
        """Return the buffer cut into contiguous buckets of at least `bucket_bytes`, in the order a
        backward fills them.

        The first bucket is the end of the buffer, since gradients become ready in reverse order of
        registration. A bucket closes once it has reached the size, and before a parameter of
        another `group`.
        """
        buckets: list[Bucket] = []
        names: list[str] = []
        stop = self.numel
        for i, name in reversed(list(enumerate(self.names))):
            start, _ = self.ranges[name]
            names.append(name)
            full = (stop - start) * self.dtype.itemsize >= bucket_bytes
            if full or i == 0 or group(self.names[i - 1]) != group(name):
                buckets.append(Bucket(start, stop, tuple(reversed(names))))
                names = []
                stop = start
        return tuple(buckets)
