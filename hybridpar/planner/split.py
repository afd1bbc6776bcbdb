"""The best cut of the blocks into stages, by dynamic programming: exact, with uneven blocks and memory by stage.

    worst[s][j] = min over i < j of max(worst[s-1][i], cost[s][i, j])        blocks 0 .. j-1 in stages 0 .. s

cost[s][i, j] is what stage s takes of a period if it holds blocks i .. j-1: without recomputation where that fits in
memory, else with it, else infinite. What fits depends on the stage: an earlier one has more micro-batches in flight. So
many splits are equally fast (equal layers), and the least memory is found by the same recurrence among them.

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
    forward: Sequence[float], backward: Sequence[float], per_batch: Sequence[float], num_stages: int,
    peaks: Callable[[int, bool], Matrix] | None = None, limit: float = math.inf, slowness: Sequence[float] = (),
) -> Split | None:
    """The split whose slowest stage is the fastest; of equal ones, that whose fullest stage takes the least memory; of
    these, that whose later stages have fewer blocks. None: nothing fits.

    forward, backward, per_batch: of each block; the last is what a block adds to a period for its update. peaks(stage,
    recomputed)[i, j]: bytes that blocks i .. j-1 take there, `limit` at most; left out: nothing. slowness: by stage,
    what times are there over those given; left out: the same.
    """
    if not 1 <= num_stages <= len(forward):
        return None
    plain = sums([f + b + u for f, b, u in zip(forward, backward, per_batch, strict=True)])
    again = plain + sums(forward)
    slowness = slowness or [1.0] * num_stages
    costs: list[Matrix] = [plain if slow == 1 else slow * plain for slow in slowness]
    uses, memory = [np.zeros_like(plain, dtype=bool)] * num_stages, []
    if peaks is not None:
        for stage in range(num_stages):
            held = peaks(stage, False)
            if math.isinf(limit):
                memory.append(held)
                continue
            least = peaks(stage, True)
            uses[stage] = ~(held <= limit)
            memory.append(np.where(uses[stage], least, held))
            cost = slowness[stage] * np.where(uses[stage], np.where(least <= limit, again, np.inf), plain)
            costs[stage] = np.where(np.isinf(plain), np.inf, cost)

    def longest(within: float) -> int:
        """Blocks of a stage that takes so much at most."""
        rows, columns = np.nonzero(min(slowness) * plain <= within)
        return int((columns - rows).max(initial=1))

    # cut at even shares of all, no stage has a block more than that; where memory forbids it, some may
    whole = plain if math.isinf(limit) else again
    even = max(slowness) * float(whole[0, -1] / num_stages + np.diag(whole, 1).max())
    period, cuts = _smallest_largest(costs, longest(even))
    if period > even:
        period, cuts = _smallest_largest(costs, len(forward))
    if not np.isfinite(period):
        return None
    if memory:
        most = longest(period * _EQUAL)
        peak, _ = _smallest_largest(_within(costs, period, memory), most)
        period, cuts = _smallest_largest(_within(memory, peak, costs), most)
    sizes, recomputed, stop = [], [], len(forward)
    for stage in reversed(range(num_stages)):
        start = int(cuts[stage][stop])
        sizes.append(stop - start)
        recomputed.append(bool(uses[stage][start, stop]))
        stop = start
    return Split(tuple(sizes[::-1]), tuple(recomputed[::-1]), period)


def _within(values: Sequence[Matrix], limit: float, others: Sequence[Matrix]) -> list[Matrix]:
    """Of each stage, its others where its values are within the limit; infinite elsewhere. Stages that share both share
    it."""
    known: dict[tuple[int, int], Matrix] = {}
    for value, other in zip(values, others, strict=True):
        if (key := (id(value), id(other))) not in known:
            known[key] = np.where(value <= limit * _EQUAL, other, np.inf)
    return [known[id(value), id(other)] for value, other in zip(values, others, strict=True)]


def _smallest_largest(values: Sequence[Matrix], most: int) -> tuple[float, list[NDArray[np.intp]]]:
    """The split into stages of `most` blocks at most that makes the largest of their values[stage][i, j] as small as
    possible: that value, and where each stage is best cut from those before, by the block behind it. Infinite: there is
    no split."""
    count = len(values[0]) - 1
    different = {id(value): value for value in values}
    stops = np.arange(count + 1)
    starts = stops[:, None] - np.arange(1, most + 1)  # from the last on, so of the best the last: later stages get less
    inside = starts >= 0
    turned = {key: np.where(inside, value[starts, stops[:, None]], np.inf) for key, value in different.items()}
    worst: Matrix = np.full(count + 1, np.inf)
    worst[0], cuts = 0.0, []
    for value in values:
        reached = np.maximum(worst[starts], turned[id(value)])
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
