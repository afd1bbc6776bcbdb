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
        offset_dtype: Narrowest dtype of the buffers that use these offsets, such as a master copy
            and its working copies; each parameter is aligned in all of them.

    Attributes:
        offsets: First element of each parameter.
        ends: Element after the last one of each parameter, with the padding.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        offset_dtype: torch.dtype | None = None,
    ):
        assert len(set(names)) == len(names) == len(shapes), (
            "parameter names must be unique, one shape each"
        )
        self.names = tuple(names)
        self.shapes = tuple(torch.Size(shape) for shape in shapes)
        self.dtype = dtype
        align = ALIGN_BYTES // (offset_dtype or dtype).itemsize
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + max(-(-prod(shape) // align), 1) * align)
        self.offsets = tuple(offsets[:-1])
        self.ends = tuple(offsets[1:])
        self.numel = offsets[-1]

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor], dtype: torch.dtype, offset_dtype: torch.dtype | None = None
    ) -> FlatLayout:
        """Create the layout of tensors by name, in their order."""
        return FlatLayout(list(tensors), [t.shape for t in tensors.values()], dtype, offset_dtype)

    def zeros(self, device: torch.device | str | None = None) -> Tensor:
        """Allocate a flat buffer of zeros."""
        return zeros(self.numel, self.dtype, device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every parameter's view into `flat`, in the order of the layout."""
        assert flat.shape == (self.numel,), (
            f"expected {self.numel} elements, got {tuple(flat.shape)}"
        )
        return {
            name: flat[offset : offset + prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def joined(self, parts: Sequence[Tensor], base: int = 0) -> list[Tensor]:
        """Join neighbouring parts of a flat buffer, with the padding between them, into fewer
        tensors.

        Args:
            parts: Contiguous parts, ascending.
            base: Element of the buffer at which the parts' storage starts.
        """
        padded: dict[int, int] = {
            offset + prod(shape): end
            for offset, shape, end in zip(self.offsets, self.shapes, self.ends, strict=True)
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
        for i in reversed(range(len(self.names))):
            start = self.offsets[i]
            names.append(self.names[i])
            full = (stop - start) * self.dtype.itemsize >= bucket_bytes
            if full or i == 0 or group(self.names[i - 1]) != group(self.names[i]):
                buckets.append(Bucket(start, stop, tuple(reversed(names))))
                names = []
                stop = start
        return tuple(buckets)
