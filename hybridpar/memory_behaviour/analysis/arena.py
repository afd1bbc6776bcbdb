"""A planned arena: an offset for every block of a trace, such that no two that are alive at once
overlap.

First sweeps: blocks take their places in the order of time, in the free gap that fits best, and
leave them at their ends. Blocks that live long are placed from the bottom, those that live shortly
from the top; tiny blocks have a region of their own. In a pipeline's staircase of micro-batches,
one's blocks so take the places of another's. A few arena sizes and lengths of a short life are
tried.

Where no sweep comes near the bound, large boxes come first: the blocks that one action makes and
another one gives back, side by side, as one. They are placed by first fit, and by sweeps; then
their blocks are let down one by one, and all others take the lowest place where they fit. So a
micro-batch's blocks leave one gap, and not many.

Then placements in any order follow: each block at the lowest offset where it fits between those
already placed whose lives overlap with its own. Orders are tried: by size x lifetime; lasting and
huge blocks, then by ends, the last first; by lifetime to a factor of two, then by size; by size.
Then blocks that reach the top come earlier in the best order so far, and all is placed again, a few
times. The best of all is kept.

Source: offline dynamic storage allocation, as in idealloc (arXiv 2504.04874). Units: bytes; times
    are any numbers
that order events.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridpar.memory_behaviour.analysis.first_fit import place, search
from hybridpar.memory_behaviour.analysis.sweep import Ints, Sweep
from hybridpar.memory_behaviour.events import Life, Span, What

ALIGNMENT = 512
_WORK = 80_000
_ROUNDS = (2, 16)
"""Placements in all rounds together, and least and most rounds."""
_ROOMS = (1.0, 1.001, 1.0025, 1.01)
"""Arenas in which sweeps are tried, in sizes of the bound."""
_SWEEPS = ((128, True), (1024, True), (512, False), (0, True))
"""Times that a short life lasts, and whether the gap that fits best is taken, or the first."""
_TINY = 10_000
"""Blocks that are smaller than one part of so many of the bound have a region of their own."""
_HUGE = 16
_LASTING = 0.9
"""What comes first in one order: blocks above this share of the longest life, then one part of so
many of the bound."""
_LARGE = (50, 200)
"""Large blocks and boxes are at least one part of so many of the bound; those of middle size, of
this many."""
_ENOUGH = 1.005
"""An arena of so many times the bound is not improved."""


class Block(NamedTuple):
    """Bytes that are needed from start until end; at its end it is no longer there. end None: to
    the end of all.

    group: blocks with one number were made in one action and are given back in one other; None: in
    no group.
    """

    num_bytes: int
    start: float
    end: float | None
    group: int | None = None


Given = Life | Block | tuple[int, float, float | None]
"""A block, or what makes one."""


@dataclass(frozen=True)
class Arena:
    """A place for each block. num_bytes: of the arena. offsets: of the blocks, in the order in
    which they were given.

    bound: bytes of the largest set of blocks that are alive at once; no arena is smaller.
    """

    num_bytes: int
    offsets: Sequence[int]
    bound: int


def blocks_of(spans: Iterable[Span]) -> list[Block]:
    """The blocks of a trace, in the order in which they are handed out. Times are numbers of
    events, and so exact."""
    found: list[Block] = []
    living: dict[int, tuple[int, int]] = {}
    groups: dict[tuple[int, int], int] = {}
    count = itertools.count()
    for action, span in enumerate(spans):
        for event in span.events:
            now = next(count)
            if event.what is What.MALLOC:
                living[event.block] = len(found), action
                found.append(Block(event.num_bytes, now, None))
            elif event.what is What.FREE:
                index, born = living.pop(event.block)
                group = groups.setdefault((born, action), len(groups)) if born != action else None
                found[index] = found[index]._replace(end=now, group=group)
    return found


def plan(blocks: Iterable[Given]) -> Arena:
    """Offsets for blocks, with as small an arena as is found. The same blocks give the same plan.

    Of lives, one that begins at the very time at which another ends overlaps with it: times do not
    tell which was first. Blocks (`blocks_of`) are exact.
    """
    given = [_block(block) for block in blocks]
    sizes, starts, stops = _arrays(given)
    bound = _largest(sizes, starts, stops)
    groups = np.array(
        [-1 - i if block.group is None else block.group for i, block in enumerate(given)], np.int64
    )
    layout = _best(sizes, starts, stops, bound, groups) if len(sizes) else sizes
    top = int((layout + sizes).max(initial=0))
    return Arena(top * ALIGNMENT, (layout * ALIGNMENT).tolist(), bound * ALIGNMENT)


def check(arena: Arena, blocks: Iterable[Given]) -> None:
    """Raises: ValueError if two blocks overlap in time and place, one is not aligned, or one is not
    in the arena."""
    sizes, starts, stops = _arrays([_block(block) for block in blocks])
    if len(arena.offsets) != len(sizes):
        raise ValueError(f"{len(arena.offsets)} offsets for {len(sizes)} blocks")
    offsets = np.asarray(arena.offsets, np.int64).reshape(-1)
    if (
        (offsets % ALIGNMENT).any()
        or (offsets < 0).any()
        or (offsets + sizes * ALIGNMENT > arena.num_bytes).any()
    ):
        raise ValueError("a block is not aligned, or not in the arena")
    offsets //= ALIGNMENT
    order = np.lexsort((stops, starts))
    order = order[sizes[order] > 0]
    offsets, ends, starts, stops = (
        offsets[order],
        (offsets + sizes)[order],
        starts[order],
        stops[order],
    )
    alive = np.empty(0, np.int64)
    for i in range(len(order)):
        alive = alive[stops[alive] > starts[i]]
        if ((offsets[alive] < ends[i]) & (ends[alive] > offsets[i])).any():
            raise ValueError(f"block {order[i]} overlaps with another one")
        alive = np.append(alive, i)


def _block(block: Given) -> Block:
    if not isinstance(block, Life):
        return Block(*block)
    return Block(
        block.num_bytes,
        block.born,
        None if block.died is None else math.nextafter(block.died, math.inf),
    )


def _arrays(blocks: Sequence[Block]) -> tuple[Ints, Ints, Ints]:
    """PipelineShape in units of the alignment; starts and stops as places in the row of all
    times."""
    sizes = np.array([-(-block.num_bytes // ALIGNMENT) for block in blocks], np.int64)
    begin = np.array([block.start for block in blocks], np.float64)
    end = np.array([math.inf if block.end is None else block.end for block in blocks], np.float64)
    _, places = np.unique(np.concatenate([begin, end]), return_inverse=True)
    starts = places[: len(blocks)]
    stops = places[len(blocks) :]
    return sizes, starts, np.maximum(stops, starts + 1)


def _largest(sizes: Ints, starts: Ints, stops: Ints) -> int:
    """Most units that are alive at once."""
    change = np.zeros(int(stops.max(initial=0)) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, stops, sizes)
    return int(change.cumsum().max(initial=0))


def _best(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Offsets of the best candidate of all."""
    best, lowest = _swept(sizes, starts, stops, bound)
    for candidate in (_boxed, _ordered):
        if lowest > _ENOUGH * bound:
            layout = candidate(sizes, starts, stops, bound, groups)
            top = int((layout + sizes).max())
            if top < lowest:
                best = layout
                lowest = top
    return best


def _ordered(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Offsets of the best order in which blocks come one by one."""
    length = stops - starts
    ranks = np.select(
        [length > _LASTING * length.max(), sizes * _HUGE >= bound, sizes * _TINY >= bound],
        [0, 1, 2],
        3,
    )
    orders = [
        np.lexsort((starts, -sizes * length)),
        np.lexsort((-stops, ranks)),
        np.lexsort((starts, -sizes, -np.log2(length).round())),
        np.lexsort((starts, -length, -sizes)),
    ]
    rounds = min(max(_WORK // len(sizes), _ROUNDS[0]), _ROUNDS[1])
    return search(orders, (sizes, starts, stops), rounds, _ENOUGH * bound)


def _by_size_and_end(sizes: Ints, stops: Ints, bound: int) -> Ints:
    """Large blocks first, then those of middle size; among them what ends last comes first."""
    return np.lexsort((-stops, sum(sizes * part < bound for part in _LARGE)))  # type: ignore[arg-type]


def _boxed(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Offsets where large boxes have their places first, each the blocks of a group, side by side.

    Then the blocks in them are let down, from the lowest on, and all others follow.
    """
    groups = np.where(
        (starts < stops.min()) & (stops == stops.max()), groups.max() + 1, groups
    )  # always there
    _, box = np.unique(groups, return_inverse=True)
    count = int(box.max()) + 1
    total = np.zeros(count, np.int64)
    begin = np.full(count, stops.max())
    end = np.zeros(count, np.int64)
    np.add.at(total, box, sizes)
    np.minimum.at(begin, box, starts)
    np.maximum.at(end, box, stops)
    (large,), others = np.nonzero(total * _LARGE[0] >= bound), _by_size_and_end(sizes, stops, bound)
    found = []
    for layout in _boxes(total[large], begin[large], end[large], bound):
        offsets = np.full(count, -1)
        offsets[large] = layout
        (inside,) = np.nonzero(offsets[box] >= 0)
        inside = inside[np.lexsort((-stops[inside], box[inside], offsets[box[inside]]))]
        order = np.concatenate([inside, others[offsets[box[others]] < 0]])
        found.append(place(order, sizes, starts, stops))
    return min(found, key=lambda layout: int((layout + sizes).max()))


def _boxes(sizes: Ints, starts: Ints, stops: Ints, bound: int) -> Iterator[Ints]:
    """Yields the places of boxes: by first fit, huge ones first and what ends last first; by the
    best sweep.

    A life is short in a sweep below each power of two in turn.
    """
    yield place(np.lexsort((-stops, sizes * _HUGE < bound)), sizes, starts, stops)
    sweep, least = Sweep(sizes, starts, stops), _largest(sizes, starts, stops)
    powers = range(int(stops.max(initial=1)).bit_length() + 1)
    yield min((sweep.run(least, 1 << power, True) for power in powers), key=lambda found: found[1])[
        0
    ]


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
