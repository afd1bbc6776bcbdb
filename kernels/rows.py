"""Parts that the row-wise kernels share: launches, widths of tiles, sums of columns, logistic.

A tile is ROWS rows of COLS columns, powers of two, in the layout of memory: a thread of a
full tile reads neighbours, 16 bytes at a time if a row's size is a multiple of 16 elements. A
thread has 16 elements of it, or 8 if it keeps much for each; narrow rows share a program of 4
warps, wide ones have more warps. PipelineShape are the fastest on an H200, and used on every GPU.

Sums of columns: each of a number of programs, which depends on the shape alone, adds its own rows
in order to one row of `partial`; sum_kernel adds those in order. So bits are equal on any GPU,
and there are no atomics. Traffic: a partial sum is written and read, 8 bytes for the 8 (norm) or 32
rows of a column that it has at least, and mostly within the L2 cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
_MOST_WARPS = 32
_SUMS = 8192  # partial sums that a program of sum_kernel has at a time, of up to
_SUM_ROWS = 512
_SUM_WARPS = 8


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Start the programs, if any, on the device of the first argument, a tensor."""
    if programs == 0:
        return
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](*args, **constants)


def check(**tensors: Tensor | None) -> None:
    """Assert that tensors are of one type and without gaps, which the kernels rely on."""
    present = {name: x for name, x in tensors.items() if x is not None}
    dtypes = {name: x.dtype for name, x in present.items()}
    assert len(set(dtypes.values())) == 1, f"tensors must be of one type, got {dtypes}"
    for name, x in present.items():
        assert x.is_contiguous(), f"{name} must be contiguous"


def tile(cols: int, widest: int, of_thread: int = 16) -> dict[str, int]:
    """ROWS, COLS and num_warps for rows of `cols`, of which a program has at most `widest` at a
    time.

    Units: of_thread: elements.
    """
    width = min(triton.next_power_of_2(max(cols, 16)), widest)
    rows = max(1, 128 * of_thread // width)
    return {
        "ROWS": rows,
        "COLS": width,
        "num_warps": min(_MOST_WARPS, rows * width // (32 * of_thread)),
    }


def share(rows: int, most: int, least: int, step: int) -> tuple[int, int]:
    """Rows that each program sums, at least `least` and a multiple of `step`; number of programs,
    at most `most`.

    Units: rows; step and least are powers of two.
    """
    each = max(least, step, triton.cdiv(triton.cdiv(rows, most), step) * step)
    return each, triton.cdiv(rows, each)


def add_up(partial: Tensor, outs: Sequence[Tensor]) -> None:
    """Makes outs[i] the sums of partial[:, i], and zeros where partial has no such row.

    Shapes: partial [programs, sums, cols], outs at most three [cols].
    """
    first, second, third = (*outs, *outs, *outs)[:3]
    programs, sums, cols = partial.shape
    height = min(_SUM_ROWS, triton.next_power_of_2(max(programs, 1)))
    blocks = triton.cdiv(cols, _SUMS // height)
    launch(
        sum_kernel,
        blocks * len(outs),
        partial,
        first,
        second,
        third,
        programs,
        cols,
        blocks,
        SUMS=sums,
        ROWS=height,
        COLS=_SUMS // height,
        num_warps=_SUM_WARPS,
    )


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    programs,
    cols,
    blocks,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    which = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    if which < SUMS:
        for at in range(0, programs, ROWS):
            row = at + tl.arange(0, ROWS)[:, None]
            inside = (row < programs) & (col < cols)
            total += tl.load(
                partial_ptr + (row * SUMS + which).to(tl.int64) * cols + col, mask=inside, other=0.0
            )
    out_ptr = first_ptr
    if which == 1:
        out_ptr = second_ptr
    if which == 2:
        out_ptr = third_ptr
    total = tl.sum(total, 0, keep_dims=True)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _exp2(x):
    """2^x; zero on a GPU where it is below 1e-38, which saves three operations."""
    return tl.exp2(x) if _INTERPRETED else libdevice.exp2(x)


@triton.jit
def _exp(x):
    return _exp2(x * _LOG2E)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x)."""
    below = 1.0 + _exp2(x * -_LOG2E)
    return 1.0 / below if _INTERPRETED else libdevice.fast_dividef(1.0, below)


@triton.jit
def _both(x, y, other_x, other_y):
    """Sums of two at a time: what a reduction of both takes."""
    return x + other_x, y + other_y
