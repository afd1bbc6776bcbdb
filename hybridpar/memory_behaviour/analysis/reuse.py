"""Reuse distances of blocks: bytes of distinct other blocks that are accessed between two accesses
of a block.

An array holds the bytes of each block at the position of its last access, so a distance is a sum
over the end of the array, which a Fenwick tree gives. Bytes of freed blocks stay, because they were
accessed. When the array is full, it is rebuilt from the living blocks and, between each two of
them, the sum of freed ones.

Source: Bennett and Kruskal, IBM Journal of Research and Development 19(4), 1975; Fenwick, Software
24(3), 1994.
"""

from __future__ import annotations

import numpy as np


class ReuseDistances:
    """Reuse distances of a stream of accesses. Needs memory for living blocks."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._sizes = [0] * 1024
        self._tree = [0] * 1025
        self._next = self._total = 0

    def access(self, block: int, num_bytes: int) -> int | None:
        """Return the distance from the block's last access to this one; None if there was none."""
        place = self._places.get(block)
        if place is None:
            distance = None
        elif place == self._next - 1:
            return 0
        else:
            distance = self._total - self._up_to(place)
            self._add(place, -num_bytes)
        if self._next == len(self._sizes):
            self._places.pop(block, None)  # the block moves to the end
            self._renew()
        self._places[block] = self._next
        self._add(self._next, num_bytes)
        self._next += 1
        return distance

    def remove(self, block: int) -> None:
        """End a block's life."""
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
        """Return the bytes up to and including a position."""
        index = place + 1
        tree = self._tree
        found = 0
        while index:
            found += tree[index]
            index &= index - 1
        return found

    def _renew(self) -> None:
        """Rebuild the array from each living block followed by the sum of freed blocks before the
        next one."""
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
