"""The best cut of the blocks into stages, by dynamic programming: exact, with uneven blocks and
memory by stage.

    worst[s][j] = min over i < j of max(worst[s-1][i], cost[s][i, j])        blocks 0 .. j-1 in stages 0 .. s

cost[s][i, j] is what stage s takes of a period if it holds blocks i .. j-1: without recomputation
where that fits in memory, else with it, else infinite. What fits depends on the stage: an earlier
one has more micro-batches in flight. So many splits are equally fast (equal layers), and the least
memory is found by the same recurrence among them.

Source: the recurrence of PipeDream (arXiv 1806.03377, section 3.1), for one device a stage.
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
"""Equal up to rounding."""


@dataclass(frozen=True)
class Split:
    """Blocks of each stage, whether each is recomputed, and the period of the slowest."""

    sizes: tuple[int, ...]
    recomputed: tuple[bool, ...]
    period: float


def best_split(
    forward: Sequence[float],
    backward: Sequence[float],
    per_batch: Sequence[float],
    num_stages: int,
    peaks: Callable[[int, bool], Matrix] | None = None,
    limit: float = math.inf,
    slowness: Sequence[float] = (),
) -> Split | None:
    """The split whose slowest stage is the fastest; of equal ones, that whose fullest stage takes
    the least memory; of these, that whose later stages have fewer blocks. None: nothing fits.

    forward, backward, per_batch: of each block; the last is what a block adds to a period for its
    update. peaks(stage, recomputed)[i, j]: bytes that blocks i .. j-1 take there, `limit` at most;
    left out: nothing. slowness: by stage, what times are there over those given; left out: the
    same.
    """
    if not 1 <= num_stages <= len(forward):
        return None
    plain = sums([f + b + u for f, b, u in zip(forward, backward, per_batch, strict=True)])
    again = plain + sums(forward)
    slowness = slowness or [1.0] * num_stages
    stops = np.arange(len(plain))
    blocks = stops - stops[:, None]

    def longest(within: float) -> int:
        """Blocks of a stage that takes so much at most."""
        return int(blocks[min(slowness) * plain <= within].max(initial=1))

    # cut at even shares of all, no stage has a block more than that; where memory forbids it, some
    # may
    whole = plain if math.isinf(limit) else again
    even = max(slowness) * float(whole[0, -1] / num_stages + np.diag(whole, 1).max())
    for most in (longest(even), len(forward)):
        costs, uses, memory = _stages(
            _band(plain, most), _band(again, most), slowness, peaks, limit
        )
        period, cuts = _smallest_largest(costs, most)
        if period <= even:
            break
    if not np.isfinite(period):
        return None
    if memory:
        most = longest(period * _EQUAL)
        peak, _ = _smallest_largest(_within(costs, period, memory), most)
        period, cuts = _smallest_largest(_within(memory, peak, costs), most)
    sizes = []
    recomputed = []
    stop = len(forward)
    for stage in reversed(range(num_stages)):
        start = int(cuts[stage][stop])
        sizes.append(stop - start)
        recomputed.append(bool(uses and uses[stage][stop, stop - start - 1]))
        stop = start
    return Split(tuple(sizes[::-1]), tuple(recomputed[::-1]), period)


def _band(matrix: Matrix, most: int) -> Matrix:
    """[j, n]: a matrix's [j - 1 - n, j], of stages of `most` blocks at most by the block behind
    them; infinite where there is none."""
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
    """Bands of each stage: times, where it is recomputed (none: nowhere), and bytes, where there
    are peaks."""
    most = plain.shape[1]
    slower = {slow: plain if slow == 1 else slow * plain for slow in slowness}
    if peaks is None:
        return [slower[slow] for slow in slowness], [], []
    bands: dict[int, tuple[Matrix, Matrix]] = {}  # by matrix, which is kept
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
        if key not in found:  # stages that share both share it
            use = ~(held <= limit)
            cost = slow * np.where(use, np.where(least <= limit, again, np.inf), plain)
            found[key] = np.where(np.isinf(plain), np.inf, cost), use, np.where(use, least, held)
    costs, uses, memory = zip(*(found[key] for key in keys), strict=True)
    return list(costs), list(uses), list(memory)


def _within(values: Sequence[Matrix], limit: float, others: Sequence[Matrix]) -> list[Matrix]:
    """Of each stage, its others where its values are within the limit; infinite elsewhere. Stages
    that share both share it."""
    known: dict[tuple[int, int], Matrix] = {}
    for value, other in zip(values, others, strict=True):
        if (key := (id(value), id(other))) not in known:
            known[key] = np.where(value <= limit * _EQUAL, other, np.inf)
    return [known[id(value), id(other)] for value, other in zip(values, others, strict=True)]


def _smallest_largest(values: Sequence[Matrix], most: int) -> tuple[float, list[NDArray[np.intp]]]:
    """The split into stages of `most` blocks at most that makes the largest of their values, in
    bands, as small as possible: that value, and where each stage is best cut from those before, by
    the block behind it. Infinite: there is no split."""
    count = len(values[0]) - 1
    stops = np.arange(count + 1)
    starts = stops[:, None] - np.arange(
        1, most + 1
    )  # from the last on, so of the best the last: later stages get less
    worst: Matrix = np.full(count + 1, np.inf)
    worst[0], cuts = 0.0, []
    for value in values:
        reached = np.maximum(worst[starts], value[:, :most])
        best = reached.argmin(axis=1)
        cuts.append(stops - 1 - best)
        worst = reached[stops, best]
    return float(worst[count]), cuts


def sums(values: Sequence[float]) -> Matrix:
    """[i, j]: of values i .. j-1; infinite unless i < j."""
    prefix = np.array([0.0, *accumulate(values)])
    sums = prefix[None, :] - prefix[:, None]
    rows, columns = np.indices(sums.shape)
    return np.where(rows < columns, sums, np.inf)
