"""The best split of the blocks into stages, by dynamic programming: exact for uneven blocks and
with a memory limit per stage.

worst[s][j] = min over i < j of max(worst[s-1][i], cost[s][i, j])        blocks 0 .. j-1 in stages 0 .. s

cost[s][i, j] is the time of stage s in a period if it holds blocks i .. j-1: without recomputation
if that fits in memory, else with it, else infinite. What fits depends on the stage, because an
earlier one has more micro-batches in flight. With equal layers many splits are equally fast; the
same recurrence finds the one with the least memory.

Source: the recurrence of PipeDream (arXiv 1806.03377, section 3.1), for one device per stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_EQUAL = 1 + 1e-9
"""Largest ratio of two numbers that count as equal, because of rounding."""


@dataclass(frozen=True)
class Split:
    """Blocks of each stage, whether each stage is recomputed, and the period of the slowest."""

    sizes: tuple[int, ...]
    recomputed: tuple[bool, ...]
    period: float


@dataclass(frozen=True)
class BlockCosts:
    """Seconds of each block.

    Attributes:
        forward: Of a forward.
        backward: Of a backward.
        update: Added to a period for norm and update.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]

    @property
    def totals(self) -> tuple[float, ...]:
        """Seconds that each block takes of a period, without recomputation."""
        blocks = zip(self.forward, self.backward, self.update, strict=True)
        return tuple(f + b + u for f, b, u in blocks)


def best_split(
    costs: BlockCosts,
    num_stages: int,
    peaks: Callable[[int, bool], Matrix] | None = None,
    limit: float = math.inf,
    slowness: Sequence[float] = (),
) -> Split | None:
    """Return the best split, or None if nothing fits.

    The best split has the fastest slowest stage; of equal ones, the least memory on the fullest
    stage; of these, the fewest blocks on later stages.

    Args:
        costs: Seconds of each block.
        num_stages: Number of stages.
        peaks: peaks(stage, recomputed)[i, j] is the bytes that blocks i .. j-1 take there. None:
            zero.
        limit: Bytes that a stage may take.
        slowness: Factor on the seconds of each stage. Empty: 1.
    """
    count = len(costs.forward)
    if not 1 <= num_stages <= count:
        return None
    plain = sums(costs.totals)
    again = plain + sums(costs.forward)
    slowness = slowness or [1.0] * num_stages
    stops = np.arange(len(plain))
    blocks = stops - stops[:, None]

    def longest(within: float) -> int:
        """Return the largest number of blocks of a stage that takes at most `within`."""
        return int(blocks[min(slowness) * plain <= within].max(initial=1))

    # cut at even shares of the total, no stage exceeds its share by more than one block; a memory
    # limit may force it to
    whole = plain if math.isinf(limit) else again
    even = max(slowness) * float(whole[0, -1] / num_stages + np.diag(whole, 1).max())
    for most in (longest(even), count):
        periods, uses, memory = _stages(
            _band(plain, most), _band(again, most), slowness, peaks, limit
        )
        period, cuts = _smallest_largest(periods, most)
        if period <= even:
            break
    if not np.isfinite(period):
        return None
    if memory:
        most = longest(period * _EQUAL)
        peak, _ = _smallest_largest(_within(periods, period, memory), most)
        period, cuts = _smallest_largest(_within(memory, peak, periods), most)
    sizes = []
    recomputed = []
    stop = count
    for stage in reversed(range(num_stages)):
        start = int(cuts[stage][stop])
        sizes.append(stop - start)
        recomputed.append(bool(uses and uses[stage][stop, stop - start - 1]))
        stop = start
    return Split(tuple(sizes[::-1]), tuple(recomputed[::-1]), period)


def _band(matrix: Matrix, most: int) -> Matrix:
    """Return [j, n], a matrix's [j - 1 - n, j]: stages of at most `most` blocks, by the block after
    them; infinite if there is no such stage."""
    stops = np.arange(len(matrix))[:, None]
    starts = stops - np.arange(1, most + 1)
    return np.where(starts >= 0, matrix[starts, stops], np.inf)


def _stages(
    plain: Matrix,
    again: Matrix,
    slowness: Sequence[float],
    peaks: Callable[[int, bool], Matrix] | None,
    limit: float,
) -> tuple[list[Matrix], list[NDArray[np.bool_]], list[Matrix]]:
    """Return bands of each stage: seconds, whether it is recomputed (empty: nowhere), and bytes if
    there are `peaks`."""
    most = plain.shape[1]
    slower = {slow: plain if slow == 1 else slow * plain for slow in slowness}
    if peaks is None:
        return [slower[slow] for slow in slowness], [], []
    # by matrix, which is kept so that its id stays unique
    bands: dict[int, tuple[Matrix, Matrix]] = {}
    found: dict[tuple[object, ...], tuple[Matrix, NDArray[np.bool_], Matrix]] = {}

    def band(matrix: Matrix) -> Matrix:
        if id(matrix) not in bands:
            bands[id(matrix)] = matrix, _band(matrix, most)
        return bands[id(matrix)][1]

    if math.isinf(limit):
        return (
            [slower[slow] for slow in slowness],
            [],
            [band(peaks(s, False)) for s in range(len(slowness))],
        )
    keys = []
    for stage, slow in enumerate(slowness):
        held = band(peaks(stage, False))
        least = band(peaks(stage, True))
        keys.append(key := (id(held), id(least), slow))
        if key not in found:  # stages with the same matrices share one result
            use = ~(held <= limit)
            cost = slow * np.where(use, np.where(least <= limit, again, np.inf), plain)
            found[key] = np.where(np.isinf(plain), np.inf, cost), use, np.where(use, least, held)
    costs, uses, memory = zip(*(found[key] for key in keys), strict=True)
    return list(costs), list(uses), list(memory)


def _within(values: Sequence[Matrix], limit: float, others: Sequence[Matrix]) -> list[Matrix]:
    """Return for each stage its `others` where its `values` are within the limit, infinite
    elsewhere.

    Stages that share both matrices share the result.
    """
    known: dict[tuple[int, int], Matrix] = {}
    for value, other in zip(values, others, strict=True):
        if (key := (id(value), id(other))) not in known:
            known[key] = np.where(value <= limit * _EQUAL, other, np.inf)
    return [known[id(value), id(other)] for value, other in zip(values, others, strict=True)]


def _smallest_largest(values: Sequence[Matrix], most: int) -> tuple[float, list[NDArray[np.intp]]]:
    """Return the split into stages of at most `most` blocks that minimizes the largest of their
    `values`.

    Returns:
        The minimum, and for each stage the best cut from earlier stages, by the block after it. The
        minimum is infinite if there is no split.
    """
    count = len(values[0]) - 1
    stops = np.arange(count + 1)
    # reversed, so that the last of equal cuts counts, and later stages get fewer blocks
    starts = stops[:, None] - np.arange(1, most + 1)
    worst: Matrix = np.full(count + 1, np.inf)
    worst[0] = 0.0
    cuts = []
    for value in values:
        reached = np.maximum(worst[starts], value[:, :most])
        best = reached.argmin(axis=1)
        cuts.append(stops - 1 - best)
        worst = reached[stops, best]
    return float(worst[count]), cuts


def sums(values: Sequence[float]) -> Matrix:
    """Return [i, j], the sum of values i .. j-1; infinite unless i < j."""
    prefix = np.array([0.0, *accumulate(values)])
    sums = prefix[None, :] - prefix[:, None]
    rows, columns = np.indices(sums.shape)
    return np.where(rows < columns, sums, np.inf)
