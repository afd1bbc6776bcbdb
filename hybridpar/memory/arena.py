"""A planned arena: an offset for every block of a trace, such that no two that are alive at once overlap.

First sweeps: blocks take their places in the order of time, in the free gap that fits best, and leave them at their
ends. Blocks that live long are placed from the bottom, those that live shortly from the top; tiny blocks have a
region of their own. In a pipeline's staircase of micro-batches, one's blocks so take the places of another's.
A few arena sizes and lengths of a short life are tried.

Where no sweep comes near the bound, placements in any order follow: each block at the lowest offset where it fits
between those already placed whose lives overlap with its own. Orders are tried: by size x lifetime; lasting and huge
blocks, then by ends, the last first; by lifetime to a factor of two, then by size; by size. Then blocks that
reach the top come earlier in the best order so far, and all is placed again, a few times. The best is kept.

Source: offline dynamic storage allocation, as in idealloc (arXiv 2504.04874); the order is changed as in "squeaky
wheel" optimization (Joslin and Clements, 1999). Units: bytes; times are any numbers that order events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridpar.memory.events import Life, Span, What
from hybridpar.memory.sweep import Ints, Sweep

ALIGNMENT = 512
_WORK, _ROUNDS = 80_000, (2, 16)
"""Placements in all rounds together, and least and most rounds."""
_ROOMS = (1.0, 1.001, 1.0025, 1.01)
"""Arenas in which sweeps are tried, in sizes of the bound."""
_SWEEPS = ((128, True), (1024, True), (512, False), (0, True))
"""Times that a short life lasts, and whether the gap that fits best is taken, or the first."""
_TINY = 10_000
"""Blocks that are smaller than one part of so many of the bound have a region of their own."""
_HUGE, _LASTING = 16, 0.9
"""What comes first in one order: blocks above this share of the longest life, then one part of so many of the bound."""
_ENOUGH = 1.0005
"""An arena of so many times the bound is not improved."""
_GUILTY, _RAISE = 0.99, (0.25, 0.5, 0.75)
"""Blocks that end above this share of the arena come earlier, by these factors in turn."""
_BUCKET_BLOCKS = 400


class Block(NamedTuple):
    """Bytes that are needed from start until end; at its end it is no longer there. end None: to the end of all."""

    num_bytes: int
    start: float
    end: float | None


@dataclass(frozen=True)
class Arena:
    """A place for each block. num_bytes: of the arena. offsets: of the blocks, in the order in which they were given.

    bound: bytes of the largest set of blocks that are alive at once; no arena is smaller.
    """

    num_bytes: int
    offsets: Sequence[int]
    bound: int


def blocks_of(spans: Iterable[Span]) -> list[Block]:
    """The blocks of a trace, in the order in which they are handed out. Times are numbers of events, and so exact."""
    found: list[Block] = []
    living: dict[int, int] = {}
    for now, event in enumerate(event for span in spans for event in span.events):
        if event.what is What.MALLOC:
            living[event.block] = len(found)
            found.append(Block(event.num_bytes, now, None))
        elif event.what is What.FREE:
            index = living.pop(event.block)
            found[index] = found[index]._replace(end=now)
    return found


def plan(blocks: Iterable[Life | tuple[int, float, float | None]]) -> Arena:
    """Offsets for blocks, with as small an arena as is found. The same blocks give the same plan.

    Of lives, one that begins at the very time at which another ends overlaps with it: times do not tell which was
    first. Blocks (`blocks_of`) are exact.
    """
    sizes, starts, stops = _arrays([_block(block) for block in blocks])
    bound = _largest(sizes, starts, stops)
    layout = _best(sizes, starts, stops, bound) if len(sizes) else sizes
    top = int((layout + sizes).max(initial=0))
    return Arena(top * ALIGNMENT, (layout * ALIGNMENT).tolist(), bound * ALIGNMENT)


def check(arena: Arena, blocks: Iterable[Life | tuple[int, float, float | None]]) -> None:
    """Raises: ValueError if two blocks overlap in time and place, one is not aligned, or one is not in the arena."""
    sizes, starts, stops = _arrays([_block(block) for block in blocks])
    if len(arena.offsets) != len(sizes):
        raise ValueError(f"{len(arena.offsets)} offsets for {len(sizes)} blocks")
    offsets = np.asarray(arena.offsets, np.int64).reshape(-1)
    if (offsets % ALIGNMENT).any() or (offsets < 0).any() or (offsets + sizes * ALIGNMENT > arena.num_bytes).any():
        raise ValueError("a block is not aligned, or not in the arena")
    offsets //= ALIGNMENT
    order = np.lexsort((stops, starts))
    order = order[sizes[order] > 0]
    offsets, ends, starts, stops = offsets[order], (offsets + sizes)[order], starts[order], stops[order]
    alive = np.empty(0, np.int64)
    for i in range(len(order)):
        alive = alive[stops[alive] > starts[i]]
        if ((offsets[alive] < ends[i]) & (ends[alive] > offsets[i])).any():
            raise ValueError(f"block {order[i]} overlaps with another one")
        alive = np.append(alive, i)


def _block(block: Life | tuple[int, float, float | None]) -> Block:
    if not isinstance(block, Life):
        return Block(*block)
    return Block(block.num_bytes, block.born, None if block.died is None else math.nextafter(block.died, math.inf))


def _arrays(blocks: Sequence[Block]) -> tuple[Ints, Ints, Ints]:
    """Sizes in units of the alignment; starts and stops as places in the row of all times."""
    sizes = np.array([-(-block.num_bytes // ALIGNMENT) for block in blocks], np.int64)
    begin = np.array([block.start for block in blocks], np.float64)
    end = np.array([math.inf if block.end is None else block.end for block in blocks], np.float64)
    _, places = np.unique(np.concatenate([begin, end]), return_inverse=True)
    starts, stops = places[: len(blocks)], places[len(blocks):]
    return sizes, starts, np.maximum(stops, starts + 1)


def _largest(sizes: Ints, starts: Ints, stops: Ints) -> int:
    """Most units that are alive at once."""
    change = np.zeros(int(stops.max(initial=0)) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, stops, sizes)
    return int(change.cumsum().max(initial=0))


def _best(sizes: Ints, starts: Ints, stops: Ints, bound: int) -> Ints:
    """Offsets of the best sweep or round of all."""
    best, lowest = _swept(sizes, starts, stops, bound)
    if lowest <= _ENOUGH * bound:
        return best
    length = stops - starts
    groups = np.select([length > _LASTING * length.max(), sizes * _HUGE >= bound, sizes * _TINY >= bound], [0, 1, 2], 3)
    orders = [np.lexsort((starts, -sizes * length)), np.lexsort((-stops, groups)),
              np.lexsort((starts, -sizes, -np.log2(length).round())), np.lexsort((starts, -length, -sizes))]
    best_order, least, guilty = orders[0], 0, sizes > 0
    rounds = min(max(_WORK // len(sizes), _ROUNDS[0]), _ROUNDS[1])
    for number in range(rounds):
        order = orders[number] if number < len(orders) else _raised(
            best_order, guilty, _RAISE[number % len(_RAISE)])
        layout = _place(order, sizes, starts, stops)
        top = int((layout + sizes).max())
        if not number or top <= least:
            best_order, least, guilty = order, top, layout + sizes >= _GUILTY * top
        if top < lowest:
            best, lowest = layout, top
        if lowest <= _ENOUGH * bound:
            break
    return best


def _swept(sizes: Ints, starts: Ints, stops: Ints, bound: int) -> tuple[Ints, int]:
    """Offsets of the best sweep, and its arena's size."""
    tiny = sizes * _TINY < bound
    (large,), (small,) = np.nonzero(~tiny & (sizes > 0)), np.nonzero(tiny & (sizes > 0))
    offsets = np.zeros(len(sizes), np.int64)
    offsets[small], rest = Sweep(sizes[small], starts[small], stops[small]).run(0, 0, True)
    sweep = Sweep(sizes[large], starts[large], stops[large])
    least = _largest(sizes[large], starts[large], stops[large])
    offsets[large], lowest = sweep.run(0, 0, True)
    for room in _ROOMS:
        for short, best_fit in _SWEEPS:
            if lowest + rest <= _ENOUGH * bound or lowest <= least * room:
                break
            found, top = sweep.run(int(least * room), short, best_fit)
            if top < lowest:
                offsets[large], lowest = found, top
    offsets[small] += lowest
    return offsets, lowest + rest


def _raised(order: Ints, chosen: NDArray[np.bool_], factor: float) -> Ints:
    """An order in which the chosen blocks come earlier: their places are multiplied by the factor."""
    place = np.arange(len(order), dtype=np.float64)
    place[chosen[order]] *= factor
    return order[np.argsort(place, kind="stable")]


def _place(order: Ints, sizes: Ints, starts: Ints, stops: Ints) -> Ints:
    """Offsets: first fit, in this order."""
    placed = _Placed(len(sizes), int(stops.max()))
    offsets = np.zeros(len(sizes), np.int64)
    for i in order.tolist():
        offsets[i] = placed.add(int(sizes[i]), int(starts[i]), int(stops[i]))
    return offsets


class _Placed:
    """The blocks placed so far: rows of offset, end, start and stop, in buckets of time, each in order of offsets."""

    def __init__(self, num_blocks: int, num_times: int):
        count = max(num_blocks // _BUCKET_BLOCKS, 1)
        self._width = -(-num_times // count)
        self._buckets = [np.zeros((4, 64), np.int64) for _ in range(count)]
        self._counts = [0] * count
        self._all = np.zeros((4, num_blocks), np.int64)
        self._count = 0

    def add(self, size: int, start: int, stop: int) -> int:
        """Places a block at the lowest offset where it fits, and returns that."""
        first, last = start // self._width, (stop - 1) // self._width
        offset = self._fit(size, start, stop, first, last)
        row = (offset, offset + size, start, stop)
        self._all[:, self._count] = row
        self._count += 1
        for bucket in range(first, last + 1):
            self._insert(bucket, row)
        return offset

    def _fit(self, size: int, start: int, stop: int, first: int, last: int) -> int:
        if first == last:
            rows = self._buckets[first][:, : self._counts[first]]
        elif sum(self._counts[first : last + 1]) < self._count:
            rows = np.concatenate([self._buckets[b][:, : self._counts[b]] for b in range(first, last + 1)], axis=1)
        else:
            rows = self._all[:, : self._count]
        rows = rows[:2, (rows[2] < stop) & (rows[3] > start)]
        if first != last:
            rows = rows[:, rows[0].argsort()]
        lows, highs = rows
        if not len(lows) or lows[0] >= size:
            return 0
        reached = np.maximum.accumulate(highs)
        fits = lows[1:] - reached[:-1] >= size
        at = int(fits.argmax()) if len(fits) else 0
        return int(reached[at]) if len(fits) and fits[at] else int(reached[-1])

    def _insert(self, bucket: int, row: tuple[int, int, int, int]) -> None:
        count, rows = self._counts[bucket], self._buckets[bucket]
        if count == rows.shape[1]:
            rows = self._buckets[bucket] = np.concatenate([rows, np.zeros_like(rows)], axis=1)
        at = int(rows[0, :count].searchsorted(row[0]))
        rows[:, at + 1 : count + 1] = rows[:, at:count]
        rows[:, at] = row
        self._counts[bucket] = count + 1


__all__ = ["ALIGNMENT", "Arena", "Block", "blocks_of", "check", "plan"]
