"""Join the gradients of q, k and v into the fused qkv product's, and sum the gradient of its bias.

A row of the product is a row of slots of d features, group by group: the group's query heads, its
key, its value. The first and the last group of a rank may have fewer query heads than the others.
With rotary positions queries and keys are turned back on the way.

Traffic a bf16 element: reads and writes it, 4 bytes. Without this pass: rotary reads and writes two
of three elements, a concatenation reads and writes all, and a sum reads all: 2.7 + 4 + 2 bytes.

The bias's gradient is the sum of each written column before it is rounded, see rows.py: a
program has one slot and a range of rows. An angle is a product of integers in units of 2^-64 turns,
whose overflow drops whole turns. It is as exact as one in float64, and takes none of its
operations, which GPUs for graphics and the B300 have few of.
Source: arXiv 2104.09864 (rotary).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import _cos_and_sin, table
from .rows import add_up, launch, share, tile

OPERATORS = {"split_qkv_backward": ()}

_OF_THREAD = 8  # elements
_PROGRAMS = 2048  # that sum columns, of all slots
_LEAST = 32  # rows that one sums
_STAGES = 3  # tiles on their way
_TURN = tl.constexpr(1 / (2 * math.pi))  # of an angle of 1
_WHOLE = tl.constexpr(2.0**64)  # units of a turn
_ANGLE = tl.constexpr(2 * math.pi / 2**32)  # of the upper half's unit
_EIGHTH = tl.constexpr(2**61)


def split_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    groups: list[int],
    with_bias: bool,
    base: float,
    frequencies: list[float],
    magnitude: float,
    turned: int,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of the product and of the bias (empty if not `with_bias`).

    groups: query heads of each. turned: number of a head's first features that rotary positions of
    this base turned, in pairs (i, i + turned / 2); 0: none. frequencies, magnitude: see rotary.
    Shapes: dq [b, n, s, d], dk, dv [b, g, s, d] without gaps in d, positions int64 [s] or [b, s],
        contiguous
    -> [b, s, (n + 2 g) d], [(n + 2 g) d].
    """
    b, n, s, d = dq.shape
    assert dk.shape == dv.shape == (b, len(groups), s, d), (
        f"dk and dv must be {[b, len(groups), s, d]}"
    )
    assert sum(groups) == n, f"{groups} must add up to {n} query heads"
    assert all(m == max(groups) for m in groups[1:-1]), (
        f"{groups}: between the first and the last, the largest"
    )
    assert d <= 1 or all(x.stride(3) == 1 for x in (dq, dk, dv)), (
        "the last dimension must have no gaps"
    )
    assert positions is None or (positions.is_contiguous() and positions.dtype == torch.int64), (
        "positions must be int64, contiguous"
    )
    rows, slots, half = b * s, n + 2 * len(groups), turned // 2
    dqkv, dbias = dq.new_empty((b, s, slots * d)), dq.new_empty(slots * d if with_bias else 0)
    rest = d - turned
    size = tile(max(half, rest), triton.next_power_of_2(max(d, 16)), _OF_THREAD)
    rows_each, parts = share(rows, max(1, _PROGRAMS // slots), _LEAST, size["ROWS"])
    partial = dq.new_empty((parts, 1, slots * d), dtype=torch.float32) if with_bias else None
    sample_positions = 0 if positions is None or positions.numel() == s else s
    most = max(groups)
    if dqkv.numel():
        launch(
            pack_kernel,
            parts * slots,
            dq,
            dk,
            dv,
            positions,
            table(frequencies, half, dq.device),
            dqkv,
            partial,
            rows,
            s,
            *dq.stride()[:3],
            *dk.stride()[:3],
            *dv.stride()[:3],
            slots,
            most,
            most - groups[0],
            groups[-1],
            len(groups),
            sample_positions,
            rows_each,
            HALF=half,
            REST=rest,
            STEP=-math.log2(base) / max(half, 1),
            MAGNITUDE=magnitude,
            ROWS=size["ROWS"],
            PAIRS=triton.next_power_of_2(max(half, 1)),
            COLS=triton.next_power_of_2(max(rest, 1)),
            STAGES=_STAGES,
            num_warps=size["num_warps"],
        )
    if partial is not None:
        add_up(partial, (dbias,))
    return dqkv, dbias


@triton.jit(
    do_not_specialize=[
        "rows",
        "size",
        "slots",
        "most",
        "skipped",
        "last",
        "groups",
        "sample_positions",
        "rows_each",
    ]
)
def pack_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    positions_ptr,
    frequencies_ptr,
    out_ptr,
    partial_ptr,
    rows,
    size,
    q_b,
    q_n,
    q_s,
    k_b,
    k_n,
    k_s,
    v_b,
    v_n,
    v_s,
    slots,
    most,
    skipped,
    last,
    groups,
    sample_positions,
    rows_each,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    STEP: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    slot = tl.program_id(0) % slots
    part = tl.program_id(0) // slots
    first, end = part * rows_each, tl.minimum((part + 1) * rows_each, rows)
    group = (slot + skipped) // (most + 2)  # as if the first one had as many heads as the others
    number = slot + skipped - group * (most + 2)
    queries = tl.where(group == groups - 1, last, most)
    head = tl.where(number < queries, group * most + number - skipped, group)
    x_b = _of_three(number - queries, q_b, k_b, v_b)
    x_n = _of_three(number - queries, q_n, k_n, v_n)
    x_s = _of_three(number - queries, q_s, k_s, v_s)
    x_ptr = dq_ptr
    if number == queries:
        x_ptr = dk_ptr
    if number > queries:
        x_ptr = dv_ptr
    HEAD: tl.constexpr = 2 * HALF + REST
    x_ptr += head.to(tl.int64) * x_n
    out_ptr += slot.to(tl.int64) * HEAD
    pair = tl.arange(0, PAIRS)[None, :]
    col = tl.arange(0, COLS)[None, :]
    first_sums = tl.zeros([ROWS, PAIRS], tl.float32)
    second_sums = tl.zeros([ROWS, PAIRS], tl.float32)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    if HALF > 0:
        if frequencies_ptr is None:
            turns = tl.exp2(pair.to(tl.float64) * STEP) * _TURN
        else:
            turns = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0) * _TURN
        turns = tl.where(number > queries, 0.0, turns - tl.floor(turns + 0.5))
        units = (turns * _WHOLE).to(tl.int64)  # that a position adds
    for at in tl.range(first, end, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)[:, None]
        sample, position = row // size, row % size
        x_row = x_ptr + sample.to(tl.int64) * x_b + position.to(tl.int64) * x_s
        out_row = out_ptr + row.to(tl.int64) * slots * HEAD
        if HALF > 0:
            inside = (row < end) & (pair < HALF)
            a = tl.load(x_row + pair, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x_row + HALF + pair, mask=inside, other=0.0).to(tl.float32)
            if positions_ptr is None:
                places = position.to(tl.int64)
            else:
                places = tl.load(
                    positions_ptr + sample.to(tl.int64) * sample_positions + position,
                    mask=row < end,
                    other=0,
                )
            cos, sin = _of_units(places * units)
            if MAGNITUDE != 1.0:
                factor = tl.where(number > queries, 1.0, MAGNITUDE)
                cos *= factor
                sin *= factor
            da, db = a * cos + b * sin, b * cos - a * sin
            tl.store(out_row + pair, da.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(out_row + HALF + pair, db.to(out_ptr.dtype.element_ty), mask=inside)
            first_sums += da
            second_sums += db
        if REST > 0:
            within = (row < end) & (col < REST)
            x = tl.load(x_row + 2 * HALF + col, mask=within, other=0.0)
            tl.store(out_row + 2 * HALF + col, x, mask=within)
            sums += x.to(tl.float32)
    if partial_ptr is not None:
        partial_ptr += (part.to(tl.int64) * slots + slot) * HEAD
        if HALF > 0:
            tl.store(partial_ptr + pair, tl.sum(first_sums, 0, keep_dims=True), mask=pair < HALF)
            tl.store(
                partial_ptr + HALF + pair, tl.sum(second_sums, 0, keep_dims=True), mask=pair < HALF
            )
        if REST > 0:
            tl.store(partial_ptr + 2 * HALF + col, tl.sum(sums, 0, keep_dims=True), mask=col < REST)


@triton.jit
def _of_three(which, q, k, v):
    """q where `which` is negative, k where it is 0, else v."""
    return tl.where(which < 0, q, tl.where(which == 0, k, v))


@triton.jit
def _of_units(units):
    """Cosine and sine, float32, of angles in units of 2^-64 turns, int64."""
    quarter = (units + _EIGHTH) >> 62
    left = (units - (quarter << 62)) >> 32
    return _cos_and_sin(left.to(tl.int32).to(tl.float32) * _ANGLE, quarter)
