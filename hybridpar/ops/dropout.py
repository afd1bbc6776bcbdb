"""Dropout whose mask is a function of (key, site, element): equal on every grid, and never stored.

Every backend computes `mask_scale(x, key words, counter, threshold, scale, stride, start)` on x [b,
rows, cols]: element (i, r, c) stays, times `scale`, if its 32 random bits for the counter's
step, sample + i and index = start + r * stride + c are at least `threshold`, and is 0 otherwise.
Backends agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar import random
from hybridpar.errors import config_error
from hybridpar.ops.backends.libraries import Shapes
from hybridpar.ops.backends.registry import resolve
from hybridpar.random import RandomKey


def dropout(
    x: Tensor,
    p: float,
    key: RandomKey | None,
    site: int,
    *,
    inner_size: int | None = None,
    inner_start: int = 0,
    first_row: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Set elements to 0 with probability p and multiply the others by 1 / (1 - p).

    The first dimension counts samples. Within one, an element of the global tensor has index
    row * inner_size + inner_start + column. A rank that holds part of the last dimension states its
    global size and where its part starts; a rank that holds part of the rows its `first_row`.
    Without
    a key (evaluation) or with p = 0 the result is x itself.

    Shapes: x [b, ..., inner_local] -> the same. Nothing but the key is kept for the backward pass.
    Raises: ConfigError if p is not in [0, 1), or the backend cannot run; ValueError if x has less
    than two dimensions.
    Source: JMLR 15 (2014) 1929, Srivastava et al.
    """
    mask = make_mask(
        x.shape,
        x.device,
        p,
        key,
        site,
        inner_size=inner_size,
        inner_start=inner_start,
        first_row=first_row,
    )
    return x if mask is KEEP_ALL else drop(x, mask, backend)


class Mask(NamedTuple):
    """Everything the mask depends on besides the shape, in the order backends take it.

    A threshold of 0 drops nothing.
    """

    key0: int
    key1: int
    counter: Tensor | None
    threshold: int
    scale: float
    stride: int
    start: int


KEEP_ALL = Mask(0, 0, None, 0, 1.0, 0, 0)


def make_mask(
    shape: Sequence[int],
    device: torch.device,
    p: float,
    key: RandomKey | None,
    site: int,
    *,
    inner_size: int | None = None,
    inner_start: int = 0,
    first_row: int = 0,
) -> Mask:
    """Return the mask of dropout(x, p, key, site, ..) for such an x; KEEP_ALL if nothing is
    dropped.

    A counter on another device is copied to `device`, which waits for a GPU.
    Raises: See dropout.
    """
    if not 0.0 <= p < 1.0:
        raise config_error("model.dropout", p, "must be at least 0 and less than 1", "0.1")
    if key is None or p == 0.0:
        return KEEP_ALL
    if len(shape) < 2:
        raise ValueError(f"x must be [samples, ..., inner], got {tuple(shape)}")
    words = random.philox_key(key.seed, site)
    stride = shape[-1] if inner_size is None else inner_size
    start = first_row * stride + inner_start
    random.check_counters(0, 0, shape[0], 1, shape[-1], stride, start)
    threshold = min(round(p * 2.0**32), (1 << 32) - 1)
    if threshold == 0:
        return KEEP_ALL
    counter = key.counter.to(device)
    return Mask(words[0], words[1], counter, threshold, 1.0 / (1.0 - p), stride, start)


def drop(x: Tensor, mask: Mask, backend: str = "auto") -> Tensor:
    """Apply a mask to x [samples, ..., inner]."""
    return x if mask is KEEP_ALL else _Dropout.apply(x, mask, backend)


class _Dropout(torch.autograd.Function):
    """Its own derivative: the gradient goes through the same mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask, backend: str) -> Tensor:
        ctx.mask = mask
        ctx.backend = backend
        rows = x.shape[1:-1].numel()
        boxed = x.reshape(x.shape[0], rows, x.shape[-1]).contiguous()
        return resolve("dropout", backend, x)(boxed, *mask).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, ctx.mask, ctx.backend), None, None


def dropout_torch(
    x: Tensor,
    key0: int,
    key1: int,
    counter: Tensor,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> Tensor:
    b, rows, cols = x.shape
    bits = random.bits_reference(
        (key0, key1),
        counter[0],
        counter[1],
        num_samples=b,
        rows=rows,
        cols=cols,
        stride=stride,
        start=start,
        device=x.device,
    )
    keep = (bits ^ -(1 << 31)) >= threshold - (1 << 31)  # compares as unsigned
    return torch.where(keep, x * scale, 0.0)


def dropout_fused(library: Any, x: Tensor, *mask: Any) -> Tensor:
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
