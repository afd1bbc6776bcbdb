"""First fit in an order: each block takes the lowest offset where it fits between the blocks placed
before it.

Only blocks whose lives overlap restrict a block. `search` repeatedly changes the order: blocks that
reach the top are moved forward, and everything is placed again.

Source: "squeaky wheel" optimization (Joslin and Clements, 1999). Sizes and offsets have the same
unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpar.memory_behaviour.analysis.sweep import Ints

_GUILTY = 0.99
_RAISE = (0.25, 0.5, 0.75)
"""Blocks that end above the share _GUILTY of the arena are moved forward: their positions are
multiplied by one of these factors, used in turn."""
_BUCKET_BLOCKS = 400


def search(
    orders: Sequence[Ints],
    blocks: tuple[Ints, Ints, Ints],
    rounds: int,
    enough: float,
) -> Ints:
    """Return the best offsets of `rounds` rounds; the first rounds use the given orders.

    Stops early if the top is at most `enough`.

    Args:
        orders: Orders of the blocks.
        blocks: Sizes, starts and stops.
        rounds: Number of rounds.
        enough: Size of an arena that is small enough.
    """
    sizes = blocks[0]
    best_order = orders[0]
    guilty = sizes > 0
    best = np.zeros_like(sizes)
    least = 0
    for number in range(max(rounds, 1)):
        order = (
            orders[number]
            if number < len(orders)
            else _raised(best_order, guilty, _RAISE[number % len(_RAISE)])
        )
        layout = place(order, *blocks)
        top = int((layout + sizes).max(initial=0))
        if not number or top <= least:
            best_order = order
            best = layout
            least = top
            guilty = layout + sizes >= _GUILTY * top
        if least <= enough:
            break
    return best


def _raised(order: Ints, chosen: NDArray[np.bool_], factor: float) -> Ints:
    """Return an order in which the chosen blocks come earlier: their positions are multiplied by
    the factor."""
    places = np.arange(len(order), dtype=np.float64)
    places[chosen[order]] *= factor
    return order[np.argsort(places, kind="stable")]


def place(order: Ints, sizes: Ints, starts: Ints, stops: Ints) -> Ints:
    """Return offsets by first fit in this order."""
    placed = _Placed(len(sizes), int(stops.max(initial=0)))
    offsets = np.zeros(len(sizes), np.int64)
    for i in order.tolist():
        offsets[i] = placed.add(int(sizes[i]), int(starts[i]), int(stops[i]))
    return offsets


class _Placed:
    """The blocks placed so far: rows of offset, end, start and stop, in buckets of time, each in
    order of offsets."""

    def __init__(self, num_blocks: int, num_times: int):
        count = max(num_blocks // _BUCKET_BLOCKS, 1)
        self._width = -(-num_times // count)
        self._buckets = [np.zeros((4, 64), np.int64) for _ in range(count)]
        self._counts = [0] * count
        self._all = np.zeros((4, num_blocks), np.int64)
        self._count = 0

    def add(self, size: int, start: int, stop: int) -> int:
        """Place a block that lives between two times at the lowest offset where it fits, and return
        that offset."""
        offset = self._fit(size, self._in_the_way(start, stop))
        row = (offset, offset + size, start, stop)
        self._all[:, self._count] = row
        self._count += 1
        for bucket in range(start // self._width, (stop - 1) // self._width + 1):
            self._insert(bucket, row)
        return offset

    def _in_the_way(self, start: int, stop: int) -> Ints:
        """Return the offsets and ends of blocks that live between two times, in order of
        offsets."""
        first = start // self._width
        last = (stop - 1) // self._width
        if first == last:
            rows = self._buckets[first][:, : self._counts[first]]
        elif sum(self._counts[first : last + 1]) < self._count:
            rows = np.concatenate(
                [self._buckets[b][:, : self._counts[b]] for b in range(first, last + 1)], axis=1
            )
        else:
            rows = self._all[:, : self._count]
        rows = rows[:2, (rows[2] < stop) & (rows[3] > start)]
        return rows if first == last else _by_offset(rows)

    @staticmethod
    def _fit(size: int, rows: Ints) -> int:
        lows, highs = rows
        if not len(lows) or lows[0] >= size:
            return 0
        reached = np.maximum.accumulate(highs)
        fits = lows[1:] - reached[:-1] >= size
        at = int(fits.argmax()) if len(fits) else 0
        return int(reached[at]) if len(fits) and fits[at] else int(reached[-1])

    def _insert(self, bucket: int, row: tuple[int, int, int, int]) -> None:
        count = self._counts[bucket]
        rows = self._buckets[bucket]
        if count == rows.shape[1]:
            rows = self._buckets[bucket] = np.concatenate([rows, np.zeros_like(rows)], axis=1)
        at = int(rows[0, :count].searchsorted(row[0]))
        rows[:, at + 1 : count + 1] = rows[:, at:count]
        rows[:, at] = row
        self._counts[bucket] = count + 1


def _by_offset(rows: Ints) -> Ints:
    return rows[:, rows[0].argsort()]
