"""The ideals of a class graph: sets of classes that contain all predecessors of their members.

A pipeline device holds the difference of two ideals. Ideals are numbered by size, so an ideal's
subsets have smaller numbers.

Source: arXiv 2006.16423, section 5.1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridpar.errors import config_error
from hybridpar.placement.workload import Ints

MAX_IDEALS = 60_000


class OutOfTime(Exception):
    """The time limit passed before a solver finished."""


@dataclass(frozen=True, eq=False)
class Ideals:
    """All ideals of n elements: number 0 is empty, the last contains everything.

    `covers` [c, 3]: (ideal, element, ideal without that element), sorted by ideal, then by falling
    element.
    """

    masks: tuple[int, ...]
    """Bit v is set if element v is in the ideal."""
    num_elements: int
    covers: Ints

    def __len__(self) -> int:
        return len(self.masks)

    @cached_property
    def members(self) -> NDArray[np.uint8]:
        """Matrix [ideals, n]: 1 if the element is in the ideal."""
        num_bytes = (self.num_elements + 7) // 8
        raw = b"".join(mask.to_bytes(num_bytes, "little") for mask in self.masks)
        table = np.frombuffer(raw, np.uint8).reshape(len(self), num_bytes)
        return np.unpackbits(table, axis=1, count=self.num_elements, bitorder="little")

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        num_words = max(1, (self.num_elements + 63) // 64)
        raw = b"".join(mask.to_bytes(8 * num_words, "little") for mask in self.masks)
        return np.frombuffer(raw, "<u8").reshape(len(self), num_words)

    def subsets(self, ideal: int) -> Ints:
        """Return the numbers of all subsets of this ideal, including itself, in rising order."""
        words = self._words
        inside = np.ones(ideal + 1, np.bool_)
        for column in range(words.shape[1]):
            inside &= (words[: ideal + 1, column] & ~words[ideal, column]) == 0
        return np.flatnonzero(inside)


def enumerate_ideals(
    predecessors: Sequence[Sequence[int]], max_ideals: int = MAX_IDEALS, deadline: float = np.inf
) -> Ideals:
    """Return the ideals of elements that are numbered so that predecessors have smaller numbers.

    Raises:
        ConfigError: There are more than `max_ideals`; raised as soon as that is known.
        OutOfTime: `time.monotonic()` is past `deadline`.
    """
    n = len(predecessors)
    needs = [sum(1 << u for u in set(before)) for before in predecessors]
    after: list[list[int]] = [[] for _ in range(n)]
    for v, before in enumerate(predecessors):
        for u in set(before):
            after[u].append(v)
    masks = [0]
    number = {0: 0}
    ready = [[v for v in range(n) if not needs[v]]]  # elements that may be added to each ideal
    covers: list[tuple[int, int, int]] = []
    small = 0
    while small < len(masks):
        mask = masks[small]
        choices = ready[small]
        for v in choices:
            grown = mask | 1 << v
            large = number.get(grown)
            if large is None:
                large = number[grown] = len(masks)
                if large >= max_ideals:
                    raise config_error(
                        "max_ideals",
                        max_ideals,
                        f"the graph of {n} classes has more ideals than that, too many for "
                        "the exact dynamic program",
                        "solver = 'dpl', which needs only one order of the classes",
                    )
                masks.append(grown)
                ready.append(
                    [w for w in choices if w != v]
                    + [w for w in after[v] if needs[w] & grown == needs[w]]
                )
            covers.append((large, v, small))
        ready[small] = []
        small += 1
        if time.monotonic() > deadline:
            raise OutOfTime
    table = np.array(covers, np.int64).reshape(-1, 3)
    return Ideals(tuple(masks), n, table[np.lexsort((-table[:, 1], table[:, 0]))])
