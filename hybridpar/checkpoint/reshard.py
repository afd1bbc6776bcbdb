"""Find the elements that one rank needs in the files of other ranks. Pure arithmetic; nothing is
read.

global   [ 0 1 2 3 4 5 6 7 8 9 ]
saved    rank 0: [ 0 1 2 3 4 ]     rank 1: [ 5 6 7 8 9 ]
wanted   rank 1 of 3: [ 4 5 6 ]    pieces: 1 element at 4 of rank 0 to 0, 2 elements at 0 of rank 1
to 1
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from hybridpar.checkpoint.format.tensorfile import Pieces
from hybridpar.nn.placement import Placement, Range, Shard

Located = tuple[int, int, int]  # global start, global stop, position in the local tensor


def find_pieces(wanted: Placement, rank: int, saved: Placement) -> dict[int, Pieces]:
    """Return the pieces of the saved shards that make up shard `rank` of the wanted ones, by the
    index of the saved shard.

    Each element has one source: the shard of the same index if it has the element, since several
    ranks may hold a row.
    Shapes: rows of (first element there, first element here, number), counted in flat tensors.

    Raises:
        ValueError: The two are not the same parameter.
    """
    if wanted.shape != saved.shape:
        raise ValueError(
            f"has shape {list(saved.shape)}, but this model requires {list(wanted.shape)}"
        )
    dims = {shard.dim for shard in (wanted.shard, saved.shard) if shard is not None} or {0}
    if len(dims) > 1:
        raise ValueError("is split along another dimension")
    (dim,) = dims
    missing = _located(wanted.shard, rank, wanted.shape[dim])
    here = sum(stop - start for start, stop, _ in missing)
    num_sources = 1 if saved.shard is None else len(saved.shard.ranges)
    outer = prod(wanted.shape[:dim])
    inner = prod(wanted.shape[dim + 1 :])
    found: dict[int, Pieces] = {}
    for source in sorted(range(num_sources), key=lambda source: source != rank):
        ranges = _located(saved.shard, source, saved.shape[dim])
        lines = []
        for start, stop, there in ranges:
            lines += [(there + a - start, at, b - a) for a, b, at in _inside(missing, start, stop)]
            missing = list(_outside(missing, start, stop))
        if lines and outer:
            extent = sum(stop - start for start, stop, _ in ranges)
            found[source] = _flat(lines, outer, inner, extent, here)
    if missing:
        raise ValueError(
            f"{missing[0][0]} to {missing[0][1]} of dimension {dim} are missing from all its files"
        )
    return found


def clip(pieces: Pieces, column: int, part: Range) -> Pieces:
    """Return the pieces within `part` on one side (column 0: there, 1: here), counted from its
    start."""
    start, stop = part
    first = np.maximum(pieces[:, column], start)
    count = np.minimum(pieces[:, column] + pieces[:, 2], stop) - first
    clipped = pieces[:, :2] + (first - pieces[:, column])[:, None]
    clipped[:, column] -= start
    return np.column_stack([clipped, count])[count > 0]


def _located(shard: Shard | None, rank: int, size: int) -> list[Located]:
    """Return the global ranges that a rank holds, and where they begin in its tensor."""
    ranges: tuple[Range, ...] = ((0, size),) if shard is None else shard.ranges[rank]
    found = []
    at = 0
    for start, stop in ranges:
        if start < stop:
            found.append((start, stop, at))
        at += stop - start
    return found


def _inside(ranges: list[Located], start: int, stop: int) -> Iterator[Located]:
    for a, b, at in ranges:
        low = max(a, start)
        high = min(b, stop)
        if low < high:
            yield low, high, at + low - a


def _outside(ranges: list[Located], start: int, stop: int) -> Iterator[Located]:
    for a, b, at in ranges:
        for low, high in ((a, min(b, start)), (max(a, stop), b)):
            if low < high:
                yield low, high, at + low - a


def _flat(lines: list[Located], outer: int, inner: int, there: int, here: int) -> Pieces:
    """Return ranges along one dimension, with extents `there` and `here`, as pieces of flat
    tensors; adjacent pieces are joined."""
    table = np.array(lines, np.int64) * inner
    steps = np.arange(outer, dtype=np.int64)[:, None, None] * np.array(
        [there * inner, here * inner, 0]
    )
    pieces = (table[None] + steps).reshape(-1, 3)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    ends = pieces[:-1, :2] + pieces[:-1, 2:]
    starts = np.concatenate([[True], (ends != pieces[1:, :2]).any(1)])
    joined = pieces[starts]
    joined[:, 2] = np.add.reduceat(pieces[:, 2], np.flatnonzero(starts))
    return joined
