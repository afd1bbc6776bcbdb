"""Dropout whose mask is a function of (key, site, element): equal on every grid, and never stored.

Every backend takes x [b, rows, cols] and a DropoutMask. Element (i, r, c) stays, times the mask's
`scale`, if its 32 random bits for the counter's step, sample + i and index = start + r * stride + c
are at least `threshold`, and is 0 otherwise. Backends agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar import random
from hybridpar.errors import config_error
from hybridpar.ops.backends.libraries import Shapes
from hybridpar.ops.backends.registry import resolve
from hybridpar.random import CounterBlock, RandomKey

Rows = int | tuple[tuple[int, int], ...]
"""Rows of each sample that a rank holds: the first of neighbouring ones, or half-open ranges."""


@dataclass(frozen=True, slots=True)
class DropoutSpec:
    """The dropout of one place of the model: its probability, and what its mask depends on.

    The first dimension of x counts samples. Within one, an element of the global tensor has index
    row * inner_size + inner_start + column.

    Attributes:
        p: Probability of dropping an element.
        key: Key of the micro-batch. None (evaluation): nothing is dropped.
        site: Number that tells this place from others (random.site).
        inner_size: Global size of the last dimension, if a rank holds part of it. None: x has all.
        inner_start: The first of the last dimension's elements that x holds.
        first_row: The first of each sample's rows that x holds, if a rank holds part of the rows;
            ranges if these rows lie apart (x is then [samples, rows, inner]).
    """

    p: float = 0.0
    key: RandomKey | None = None
    site: int = 0
    inner_size: int | None = None
    inner_start: int = 0
    first_row: Rows = 0

    @property
    def lies_apart(self) -> bool:
        """Whether elements are dropped in rows that are no neighbours, which no kernel knows."""
        return not isinstance(self.first_row, int) and self.key is not None and self.p > 0

    def neighbours(self) -> Iterator[tuple[int, DropoutSpec]]:
        """Yield each range of rows: their number, and their dropout."""
        assert not isinstance(self.first_row, int)
        for start, stop in self.first_row:
            yield stop - start, replace(self, first_row=start)


NO_DROPOUT = DropoutSpec()


def dropout(x: Tensor, spec: DropoutSpec, *, backend: str = "auto") -> Tensor:
    """Set elements to 0 with probability p and multiply the others by 1 / (1 - p).

    Without a key or with p = 0 the result is x itself.

    Shapes: x [b, ..., inner_local] -> the same. Nothing but the key is kept for the backward pass.
    Raises: ConfigError if p is not in [0, 1), or the backend cannot run; ValueError if x has less
    than two dimensions.
    Source: JMLR 15 (2014) 1929, Srivastava et al.
    """
    if spec.lies_apart:
        lengths, specs = zip(*spec.neighbours(), strict=True)
        parts = zip(x.split(lengths, 1), specs, strict=True)
        return torch.cat([dropout(part, each, backend=backend) for part, each in parts], 1)
    return drop(x, make_mask(spec, x.shape, x.device), backend)


class DropoutMask(NamedTuple):
    """Everything the mask depends on besides the shape, in the order in which libraries take it.

    A threshold of 0 drops nothing.
    """

    key0: int
    key1: int
    counter: Tensor | None
    threshold: int
    scale: float
    stride: int
    start: int


KEEP_ALL = DropoutMask(0, 0, None, 0, 1.0, 0, 0)


def make_mask(spec: DropoutSpec, shape: Sequence[int], device: torch.device) -> DropoutMask:
    """Return the mask of dropout(x, spec) for such an x; KEEP_ALL if nothing is dropped.

    A counter on another device is copied to `device`, which waits for a GPU.
    Raises: See dropout.
    """
    if not 0.0 <= spec.p < 1.0:
        raise config_error("model.dropout", spec.p, "must be at least 0 and less than 1", "0.1")
    if spec.key is None or spec.p == 0.0:
        return KEEP_ALL
    if len(shape) < 2:
        raise ValueError(f"x must be [samples, ..., inner], got {tuple(shape)}")
    key0, key1 = random.philox_key(spec.key.seed, spec.site)
    stride = shape[-1] if spec.inner_size is None else spec.inner_size
    assert isinstance(spec.first_row, int), "a mask is for neighbouring rows"
    start = spec.first_row * stride + spec.inner_start
    random.check_counters(0, 0, CounterBlock(1, shape[-1], stride, start, num_samples=shape[0]))
    threshold = min(round(spec.p * 2.0**32), (1 << 32) - 1)
    if threshold == 0:
        return KEEP_ALL
    counter = spec.key.counter.to(device)
    return DropoutMask(key0, key1, counter, threshold, 1.0 / (1.0 - spec.p), stride, start)


def drop(x: Tensor, mask: DropoutMask, backend: str = "auto") -> Tensor:
    """Apply a mask to x [samples, ..., inner]."""
    return x if mask is KEEP_ALL else _Dropout.apply(x, mask, backend)


class _Dropout(torch.autograd.Function):
    """Its own derivative: the gradient goes through the same mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask, backend: str) -> Tensor:
        ctx.mask = mask
        ctx.backend = backend
        rows = x.shape[1:-1].numel()
        boxed = x.reshape(x.shape[0], rows, x.shape[-1]).contiguous()
        return resolve("dropout", backend, x)(boxed, mask).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, ctx.mask, ctx.backend), None, None


def dropout_torch(x: Tensor, mask: DropoutMask) -> Tensor:
    b, rows, cols = x.shape
    assert mask.counter is not None
    step, sample = mask.counter
    block = CounterBlock(rows, cols, mask.stride, mask.start, num_samples=b)
    bits = random.bits_reference((mask.key0, mask.key1), step, sample, block, x.device)
    keep = (bits ^ -(1 << 31)) >= mask.threshold - (1 << 31)  # compares as unsigned
    return torch.where(keep, x * mask.scale, 0.0)


def dropout_fused(library: Any, x: Tensor, mask: DropoutMask) -> Tensor:
    return library.philox_dropout(x, *mask)


PASSES: Shapes = {
    "philox_dropout": lambda x, *_: torch.empty_like(x),
    "philox_bits": lambda key0, key1, step, sample, num_samples, rows, cols, stride, start: (
        torch.empty((num_samples, rows, cols), dtype=torch.int32)
    ),
    "philox_normal": lambda key0, key1, rows, cols, stride, start, double: torch.empty(
        (rows, cols), dtype=torch.float64 if double else torch.float32
    ),
}
