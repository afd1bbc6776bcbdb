"""Reuse distances of blocks: bytes of distinct other blocks that are accessed between two accesses
of a block.

The bytes of a block stand at the place of its last access in a row of accesses, so a distance is a
sum over the row's end; a Fenwick tree gives it. Bytes of blocks that are gone stay: they were
accessed. When the row is full, it is written anew with the living blocks and, between each two of
them, the sum of those that are gone.

Source: Bennett and Kruskal, IBM Journal of Research and Development 19(4), 1975; Fenwick, Software
    24(3), 1994.
"""

from __future__ import annotations

import numpy as np


class ReuseDistances:
    """Reuse distances while accesses come. Memory: of living blocks."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._sizes = [0] * 1024
        self._tree = [0] * 1025
        self._next = self._total = 0

    def access(self, block: int, num_bytes: int) -> int | None:
        """The distance from the block's last access to this one; None: there was none."""
        place = self._places.get(block)
        if place is None:
            distance = None
        elif place == self._next - 1:
            return 0
        else:
            distance = self._total - self._up_to(place)
            self._add(place, -num_bytes)
        if self._next == len(self._sizes):
            self._places.pop(block, None)  # it moves to the end
            self._renew()
        self._places[block] = self._next
        self._add(self._next, num_bytes)
        self._next += 1
        return distance

    def remove(self, block: int) -> None:
        """Ends a block's life."""
        self._places.pop(block, None)

    def _add(self, place: int, num_bytes: int) -> None:
        self._sizes[place] += num_bytes
        self._total += num_bytes
        index = place + 1
        tree = self._tree
        while index < len(tree):
            tree[index] += num_bytes
            index += index & -index

    def _up_to(self, place: int) -> int:
        """Bytes up to a place, with it."""
        index = place + 1
        tree = self._tree
        found = 0
        while index:
            found += tree[index]
            index &= index - 1
        return found

    def _renew(self) -> None:
        """Writes the row anew: each living block, and after it what is gone before the next."""
        order = sorted(self._places, key=self._places.__getitem__)
        bounds = [self._places[block] for block in order]
        sums = np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))])
        sizes: list[int] = []
        for place, after in zip(bounds, [*bounds[1:], self._next], strict=True):
            sizes += [self._sizes[place], int(sums[after] - sums[place + 1])]
        self._places = {block: 2 * i for i, block in enumerate(order)}
        self._next = len(sizes)
        self._sizes = sizes + [0] * max(1024, len(sizes))
        sums = np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))])
        index = np.arange(1, len(self._sizes) + 1)
        self._tree = [0, *(sums[index] - sums[index - (index & -index)]).tolist()]
        self._total = int(sums[-1])
