"""Policies of replacement, to compare Belady's with: which item gives way, of those in a fast tier of equal rooms.

`residency` has no choice but opt, as it knows the plan. Others watch: lru and fifo what was, list order nothing. One
batch of six chunks, three rooms, in the steady state (misses):

                                        opt  lru  fifo  list order
    forward, backward                     6    6     6           6
    forward, backward, update             9   12    12          10
    recomputed two chunks at a time       6    7     8           9
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Occupant:
    """An item in the fast tier: its number, when it came and was last used, and when it is used next (inf: never).

    Units: accesses.
    """

    item: int
    came: int
    used: int
    next: float


POLICIES: Mapping[str, Callable[[Occupant], float]] = {
    "opt": lambda occupant: -occupant.next,
    "lru": lambda occupant: occupant.used,
    "fifo": lambda occupant: occupant.came,
    "list order": lambda occupant: occupant.item,
}
"""By name: the occupant of which it is least gives way, the lower number of equals."""


def count_misses(policy: str, accesses: Sequence[int], capacity: int) -> int:
    """Number of accesses that do not find their item, in a fast tier of `capacity` items that is empty at the start."""
    assert capacity >= 1, f"room for {capacity} items"
    rule = POLICIES[policy]
    following = _next_uses(accesses)
    here: dict[int, Occupant] = {}
    misses = 0
    for now, item in enumerate(accesses):
        if item not in here:
            misses += 1
            if len(here) == capacity:
                del here[min(here.values(), key=lambda occupant: (rule(occupant), occupant.item)).item]
            here[item] = Occupant(item, now, now, inf)
        here[item].used, here[item].next = now, following[now]
    return misses


def _next_uses(accesses: Sequence[int]) -> list[float]:
    """For each access, that which next has the same item."""
    following: list[float] = [inf] * len(accesses)
    latest: dict[int, int] = {}
    for now, item in enumerate(accesses):
        if item in latest:
            following[latest[item]] = now
        latest[item] = now
    return following
