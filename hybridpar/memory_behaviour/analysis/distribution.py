"""Distribution of values over many orders of magnitude: a histogram of logarithms, and
percentiles."""

from __future__ import annotations

import math
from collections import defaultdict

_PER_DECADE = 256
"""Bins per factor of ten: neighbours differ by less than one percent."""


class Distribution:
    """A histogram of nonnegative values by logarithm; zeros are counted separately. Needs memory
    for a few thousand counts."""

    def __init__(self) -> None:
        self.count = self.zeros = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0
        self._counts: dict[int, int] = defaultdict(int)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        if value > 0:
            self._counts[math.floor(math.log10(value) * _PER_DECADE)] += 1
        else:
            self.zeros += 1

    @property
    def mean(self) -> float:
        """Mean value; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return the value that `percent` percent of all values do not exceed, with a relative
        error of one percent; 0 if there are no values."""
        wanted = percent / 100 * self.count
        seen = self.zeros
        if seen >= wanted:
            return 0.0
        for key in sorted(self._counts):
            seen += self._counts[key]
            if seen >= wanted:
                return min(max(10 ** ((key + 0.5) / _PER_DECADE), self.least), self.most)
        return self.most
