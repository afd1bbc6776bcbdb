"""Distribution of values that spread over many factors of ten: a histogram of their logarithms, and percentiles."""

from __future__ import annotations

import math
from collections import defaultdict

PER_DECADE = 8
"""Bins of a histogram for each factor of ten."""
_FINE = 32
"""Counts for each bin, from which percentiles are taken: neighbours are less than one percent apart."""


class Distribution:
    """Counts of values of at least 0, by their logarithm. Zeros are counted apart. Memory: of a few thousand counts."""

    def __init__(self) -> None:
        self.count = self.zeros = 0
        self.total = 0.0
        self.least, self.most = math.inf, 0.0
        self._counts: dict[int, int] = defaultdict(int)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        if value > 0:
            self._counts[math.floor(math.log10(value) * PER_DECADE * _FINE)] += 1
        else:
            self.zeros += 1

    @property
    def mean(self) -> float:
        """Mean value; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that so many percent of all values do not exceed, to one percent of it; 0 of none."""
        wanted = percent / 100 * self.count
        seen = self.zeros
        if seen >= wanted:
            return 0.0
        for key in sorted(self._counts):
            seen += self._counts[key]
            if seen >= wanted:
                return min(max(10 ** ((key + 0.5) / (PER_DECADE * _FINE)), self.least), self.most)
        return self.most

    def histogram(self) -> list[tuple[float, float, int]]:
        """(from, to, count) of bins of an eighth of a decade, from the first that counts any to the last; no zeros."""
        bins: dict[int, int] = defaultdict(int)
        for key, count in self._counts.items():
            bins[key // _FINE] += count
        return [(10 ** (i / PER_DECADE), 10 ** ((i + 1) / PER_DECADE), bins.get(i, 0))
                for i in range(min(bins), max(bins) + 1)] if bins else []
