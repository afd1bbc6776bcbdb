"""Reuse distances of tensors: bytes of distinct other tensors that are accessed between two accesses
of a tensor.

An array holds the bytes of each tensor at the position of its last access, so a distance is a sum
over the end of the array, which a Fenwick tree gives. Bytes of freed tensors stay, because they were
accessed. When the array is full, it is rebuilt from the living tensors and, between each two of
them, the sum of freed ones.

Source: Bennett and Kruskal, IBM Journal of Research and Development 19(4), 1975; Fenwick, Software
24(3), 1994.
"""

from __future__ import annotations

import numpy as np

TensorKey = tuple[int, str]
"""Number of a block, and the name of a tensor in it."""


class ReuseDistances:
    """Reuse distances of a stream of accesses. Needs memory for living tensors."""

    def __init__(self) -> None:
        self._places: dict[TensorKey, int] = {}
        self._sizes = [0] * 1024
        self._tree = [0] * 1025
        self._next = self._total = 0

    def access(self, tensor: TensorKey, num_bytes: int) -> int | None:
        """Return the distance from the tensor's last access to this one; None if there was none."""
        place = self._places.get(tensor)
        if place is None:
            distance = None
        elif place == self._next - 1:
            return 0
        else:
            distance = self._total - self._up_to(place)
            self._add(place, -num_bytes)
        if self._next == len(self._sizes):
            self._places.pop(tensor, None)  # the tensor moves to the end
            self._renew()
        self._places[tensor] = self._next
        self._add(self._next, num_bytes)
        self._next += 1
        return distance

    def remove(self, tensor: TensorKey) -> None:
        """End a tensor's life."""
        self._places.pop(tensor, None)

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
        """Rebuild the array from each living tensor followed by the sum of freed tensors before
        the next one."""
        order = sorted(self._places, key=self._places.__getitem__)
        bounds = [self._places[tensor] for tensor in order]
        sums = np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))])
        sizes: list[int] = []
        for place, after in zip(bounds, [*bounds[1:], self._next], strict=True):
            sizes += [self._sizes[place], int(sums[after] - sums[place + 1])]
        self._places = {tensor: 2 * i for i, tensor in enumerate(order)}
        self._next = len(sizes)
        self._sizes = sizes + [0] * max(1024, len(sizes))
        sums = np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))])
        index = np.arange(1, len(self._sizes) + 1)
        self._tree = [0, *(sums[index] - sums[index - (index & -index)]).tolist()]
        self._total = int(sums[-1])
