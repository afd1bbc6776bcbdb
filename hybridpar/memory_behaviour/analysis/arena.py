"""A planned arena: an offset for every block of a trace, such that no two blocks that live at the
same time overlap.

Sweeps come first: blocks are placed in the order of time, each in the free gap that fits best, and
freed at their ends. Blocks that live long are placed from the bottom, blocks that live shortly from
the top; tiny blocks have a separate region. In a pipeline's staircase of micro-batches, the blocks
of one micro-batch thus take the places of another's. A few arena sizes and thresholds of a short
life are tried.

If no sweep comes near the bound, large boxes come first: the blocks that one action allocates and
another one frees, side by side, as one. Boxes are placed by first fit and by sweeps; then their
blocks are lowered one by one, and all other blocks take the lowest place where they fit. So a
micro-batch's blocks leave one large gap instead of many small ones.

Then orders of placement follow: each block takes the lowest offset where it fits between the placed
blocks whose lives overlap with its own. The orders are: by size x lifetime; lasting and huge
blocks, then by ends, the last first; by lifetime to a factor of two, then by size; by size. Then
blocks that reach the top are moved forward in the best order, and everything is placed again, a few
times. The best result is kept.

Source: offline dynamic storage allocation, as in idealloc (arXiv 2504.04874). Units: bytes; times
are any numbers that order events.
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
"""Placements in all rounds together, and smallest and largest number of rounds."""
_ROOMS = (1.0, 1.001, 1.0025, 1.01)
"""Arena sizes for sweeps, in multiples of the bound."""
_SWEEPS = ((128, True), (1024, True), (512, False), (0, True))
"""Largest duration of a short life, and whether to take the gap that fits best, or the first."""
_TINY = 10_000
"""Blocks smaller than 1 / `_TINY` of the bound have a separate region."""
_HUGE = 16
_LASTING = 0.9
"""Thresholds of the blocks that come first in one order: a share of the longest life, then a
divisor of the bound."""
_LARGE = (50, 200)
"""Divisors of the bound: large blocks and boxes are at least bound / first, medium ones at least
bound / second."""
_MANY = 20_000
_ENOUGH = (1.005, 1.01)
"""Arena size in multiples of the bound that is not improved any further; with more than `_MANY`
blocks, whose every placement takes seconds, the second one."""


class Block(NamedTuple):
    """Bytes that are needed from start until end (exclusive). end None: forever.

    `group`: blocks of one group were allocated in one action and are freed in one other; None: no
    group.
    """

    num_bytes: int
    start: float
    end: float | None
    group: int | None = None


Given = Life | Block | tuple[int, float, float | None]
"""A block, or an object to make one from."""


@dataclass(frozen=True)
class Arena:
    """A place for each block.

    Args:
        num_bytes: Size of the arena.
        offsets: Offsets of the blocks, in the order in which they were given.
        bound: Bytes of the largest set of blocks that live at the same time; no arena is smaller.
    """

    num_bytes: int
    offsets: Sequence[int]
    bound: int


def blocks_of(spans: Iterable[Span]) -> list[Block]:
    """Return the blocks of a trace in the order of allocation. Times are event numbers, and so
    exact."""
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
    """Return offsets for blocks, in an arena as small as the search finds. Equal blocks get equal
    plans.

    If a life begins exactly when another one ends, they overlap, because their order is unknown.
    Blocks from `blocks_of` are exact.
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
    """Check an arena.

    Raises:
        ValueError: Two blocks overlap in time and place, one is not aligned, or one is outside the
            arena.
    """
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
    ends = (offsets + sizes)[order]
    offsets = offsets[order]
    starts = starts[order]
    stops = stops[order]
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
    """Return sizes in units of the alignment, and starts and stops as indices into the sorted
    times."""
    sizes = np.array([-(-block.num_bytes // ALIGNMENT) for block in blocks], np.int64)
    begin = np.array([block.start for block in blocks], np.float64)
    end = np.array([math.inf if block.end is None else block.end for block in blocks], np.float64)
    _, places = np.unique(np.concatenate([begin, end]), return_inverse=True)
    starts = places[: len(blocks)]
    stops = places[len(blocks) :]
    return sizes, starts, np.maximum(stops, starts + 1)


def _largest(sizes: Ints, starts: Ints, stops: Ints) -> int:
    """Return the most units that live at the same time."""
    change = np.zeros(int(stops.max(initial=0)) + 1, np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, stops, sizes)
    return int(change.cumsum().max(initial=0))


def _best(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Return the offsets of the best candidate."""
    best, lowest = _swept(sizes, starts, stops, bound)
    for candidate in (_boxed, _ordered):
        if lowest > _enough(sizes) * bound:
            layout = candidate(sizes, starts, stops, bound, groups)
            top = int((layout + sizes).max())
            if top < lowest:
                best = layout
                lowest = top
    return best


def _enough(sizes: Ints) -> float:
    return _ENOUGH[len(sizes) > _MANY]


def _ordered(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Return the offsets of the best order of placing blocks one by one."""
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
    return search(orders, (sizes, starts, stops), rounds, _enough(sizes) * bound)


def _by_size_and_end(sizes: Ints, stops: Ints, bound: int) -> Ints:
    """Return an order of large blocks first, then medium ones; among these, the last to end comes
    first."""
    return np.lexsort((-stops, sum(sizes * part < bound for part in _LARGE)))  # type: ignore[arg-type]


def _boxed(sizes: Ints, starts: Ints, stops: Ints, bound: int, groups: Ints) -> Ints:
    """Return offsets with large boxes placed first, each holding the blocks of a group side by
    side.

    Then the blocks in the boxes are lowered, from the lowest on, and all others follow.
    """
    groups = np.where(
        (starts < stops.min()) & (stops == stops.max()), groups.max() + 1, groups
    )  # always allocated
    _, box = np.unique(groups, return_inverse=True)
    count = int(box.max()) + 1
    total = np.zeros(count, np.int64)
    begin = np.full(count, stops.max())
    end = np.zeros(count, np.int64)
    np.add.at(total, box, sizes)
    np.minimum.at(begin, box, starts)
    np.maximum.at(end, box, stops)
    (large,) = np.nonzero(total * _LARGE[0] >= bound)
    others = _by_size_and_end(sizes, stops, bound)
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
    """Yield places of boxes: by first fit, huge ones first and the last to end first; and by the
    best sweep.

    The sweep tries each power of two as the limit of a short life.
    """
    yield place(np.lexsort((-stops, sizes * _HUGE < bound)), sizes, starts, stops)
    sweep = Sweep(sizes, starts, stops)
    least = _largest(sizes, starts, stops)
    powers = range(int(stops.max(initial=1)).bit_length() + 1)
    yield min((sweep.run(least, 1 << power, True) for power in powers), key=lambda found: found[1])[
        0
    ]


def _swept(sizes: Ints, starts: Ints, stops: Ints, bound: int) -> tuple[Ints, int]:
    """Return the offsets of the best sweep, and the size of its arena."""
    tiny = sizes * _TINY < bound
    (large,) = np.nonzero(~tiny & (sizes > 0))
    (small,) = np.nonzero(tiny & (sizes > 0))
    offsets = np.zeros(len(sizes), np.int64)
    offsets[small], rest = Sweep(sizes[small], starts[small], stops[small]).run(0, 0, True)
    sweep = Sweep(sizes[large], starts[large], stops[large])
    least = _largest(sizes[large], starts[large], stops[large])
    offsets[large], lowest = sweep.run(0, 0, True)
    for room in _ROOMS:
        for short, best_fit in _SWEEPS:
            if lowest + rest <= _enough(sizes) * bound or lowest <= least * room:
                break
            found, top = sweep.run(int(least * room), short, best_fit)
            if top < lowest:
                offsets[large] = found
                lowest = top
    offsets[small] += lowest
    return offsets, lowest + rest
