"""A rank's rows of an embedding table: look ids up, and add gradients to the rows, without atomics.

Gradients go by ids in order: a program takes _ROWS neighbours of the sorted list, adds up runs of
one id, and adds each sum to the id's row. Runs that continue in the next program's part leave their
pieces in `partial`; one program a run then adds these in order. So the order of additions depends
on the ids alone, an id that comes a thousand times costs what a thousand ids cost, and only rows
that have an id are touched.

Traffic: rows reads and writes an element for each of dy; the backward reads dy, and reads and
writes the rows that have an id (overwrite: and writes zeros everywhere before). Up to _MOST_RANKED
ids are sorted by counting, in one launch, how many come before each; of more, torch's sort moves 12
bytes an id four times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import check, launch, tile

OPERATORS = {"embedding": (), "embedding_backward_": ("gradient",)}

_MOST_RANKED = (
    16384  # ids; more are sorted by torch, in time that grows with their number, not its square
)
_RANKED = 16  # ids that a program finds the places of
_COMPARED = 128  # ids that they are compared with at a time
_ROWS = 16  # of dy, that a program adds up
_WIDEST_SUM = 1024  # columns of it
_OF_THREAD = 8  # elements: 16 bytes of float32, so that both types are read by the same threads
_COLS = 64  # of a program that adds pieces
_PIECES = 16  # of a run that spans parts, added at a time
_WIDEST = 1024


def embedding(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    """Return weight[id - start], zero if there is no such row.

    Shapes: ids int64 [..], weight [rows, h] -> [.., h].
    """
    _check(ids, weight)
    rows, cols = weight.shape
    out = weight.new_empty((*ids.shape, cols))
    size = tile(cols, _WIDEST)
    blocks = triton.cdiv(cols, size["COLS"])
    launch(
        rows_kernel,
        triton.cdiv(ids.numel(), size["ROWS"]) * blocks,
        ids,
        weight,
        out,
        ids.numel(),
        rows,
        cols,
        blocks,
        start,
        **size,
    )
    return out


def embedding_backward_(
    gradient: Tensor, dy: Tensor, ids: Tensor, start: int, overwrite: bool
) -> None:
    """Add to each row of `gradient` its rows of dy, in dy's or a wider type; overwrite: to zero.

    Shapes: gradient [rows, h], dy [.., h], ids int64 [..].
    """
    _check(ids, gradient)
    rows, cols = gradient.shape
    count = ids.numel()
    assert dy.is_contiguous(), "dy must be contiguous"
    assert dy.numel() == count * cols, (
        f"dy must have a row of {cols} for each of {count} ids, got {tuple(dy.shape)}"
    )
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    assert gradient.dtype in (dy.dtype, wide), (
        f"the gradient must be {dy.dtype} or {wide}, not {gradient.dtype}"
    )
    if overwrite:
        gradient.zero_()
    if min(rows, cols, count) == 0:
        return
    keys, order = _sorted(ids.reshape(-1), start, rows)
    size = tile(cols, _WIDEST_SUM, _OF_THREAD)
    size.pop("ROWS")
    parts, blocks = triton.cdiv(count, _ROWS), triton.cdiv(cols, size["COLS"])
    partial = dy.new_empty((parts, 2, cols), dtype=wide)
    launch(
        add_runs_kernel,
        parts * blocks,
        keys,
        order,
        dy,
        gradient,
        partial,
        count,
        rows,
        cols,
        blocks,
        ROWS=_ROWS,
        **size,
    )
    blocks = triton.cdiv(cols, _COLS)
    launch(
        add_pieces_kernel,
        (parts - 1) * blocks,
        keys,
        gradient,
        partial,
        count,
        rows,
        cols,
        blocks,
        parts,
        ROWS=_ROWS,
        COLS=_COLS,
        PIECES=_PIECES,
        num_warps=4,
    )


def _sorted(ids: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return each id's row in ascending order (`rows` for ids of other ranks), and its index in
    `ids`.

    Both are int32 or int64.
    """
    count = len(ids)
    if count <= _MOST_RANKED:
        keys, order = ids.new_empty((2, count), dtype=torch.int32)
        launch(
            rank_kernel,
            triton.cdiv(count, _RANKED),
            ids,
            keys,
            order,
            count,
            rows,
            start,
            ROWS=_RANKED,
            COLS=_COMPARED,
            num_warps=4,
        )
        return keys, order
    row = ids - start
    elsewhere = (row < 0) | (row >= rows)
    return torch.sort(
        row.masked_fill_(elsewhere, rows).int(), stable=True
    )  # 4 bytes: half the passes of 8


def _check(ids: Tensor, table: Tensor) -> None:
    check(ids=ids)
    check(table=table)
    assert ids.dtype == torch.int64, f"ids must be int64, got {ids.dtype}"
    assert table.dim() == 2, f"the table must be [rows, h], got {tuple(table.shape)}"
    assert len(table) < 2**31, f"the table must have less than 2^31 rows, got {len(table)}"


@triton.jit(do_not_specialize=["count", "rows", "start"])
def rows_kernel(
    ids_ptr,
    weight_ptr,
    out_ptr,
    count,
    rows,
    cols,
    blocks,
    start,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    at = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    row = tl.load(ids_ptr + at, mask=at < count, other=-1) - start
    here = (row >= 0) & (row < rows) & (at < count)
    values = tl.load(weight_ptr + row * cols + col, mask=here & (col < cols), other=0.0)
    tl.store(out_ptr + at.to(tl.int64) * cols + col, values, mask=(at < count) & (col < cols))


@triton.jit(do_not_specialize=["count", "rows", "start"])
def rank_kernel(
    ids_ptr, keys_ptr, order_ptr, count, rows, start, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Put each id at its place in order: behind smaller ones, and equal ones before it."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = _key(ids_ptr, at, count, rows, start)
    mine = (key.to(tl.int64) << 32 | at)[:, None]
    before = tl.zeros([ROWS, COLS], tl.int32)
    for i in range(0, count, COLS):
        other = i + tl.arange(0, COLS)
        theirs = _key(ids_ptr, other, count, rows, start).to(tl.int64) << 32 | other
        before += (tl.where(other < count, theirs, 1 << 62)[None, :] < mine).to(tl.int32)
    rank = tl.sum(before, 1)
    tl.store(keys_ptr + rank, key, mask=at < count)
    tl.store(order_ptr + rank, at, mask=at < count)


@triton.jit
def _key(ids_ptr, at, count, rows, start):
    """Return the row of the table, int32; `rows` for ids of other ranks."""
    row = tl.load(ids_ptr + at, mask=at < count, other=0) - start
    return tl.where((row >= 0) & (row < rows), row, rows).to(tl.int32)


@triton.jit(do_not_specialize=["count", "rows"])
def add_runs_kernel(
    keys_ptr,
    order_ptr,
    dy_ptr,
    gradient_ptr,
    partial_ptr,
    count,
    rows,
    cols,
    blocks,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    first = part * ROWS
    end = tl.minimum(first + ROWS, count)
    total = tl.zeros([COLS], partial_ptr.dtype.element_ty)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1)
    key = tl.load(keys_ptr + first)
    begun = key != before
    x_next = _row(dy_ptr, order_ptr, first, end, col, cols)
    for at in range(first, end):
        x = x_next.to(total.dtype)
        x_next = _row(dy_ptr, order_ptr, at + 1, end, col, cols)
        following = tl.load(keys_ptr + at + 1, mask=at + 1 < count, other=-1)
        total += x
        ends = key != following
        if key < rows:  # `rows`: another rank's
            if ends & begun:
                row_ptr = gradient_ptr + key.to(tl.int64) * cols + col
                sums = tl.load(row_ptr, mask=col < cols, other=0.0).to(total.dtype) + total
                tl.store(row_ptr, sums.to(gradient_ptr.dtype.element_ty), mask=col < cols)
            elif ends | (
                at + 1 == end
            ):  # a piece: of a run that began before (one at most), or continues behind (also one)
                piece_ptr = partial_ptr + (part.to(tl.int64) * 2 + begun.to(tl.int64)) * cols + col
                tl.store(piece_ptr, total, mask=col < cols)
        total = tl.where(ends, 0.0, total)
        begun = begun | ends
        key = following


@triton.jit
def _row(dy_ptr, order_ptr, at, end, col, cols):
    place = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
    return tl.load(dy_ptr + place * cols + col, mask=col < tl.where(at < end, cols, 0), other=0.0)


@triton.jit(do_not_specialize=["count", "rows", "parts"])
def add_pieces_kernel(
    keys_ptr,
    gradient_ptr,
    partial_ptr,
    count,
    rows,
    cols,
    blocks,
    parts,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PIECES: tl.constexpr,
):
    part = tl.program_id(0) // blocks  # not the last one
    first = part * ROWS
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)[None, :]
    key = tl.load(keys_ptr + first + ROWS - 1)
    goes_on = key == tl.load(keys_ptr + first + ROWS)
    before = tl.load(keys_ptr + first - 1, mask=first > 0, other=-1)
    begun_before = (key == before) & (key == tl.load(keys_ptr + first))
    if goes_on & (begun_before == 0) & (key < rows):  # the run begins in this part
        total = tl.load(
            partial_ptr + (part.to(tl.int64) * 2 + 1) * cols + col, mask=col < cols, other=0.0
        )
        at = part + 1
        more = 1
        while more > 0:
            piece = at + tl.arange(0, PIECES)[:, None]
            mine = (piece < parts) & (
                tl.load(keys_ptr + piece * ROWS, mask=piece < parts, other=-1) == key
            )
            x = tl.load(
                partial_ptr + piece.to(tl.int64) * 2 * cols + col,
                mask=mine & (col < cols),
                other=0.0,
            )
            total += tl.sum(x, 0, keep_dims=True)
            more = (tl.sum(mine.to(tl.int32)) == PIECES).to(tl.int32)
            at += PIECES
        row_ptr = gradient_ptr + key.to(tl.int64) * cols + col
        total += tl.load(row_ptr, mask=col < cols, other=0.0).to(total.dtype)
        tl.store(row_ptr, total.to(gradient_ptr.dtype.element_ty), mask=col < cols)
