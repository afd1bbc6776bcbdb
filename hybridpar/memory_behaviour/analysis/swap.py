"""Tensors that could be swapped from a device to the host between two accesses, and be back in
time, at no cost in time. A block is one tensor, or holds several named ones (events.py).

S <= ATI / (1 / d2h + 1 / h2d)      S: bytes of the tensor; ATI: seconds between the accesses

Source: Li et al., ISPASS 2021, arXiv 2104.00258. Units: bytes, seconds, bytes/s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridpar.memory_behaviour.analysis.behaviour import Peak
from hybridpar.memory_behaviour.events import Life

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Link:
    """The link between a device and the host's pinned memory. `d2h`, `h2d`: bytes per second of
    large copies."""

    name: str
    d2h: float
    h2d: float

    def round_trip(self, num_bytes: float) -> float:
        """Return the seconds of swapping a tensor out and back."""
        return num_bytes / self.d2h + num_bytes / self.h2d


LINKS = {
    link.name: link
    for link in (
        Link("paper", 6.3e9, 6.4e9),  # Li et al.
        # sixteen lanes have 15.75, 31.5 and 63 GB/s; large copies of pinned memory reach about four
        # fifths of that
        Link("pcie3", 12e9, 12e9),
        Link("pcie4", 25e9, 25e9),
        Link("pcie5", 50e9, 50e9),
        # of 450 GB/s each way, measured: Schieffer et al., arXiv 2407.07850
        Link("c2c", 297e9, 375e9),
    )
}


@dataclass(frozen=True, slots=True)
class Swap:
    """Time between two accesses in which a full tensor could be swapped out and back. `spare`:
    seconds left over."""

    life: Life
    start: float
    end: float
    num_bytes: int
    spare: float


def swappable(seconds: float, link: Link) -> int:
    """Return the most bytes that can be swapped out and back within `seconds`."""
    return max(0, int(seconds / (1 / link.d2h + 1 / link.h2d)))


def num_feasible(seconds: _Floats, num_bytes: _Floats, link: Link) -> int:
    """Return the number of access intervals in which the tensor could be swapped, as `feasible`.

    Args:
        seconds: Length of each interval.
        num_bytes: Bytes of the tensor of each.
        link: The link.
    """
    needed = num_bytes / link.d2h + num_bytes / link.h2d
    return int(((seconds >= needed) & (num_bytes > 0)).sum())


def across(lives: Iterable[Life], time: float) -> list[Life]:
    """Return a life for each access interval that has this time in it, with no other accesses."""
    return [
        replace(life, accesses=[before, after])
        for life in lives
        for before, after in life.intervals()
        if before.time <= time <= after.time
    ]


def feasible(lives: Iterable[Life], link: Link) -> list[Swap]:
    """Return all swaps that fit between two consecutive accesses, each with exclusive use of the
    link.

    Args:
        lives: Blocks of a trace; of a long one, with the accesses of few steps, such as around the
            peak (`events.lives`).
        link: The link.
    """
    found = []
    for life in lives:
        for before, after in life.intervals():
            num_bytes = after.num_bytes
            spare = after.time - before.time - link.round_trip(num_bytes)
            if num_bytes and spare >= 0:
                found.append(Swap(life, before.time, after.time, num_bytes, spare))
    return found


def saved_at_peak(lives: Iterable[Life], link: Link, peak: Peak, *, shared: bool = True) -> int:
    """Return the bytes that could be swapped out at the moment of the peak.

    Args:
        lives: The blocks.
        link: The link.
        peak: The peak.
        shared: Whether copies share the link: it copies one tensor at a time in each direction, and
            tensors are chosen by deadline or largest first, whichever saves more. Otherwise each has
            the link to itself.
    """
    away = away_at_peak(lives, link, peak) if shared else _candidates(lives, link, peak)
    return sum(swap.num_bytes for swap in away)


def away_at_peak(lives: Iterable[Life], link: Link, peak: Peak) -> list[Swap]:
    """Return the swaps that `saved_at_peak` counts: at the peak all copies out have ended, and none
    back has begun."""
    swaps = _candidates(lives, link, peak)
    if not swaps:
        return []
    sizes = np.array([swap.num_bytes for swap in swaps], np.float64)
    back_in = np.array([swap.end - peak.time for swap in swaps])
    best: list[int] = []
    for order in (np.argsort(back_in, kind="stable"), np.argsort(-sizes, kind="stable")):
        out = _Queue(sizes / link.d2h, np.array([peak.time - swap.start for swap in swaps]))
        back = _Queue(sizes / link.h2d, back_in)
        chosen = [i for i in order.tolist() if out.takes(i) and (back.takes(i) or out.drops(i))]
        if sizes[chosen].sum() > sizes[best].sum():
            best = chosen
    return [swaps[i] for i in best]


def _candidates(lives: Iterable[Life], link: Link, peak: Peak) -> list[Swap]:
    """Return swaps, at most one per tensor, that could be away at the peak if they were alone."""
    return [
        swap
        for swap in feasible(lives, link)
        if swap.start + swap.num_bytes / link.d2h
        <= peak.time
        <= swap.end - swap.num_bytes / link.h2d
    ]


class _Queue:
    """Copies in one direction, one at a time. `seconds`: of each. `deadlines`: times from the peak
    by which each must end.

    Copies to the host all end by the peak, and none begins before its tensor's last access: seen
    backwards in time, they form such a queue, too. In the order of their deadlines all are in time
    if any order is (Jackson, 1955).
    """

    def __init__(self, seconds: _Floats, deadlines: _Floats):
        order = np.argsort(deadlines, kind="stable")
        self._seconds = seconds
        self._deadlines = deadlines[order]
        self._place = np.argsort(order)
        self._taken = np.zeros(len(order))

    def takes(self, i: int) -> bool:
        """Add copy `i` if it and all copies taken so far are in time; return whether it was
        added."""
        self._taken[self._place[i]] = self._seconds[i]
        late = (self._taken.cumsum() > self._deadlines) & (self._taken > 0)
        return not late.any() or self.drops(i)

    def drops(self, i: int) -> bool:
        """Remove copy `i`. Return False."""
        self._taken[self._place[i]] = 0.0
        return False
