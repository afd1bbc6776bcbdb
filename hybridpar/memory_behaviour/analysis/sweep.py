"""Placement of blocks in the order of time, in free gaps of an arena that grows if no gap fits."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Sweep:
    """A placement of blocks in the order of time. Blocks that live throughout lie at the bottom."""

    def __init__(self, sizes: Ints, starts: Ints, stops: Ints):
        always = (starts < stops.min(initial=np.iinfo(np.int64).max)) & (
            stops == stops.max(initial=0)
        )
        self._offsets = np.zeros(len(sizes), np.int64)
        self._offsets[always] = sizes[always].cumsum() - sizes[always]
        self._bottom = int(sizes[always].sum())
        (others,) = np.nonzero(~always)
        # at equal times, ends come first
        times = np.concatenate([stops[others] * 2, starts[others] * 2 + 1])
        self._events = np.concatenate([~others, others])[times.argsort(kind="stable")].tolist()
        self._sizes = sizes.tolist()
        self._lengths = (stops - starts).tolist()

    def run(self, top: int, short: int, best_fit: bool) -> tuple[Ints, int]:
        """Return offsets and the size of the arena, which starts at `top` and grows if a block fits
        no gap."""
        sizes = self._sizes
        offsets = self._offsets.tolist()
        gaps = _Gaps(self._bottom, max(top, self._bottom))
        for i in self._events:
            if i >= 0:
                offsets[i] = gaps.take(sizes[i], self._lengths[i] < short, best_fit)
            else:
                gaps.give(offsets[~i], sizes[~i])
        return np.array(offsets, np.int64), gaps.top


class _Gaps:
    """Free gaps of an arena in order of their offsets: starts and ends."""

    def __init__(self, bottom: int, top: int):
        self.top = top
        self._lows, self._highs = ([bottom], [top]) if top > bottom else ([], [])

    def take(self, size: int, from_top: bool, best_fit: bool) -> int:
        """Return the offset of a new block, at the end or the beginning of a gap. The arena grows
        if no gap fits."""
        lows = self._lows
        highs = self._highs
        chosen = -1
        least = self.top + 1
        for gap in range(len(lows) - 1, -1, -1) if from_top else range(len(lows)):
            length = highs[gap] - lows[gap]
            if size <= length < least:
                chosen = gap
                least = length
                if not best_fit or length == size:
                    break
        if chosen < 0:
            if not highs or highs[-1] < self.top:
                lows.append(self.top)
                highs.append(self.top)
            self.top = highs[-1] = lows[-1] + size
        if from_top:
            highs[chosen] -= size
            offset = highs[chosen]
        else:
            offset = lows[chosen]
            lows[chosen] += size
        if lows[chosen] == highs[chosen]:
            del lows[chosen], highs[chosen]
        return offset

    def give(self, offset: int, size: int) -> None:
        """Frees a block."""
        lows = self._lows
        highs = self._highs
        end = offset + size
        after = bisect_left(lows, offset)
        joins = after < len(lows) and lows[after] == end
        if after and highs[after - 1] == offset:
            highs[after - 1] = highs[after] if joins else end
            if joins:
                del lows[after], highs[after]
        elif joins:
            lows[after] = offset
        else:
            lows.insert(after, offset)
            highs.insert(after, end)
