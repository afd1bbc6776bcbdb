"""gelu(x + bias) in its tanh form, and silu or gelu of gate + bias, times up + bias; forward and
backward.

The backward keeps x and computes everything again. Traffic a bf16 element of x: gelu reads it and
writes y, 4 bytes; its backward reads dy and x and writes dx, 6; swiglu and geglu 3 and 5, as y has
half as many. The gradient of the bias is the columns' sums of dx before it is rounded, see rows.py.
Arithmetic: gelu has one exponential and one division an element, about 15 operations, below what
the traffic takes on A100 and H100.
Source: arXiv 1606.08415, arXiv 2002.05202.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import _sigmoid, add_up, check, launch, share, tile

OPERATORS = {
    "bias_gelu": (),
    "bias_gelu_backward": (),
    "bias_swiglu": (),
    "bias_swiglu_backward": (),
    "bias_geglu": (),
    "bias_geglu_backward": (),
}

_WIDEST = 1024
_OF_THREAD = 8  # elements of y
_WIDEST_FORWARD = 1024
_OF_THREAD_FORWARD = 16
_PROGRAMS = 1024  # that sum columns, of all columns
_LEAST = 32  # rows that one sums
_SLOPE = tl.constexpr(2 * 0.7978845608028653559)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(2 * 0.7978845608028653559 * 0.044715)


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Shapes: x [.., f], bias [f], contiguous -> [.., f]."""
    y = torch.empty_like(x)
    _forward(gelu_kernel, x, bias, y)
    return y


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias (empty without one)."""
    return _backward(gelu_backward_kernel, dy, x, bias)


def bias_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Shapes: x [.., 2 f], gate then up, bias [2 f], contiguous -> [.., f]."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _forward(swiglu_kernel, x, bias, y)
    return y


def bias_swiglu_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias (empty without one)."""
    return _backward(swiglu_backward_kernel, dy, x, bias)


def bias_geglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Shapes: x [.., 2 f], gate then up, bias [2 f], contiguous -> [.., f]."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _forward(geglu_kernel, x, bias, y)
    return y


def bias_geglu_backward(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias (empty without one)."""
    return _backward(geglu_backward_kernel, dy, x, bias)


def _forward(kernel, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
    check(x=x, bias=bias)
    rows, cols = y.shape[:-1].numel(), y.shape[-1]
    size = tile(cols, _WIDEST_FORWARD, _OF_THREAD_FORWARD)
    blocks = triton.cdiv(cols, size["COLS"])
    launch(kernel, triton.cdiv(rows, size["ROWS"]) * blocks, x, bias, y, rows, cols, blocks, **size)


def _backward(kernel, dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    check(dy=dy, x=x, bias=bias)
    rows, cols, width = dy.shape[:-1].numel(), dy.shape[-1], x.shape[-1]
    dx = torch.empty_like(x)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    size = tile(cols, _WIDEST, _OF_THREAD)
    blocks = triton.cdiv(cols, size["COLS"])
    rows_each, groups = share(rows, max(1, _PROGRAMS // max(blocks, 1)), _LEAST, size["ROWS"])
    partial = None if bias is None else x.new_empty((groups, 1, width), dtype=torch.float32)
    launch(kernel, groups * blocks, dy, x, bias, dx, partial, rows, cols, blocks, rows_each, **size)
    if partial is not None:
        add_up(partial, (dbias,))
    return dx, dbias


@triton.jit(do_not_specialize=["rows"])
def gelu_kernel(x_ptr, bias_ptr, y_ptr, rows, cols, blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = _first_tile(blocks, ROWS, COLS)
    x, inside = _tile(x_ptr, row, col, rows, cols, cols)
    x = x.to(tl.float32) + _bias(bias_ptr, 0, col, cols)
    y = x * _gate(x)
    tl.store(y_ptr + row.to(tl.int64) * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def gelu_backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    group = tl.program_id(0) // blocks
    first = group * rows_each + tl.arange(0, ROWS)[:, None]
    end = tl.minimum((group + 1) * rows_each, rows)
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    bias = _bias(bias_ptr, 0, col, cols)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    x_next, _ = _tile(x_ptr, first, col, end, cols, cols)
    dy_next, inside_next = _tile(dy_ptr, first, col, end, cols, cols)
    for at in range(0, end - group * rows_each, ROWS):
        row = first + at
        x, dy, inside = x_next.to(tl.float32) + bias, dy_next.to(tl.float32), inside_next
        x_next, _ = _tile(x_ptr, row + ROWS, col, end, cols, cols)
        dy_next, inside_next = _tile(dy_ptr, row + ROWS, col, end, cols, cols)
        s = _gate(x)
        dx = dy * (s + x * s * (1.0 - s) * (3 * _CUBIC * x * x + _SLOPE))
        tl.store(
            dx_ptr + row.to(tl.int64) * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside
        )
        sums += dx
    if partial_ptr is not None:
        tl.store(
            partial_ptr + group.to(tl.int64) * cols + col,
            tl.sum(sums, 0, keep_dims=True),
            mask=col < cols,
        )


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, blocks, ROWS: tl.constexpr, COLS: tl.constexpr
):
    _gated(x_ptr, bias_ptr, y_ptr, rows, cols, blocks, ROWS, COLS, False)


@triton.jit(do_not_specialize=["rows"])
def geglu_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, blocks, ROWS: tl.constexpr, COLS: tl.constexpr
):
    _gated(x_ptr, bias_ptr, y_ptr, rows, cols, blocks, ROWS, COLS, True)


@triton.jit(do_not_specialize=["rows", "rows_each"])
def swiglu_backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    _gated_backward(
        dy_ptr,
        x_ptr,
        bias_ptr,
        dx_ptr,
        partial_ptr,
        rows,
        cols,
        blocks,
        rows_each,
        ROWS,
        COLS,
        False,
    )


@triton.jit(do_not_specialize=["rows", "rows_each"])
def geglu_backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    _gated_backward(
        dy_ptr,
        x_ptr,
        bias_ptr,
        dx_ptr,
        partial_ptr,
        rows,
        cols,
        blocks,
        rows_each,
        ROWS,
        COLS,
        True,
    )


@triton.jit
def _gated(
    x_ptr,
    bias_ptr,
    y_ptr,
    rows,
    cols,
    blocks,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GELU: tl.constexpr,
):
    """y = gelu(gate) * up, or silu(gate) * up."""
    row, col = _first_tile(blocks, ROWS, COLS)
    gate, inside = _tile(x_ptr, row, col, rows, cols, 2 * cols)
    up, _ = _tile(x_ptr + cols, row, col, rows, cols, 2 * cols)
    gate = gate.to(tl.float32) + _bias(bias_ptr, 0, col, cols)
    up = up.to(tl.float32) + _bias(bias_ptr, cols, col, cols)
    y = gate * (_gate(gate) if GELU else _sigmoid(gate)) * up
    tl.store(y_ptr + row.to(tl.int64) * cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    cols,
    blocks,
    rows_each,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GELU: tl.constexpr,
):
    """The gradients of gate and up side by side, and their sums over a group of rows."""
    group = tl.program_id(0) // blocks
    first = group * rows_each + tl.arange(0, ROWS)[:, None]
    end = tl.minimum((group + 1) * rows_each, rows)
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    gate_bias = _bias(bias_ptr, 0, col, cols)
    up_bias = _bias(bias_ptr, cols, col, cols)
    gate_sums = tl.zeros([ROWS, COLS], tl.float32)
    up_sums = tl.zeros([ROWS, COLS], tl.float32)
    gate_next, _ = _tile(x_ptr, first, col, end, cols, 2 * cols)
    up_next, _ = _tile(x_ptr + cols, first, col, end, cols, 2 * cols)
    dy_next, inside_next = _tile(dy_ptr, first, col, end, cols, cols)
    for at in range(0, end - group * rows_each, ROWS):
        row = first + at
        gate, up = gate_next.to(tl.float32) + gate_bias, up_next.to(tl.float32) + up_bias
        dy, inside = dy_next.to(tl.float32), inside_next
        gate_next, _ = _tile(x_ptr, row + ROWS, col, end, cols, 2 * cols)
        up_next, _ = _tile(x_ptr + cols, row + ROWS, col, end, cols, 2 * cols)
        dy_next, inside_next = _tile(dy_ptr, row + ROWS, col, end, cols, cols)
        if GELU:
            s = _gate(gate)
            dgate = dy * up * (s + gate * s * (1.0 - s) * (3 * _CUBIC * gate * gate + _SLOPE))
        else:
            s = _sigmoid(gate)
            dgate = dy * up * (s + gate * s * (1.0 - s))
        dup = dy * (gate * s)
        place = row.to(tl.int64) * 2 * cols + col
        tl.store(dx_ptr + place, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + cols + place, dup.to(dx_ptr.dtype.element_ty), mask=inside)
        gate_sums += dgate
        up_sums += dup
    if partial_ptr is not None:
        partial_ptr += group.to(tl.int64) * 2 * cols + col
        tl.store(partial_ptr, tl.sum(gate_sums, 0, keep_dims=True), mask=col < cols)
        tl.store(partial_ptr + cols, tl.sum(up_sums, 0, keep_dims=True), mask=col < cols)


@triton.jit
def _first_tile(blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The rows [ROWS, 1] and columns [1, COLS] of a program that has one tile."""
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]


@triton.jit
def _tile(ptr, row, col, end, cols, stride):
    """A tile of the matrix, zero outside, and which of its elements are inside."""
    inside = (row < end) & (col < cols)
    return tl.load(ptr + row.to(tl.int64) * stride + col, mask=inside, other=0.0), inside


@triton.jit
def _gate(x):
    """gelu(x) / x = sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    return _sigmoid(x * (_CUBIC * x * x + _SLOPE))


@triton.jit
def _bias(bias_ptr, first, col, cols):
    """The bias of the columns first + col, 0 without one."""
    if bias_ptr is None:
        bias = tl.zeros(col.shape, tl.float32)
    else:
        bias = tl.load(bias_ptr + first + col, mask=col < cols, other=0.0).to(tl.float32)
    return bias
