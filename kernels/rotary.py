"""Rotary position embedding: turns the pairs (x[i], x[i + d/2]) of each head by an angle a
position.

Traffic a bf16 element: reads and writes it, 4 bytes. An angle is position * frequency, which
float32 cannot hold at position 100000: it, and its remainder after whole quarter turns, is
computed in float64, once for up to _HEADS heads; sine and cosine of that remainder are float32
polynomials. There is no table of angles, so nothing is kept on the GPU between calls, and none has to be
filled before a graph is captured. A100 and H100 have half as many float64 as float32 operations: it
takes about 8 a pair and position, and the frequency 30 a pair and program, hidden behind the
traffic; on GPUs with few float64 units it is not. Scaled models give a table of frequencies, one a
pair, instead.
Source: arXiv 2104.09864. Polynomials: Cephes (S. L. Moshier), sinf and cosf, 1 ulp within an eighth
    of a turn.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import launch

OPERATORS = {"rotary": ()}

_PAIRS = 1024  # positions times pairs of a program, 8 a thread
_HEADS = 8  # of a program


def rotary(
    x: Tensor,
    base: float,
    frequencies: list[float],
    magnitude: float,
    offset: int,
    positions: Tensor | None,
    back: bool,
) -> Tensor:
    """Positions are offset, offset + 1, .. or those given; `back` turns the other way.

    frequencies: of each pair; empty: powers of the base. magnitude: factor of the result.

    Shapes: x [b, n, s, d] without gaps in d, positions int64 [s] or [b, s], contiguous -> [b, s, n,
        d].
    """
    b, n, s, d = x.shape
    assert d == 0 or x.stride(3) == 1, "the last dimension of x must have no gaps"
    assert positions is None or (positions.is_contiguous() and positions.dtype == torch.int64), (
        "positions must be int64, contiguous"
    )
    y = x.new_empty((b, s, n, d))
    if y.numel() == 0:
        return y
    pairs = triton.next_power_of_2(d // 2)
    at_a_time = max(1, _PAIRS // pairs)
    blocks, groups = triton.cdiv(s, at_a_time), triton.cdiv(n, _HEADS)
    sample_positions = 0 if positions is None or positions.numel() == s else s
    launch(
        rotary_kernel,
        b * blocks * groups,
        x,
        positions,
        table(frequencies, d // 2, x.device),
        y,
        n,
        s,
        *x.stride()[:3],
        offset,
        sample_positions,
        blocks,
        groups,
        half=d // 2,
        STEP=-math.log2(base) / (d // 2),
        MAGNITUDE=magnitude,
        BACK=back,
        HEADS=_HEADS,
        ROWS=at_a_time,
        COLS=pairs,
        num_warps=4,
    )
    return y


def table(frequencies: list[float], pairs: int, device: torch.device) -> Tensor | None:
    """The frequencies on the device, float64; None: powers of the base.

    Kept from call to call, so that a graph that is captured finds them there.
    """
    assert len(frequencies) in (0, pairs), f"{len(frequencies)} frequencies for {pairs} pairs"
    return _table(tuple(frequencies), device) if frequencies else None


@functools.lru_cache(maxsize=64)
def _table(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(frequencies, dtype=torch.float64, device=device)


@triton.jit(do_not_specialize=["heads", "size", "offset", "sample_positions", "blocks", "groups"])
def rotary_kernel(
    x_ptr,
    positions_ptr,
    frequencies_ptr,
    y_ptr,
    heads,
    size,
    x_sample,
    x_head,
    x_position,
    offset,
    sample_positions,
    blocks,
    groups,
    half: tl.constexpr,
    STEP: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    group = tl.program_id(0) % groups
    sample = (tl.program_id(0) // groups // blocks).to(tl.int64)
    row = tl.program_id(0) // groups % blocks * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    inside = (row < size) & (col < half)
    if positions_ptr is None:
        position = row + offset
    else:
        position = tl.load(
            positions_ptr + sample * sample_positions + row, mask=row < size, other=0
        )
    if frequencies_ptr is None:
        frequency = tl.exp2(col.to(tl.float64) * STEP)
    else:
        frequency = tl.load(frequencies_ptr + col, mask=col < half, other=0.0)
    cos, sin = _turn(position.to(tl.float64) * frequency)
    if MAGNITUDE != 1.0:
        cos *= MAGNITUDE
        sin *= MAGNITUDE
    if BACK:
        sin = -sin
    place_x = row.to(tl.int64) * x_position + col
    place_y = row.to(tl.int64) * heads * (2 * half) + col
    x_ptr += sample * x_sample + (group * HEADS).to(tl.int64) * x_head
    y_ptr += (sample * size * heads + group * HEADS) * (2 * half)
    for _ in range(group * HEADS, tl.minimum((group + 1) * HEADS, heads)):
        first = tl.load(x_ptr + place_x, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + half + place_x, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            y_ptr + place_y, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=inside
        )
        tl.store(
            y_ptr + half + place_y,
            (second * cos + first * sin).to(y_ptr.dtype.element_ty),
            mask=inside,
        )
        x_ptr += x_head
        y_ptr += 2 * half


@triton.jit
def _turn(angle):
    """Cosine and sine, float32, of angles in float64."""
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)  # 2 / pi
    return _cos_and_sin((angle - quarter * 1.5707963267948966).to(tl.float32), quarter.to(tl.int64))


@triton.jit
def _cos_and_sin(x, number):
    """Cosine and sine of x, within an eighth of a turn, plus that number of quarter turns, an
    integer."""
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = (
        1.0
        - 0.5 * z
        + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    )
    odd = number % 2 != 0
    other_cos = tl.where(odd, sin, cos)
    other_sin = tl.where(odd, cos, sin)
    return (
        tl.where((number + 1) & 2 == 0, other_cos, -other_cos),
        tl.where(number & 2 == 0, other_sin, -other_sin),
    )
