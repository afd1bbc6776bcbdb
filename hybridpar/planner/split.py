"""The best cut of the blocks into stages, by dynamic programming: exact, with uneven blocks and memory by stage.

    worst[s][j] = min over i < j of max(worst[s-1][i], cost[s][i, j])        blocks 0 .. j-1 in stages 0 .. s

cost[s][i, j] is what stage s takes of a period if it holds blocks i .. j-1: without recomputation where that fits in
memory, else with it, else infinite. What fits depends on the stage: an earlier one has more micro-batches in flight.

Source: the recurrence of PipeDream (arXiv 1806.03377, section 3.1), for one device a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Blocks of each stage, whether each is recomputed, and the period of the slowest."""

    sizes: tuple[int, ...]
    recomputed: tuple[bool, ...]
    period: float


def best_split(
    forward: Sequence[float], backward: Sequence[float], per_batch: Sequence[float], num_stages: int,
    fits: Callable[[int, bool], NDArray[np.bool_]] | None = None,
) -> Split | None:
    """The split whose slowest stage is the fastest; of equal ones, that whose later stages have fewer blocks. None:
    nothing fits.

    forward, backward, per_batch: of each block; the last is what a block adds to a period for its update. fits(stage,
    recomputed)[i, j]: whether blocks i .. j-1 fit there; left out: everything does.
    """
    count = len(forward)
    if not 1 <= num_stages <= count:
        return None
    plain = _sums([f + b + u for f, b, u in zip(forward, backward, per_batch, strict=True)])
    again = plain + _sums(forward)
    worst: list[Matrix] = [np.full(count + 1, np.inf)]
    worst[0][0] = 0.0
    cuts, costs = [], []
    for stage in range(num_stages):
        cost, uses = plain, np.zeros_like(plain, dtype=bool)
        if fits is not None:
            uses = ~fits(stage, False)
            cost = np.where(uses, np.where(fits(stage, True), again, np.inf), plain)
        reached = np.maximum(worst[-1][:, None], np.where(np.isinf(plain), np.inf, cost))
        # the last of the best places to cut: later stages get fewer blocks
        cut = count - np.argmin(reached[::-1], axis=0)
        worst.append(reached[cut, np.arange(count + 1)])
        cuts.append(cut)
        costs.append(uses)
    if not np.isfinite(worst[-1][count]):
        return None
    sizes, recomputed, stop = [], [], count
    for stage in reversed(range(num_stages)):
        start = int(cuts[stage][stop])
        sizes.append(stop - start)
        recomputed.append(bool(costs[stage][start, stop]))
        stop = start
    return Split(tuple(sizes[::-1]), tuple(recomputed[::-1]), float(worst[-1][count]))


def _sums(values: Sequence[float]) -> Matrix:
    """[i, j]: of values i .. j-1; infinite unless i < j."""
    prefix = np.array([0.0, *accumulate(values)])
    sums = prefix[None, :] - prefix[:, None]
    rows, columns = np.indices(sums.shape)
    return np.where(rows < columns, sums, np.inf)
