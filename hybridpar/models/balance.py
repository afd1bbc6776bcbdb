"""The split of a row of blocks into stages that balances their costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hybridpar.config import rank_of_stage


@lru_cache(maxsize=256)
def balanced_split(
    costs: tuple[int, ...],
    num_stages: int,
    held: tuple[tuple[int, int], ...] = (),
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Return the number of blocks of each stage such that the costliest stage is as cheap as
    possible.

    Every stage gets a block. Of splits whose costliest stages are equal, up to the share `slack`,
    the one whose fullest stage holds the least is taken; of these, the one whose later stages have
    fewer blocks.

    Args:
        held: for each block the bytes of its state, and the bytes that it keeps of a micro-batch in
            flight, of which an earlier stage has more.
        slack: share by which costs may be off, as estimates are.
    """
    assert num_stages <= len(costs), f"{num_stages} stages of {len(costs)} blocks"
    work = (0, *accumulate(costs))
    count = len(costs)
    state, kept = ((0, *accumulate(of)) for of in zip(*(held or [(0, 0)] * count), strict=True))

    def total(in_flight: int, stop: int) -> int:
        return state[stop] + in_flight * kept[stop]

    def reach(stages: int, most: int, room: int, stop: int) -> int:
        """Return how many of the first `stop` blocks so many stages can hold; -1 if they cannot.

        No stage may be costlier than `most`, fuller than `room`, or empty.
        """
        at = 0
        for stage in range(stages):
            if at == stop:
                break
            in_stage = partial(total, num_stages - stage)
            limit = in_stage(at) + room
            at = min(bisect_right(work, work[at] + most) - 1, stop)
            at = bisect_right(range(at + 1), limit, key=in_stage) - 1
            if at <= stage:
                return -1
        return at

    def costliest(stages: int, high: int, room: int, stop: int) -> int:
        return _smallest(
            max(costs[:stop]), high, lambda most: reach(stages, most, room, stop) == stop
        )

    everything = total(num_stages, count)
    most = costliest(num_stages, work[-1], everything, count)
    most += int(slack * most)
    room = _smallest(0, everything, lambda each: reach(num_stages, most, each, count) == count)
    sizes: list[int] = []
    stop = count
    for stages in range(num_stages, 0, -1):
        most = costliest(stages, most, room, stop)
        start = min(reach(stages - 1, most, room, stop), stop - 1)
        sizes.insert(0, stop - start)
        stop = start
    return tuple(sizes)


def _smallest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest of low .. high that is enough; `high` is known to be."""
    if low < high and not enough(high - 1):
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


@lru_cache(maxsize=256)
def even_out(
    costs: tuple[float, ...], sizes: tuple[int, ...], num_ranks: int, placement: str = "loop"
) -> tuple[int, ...]:
    """Improve a split into virtual stages: make the costliest ranks cheaper, if a split near
    `sizes` does.

    `balanced_split` looks at stages alone, and not at the other stages of their rank. Here one
    block of the costliest rank at a time goes to another stage, and the blocks between them move
    up. Among equal splits the one wins whose ranks wait less for each other: the costliest stages
    of all rounds of the ranks take less together.
    """
    if len(sizes) == num_ranks:
        return sizes
    prefix = np.array([0.0, *accumulate(costs)])
    best = np.array(sizes)
    homes = [rank_of_stage(stage, num_ranks, placement) for stage in range(len(best))]
    # the stages of each rank, in order
    held = np.argsort(homes, kind="stable").reshape(num_ranks, -1)

    def worth(splits: NDArray[np.int64]) -> tuple[NDArray[np.float64], list[list[float]]]:
        """Return the costs of the ranks for each split (a row), and what splits are compared by.

        The latter are the costs from the largest to the smallest, then the total of the rounds.
        """
        ends = prefix[np.cumsum(splits, axis=1)]
        stages = np.diff(ends, axis=1, prepend=0.0)
        ranks = stages[:, held].sum(axis=2)
        rounds = stages.reshape(len(splits), -1, num_ranks).max(axis=2).sum(axis=1)
        return ranks, np.column_stack([-np.sort(-ranks, axis=1), rounds]).tolist()

    while True:
        ranks, (before,) = worth(best[None])
        givers = [stage for stage in held[ranks[0].argmax()] if best[stage] > 1]
        moves = [(giver, taker) for giver in givers for taker in range(len(best)) if taker != giver]
        if not moves:
            break
        moved = np.tile(best, (len(moves), 1))
        rows = np.arange(len(moves))
        moved[rows, [giver for giver, _ in moves]] -= 1
        moved[rows, [taker for _, taker in moves]] += 1
        _, after = worth(moved)
        better = min(range(len(moves)), key=after.__getitem__)
        if not after[better] < before:
            break
        best = moved[better]
    return tuple(best.tolist())
