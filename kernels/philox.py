"""Dropout by Philox4x32-10 on the GPU, a quarter of a generator call for each element.

Element (i, r, c) of [num_samples, rows, cols] has 32 bits, word index % 4 of the generator's output
for

    key (key0, key1)    counter (index // 4 low, index // 4 high, step, sample + i)    index = start + r * stride + c

Traffic: the element is read and written. Arithmetic: about 25 integer operations an element, so
16-bit dropout is bound by neither alone.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import launch

OPERATORS = {"philox_dropout": ()}

_MAX_QUADS = 256  # counters a program: 1024 elements, 8 a thread
_PLAIN = [
    "key0",
    "key1",
    "threshold",
    "start",
    "stride",
    "scale",
]  # vary by call: compile once for all values


def philox_dropout(
    x: Tensor,
    key0: int,
    key1: int,
    counter: Tensor | None,
    threshold: int,
    scale: float,
    stride: int,
    start: int,
) -> Tensor:
    """x * scale where the element's bits are at least `threshold`, otherwise 0.

    counter: int64 [2], the step and the number of the first sample; read on the device.
    Shapes: x [num_samples, rows, cols], contiguous -> the same.
    """
    assert x.dim() == 3, f"x must be [num_samples, rows, cols], got {tuple(x.shape)}"
    assert x.is_contiguous(), "x must be contiguous"
    assert counter is not None, "dropout needs a counter"
    out = torch.empty_like(x)
    num_samples, rows, cols = x.shape
    if stride == cols:  # rows follow each other without a gap
        rows, cols = 1, rows * cols
    quads = min(_MAX_QUADS, triton.next_power_of_2((cols + 6) // 4))
    blocks = triton.cdiv((cols + 6) // 4, quads)
    if x.numel():
        launch(
            dropout_kernel,
            num_samples * rows * blocks,
            x,
            out,
            counter,
            *_signed(key0, key1, threshold),
            scale,
            rows,
            cols,
            stride,
            start,
            blocks,
            QUADS=quads,
        )
    return out


def _signed(*words: int) -> list[int]:
    """Return these 32 bits as int32, so that an argument always has one type."""
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


@triton.jit(do_not_specialize=_PLAIN)
def dropout_kernel(
    x_ptr,
    out_ptr,
    counter_ptr,
    key0,
    key1,
    threshold,
    scale,
    rows,
    cols,
    stride,
    start,
    blocks,
    QUADS: tl.constexpr,
):
    row, col, quad, i = _place(rows, stride, start, blocks, QUADS)
    step, sample = _counter(counter_ptr, i)
    bits = _generate(quad, key0, key1, step, sample)
    inside = (col >= 0) & (col < cols)
    x = tl.load(x_ptr + row * cols + col, mask=inside, other=0.0)
    kept = (x.to(tl.float32) * scale).to(x.dtype)
    keep = bits >= threshold.to(tl.uint32, bitcast=True)
    tl.store(out_ptr + row * cols + col, tl.where(keep, kept, tl.zeros_like(kept)), mask=inside)


@triton.jit
def _place(rows, stride, start, blocks, QUADS: tl.constexpr):
    """This program's row of all, its columns (some of the first and last are outside), its
    counters, its sample."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    first = start.to(tl.int64) + row % rows * stride
    quad = first // 4 + program % blocks * QUADS
    col = quad * 4 - first + tl.arange(0, 4 * QUADS)
    return row, col, quad + tl.arange(0, QUADS), (row // rows).to(tl.int32)


@triton.jit
def _counter(counter_ptr, i):
    """The step, and the number of sample i; zeros of a null pointer, which a mask that drops
    nothing has."""
    step, sample = 0, 0
    if counter_ptr is not None:
        step = tl.load(counter_ptr).to(tl.int32)
        sample = tl.load(counter_ptr + 1).to(tl.int32) + i
    return step, sample


@triton.jit
def _generate(quad, key0, key1, step, sample):
    """Return the words of the counters in `quad`, four words of a counter side by side.

    Shapes: uint32 [.., 4 * quad.shape[-1]].
    """
    c0, c1, c2, c3 = _words(quad, key0, key1, step, sample)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def _words(quad, key0, key1, step, sample):
    """The four words of each counter in `quad`, uint32, each shaped like `quad`."""
    zero = tl.zeros_like(quad).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    c1 = (quad >> 32).to(tl.uint32)
    c2 = zero + step.to(tl.uint32, bitcast=True)
    c3 = zero + sample.to(tl.uint32, bitcast=True)
    k0 = zero + key0.to(tl.uint32, bitcast=True)
    k1 = zero + key1.to(tl.uint32, bitcast=True)
    m0 = tl.full(quad.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(quad.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = tl.mul(m0, c0, sanitize_overflow=False)
        low1 = tl.mul(m1, c2, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3
