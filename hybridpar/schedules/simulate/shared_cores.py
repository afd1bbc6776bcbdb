"""Cores that the ranks of a machine share, in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Cores:
    """Cores that are shared evenly: work runs at the speed min(1, cores / pieces under way).

    All run at one speed, so `_served`, the work done on a piece that was there from the start,
    orders their ends.
    """

    def __init__(self, count: float):
        self.count = count
        self._now = self._served = 0.0
        self._due: list[tuple[float, int, float, Callable[[float], None]]] = []  # by start
        # by what is served when they are done
        self._running: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0  # only keeps the heaps from comparing callables

    def add(self, start: float, work: float, done: Callable[[float], None]) -> None:
        """Call `done(when)` once a piece of work that may start at `start` is done."""
        self._number += 1
        heappush(self._due, (start, self._number, work, done))

    def step(self) -> bool:
        """Advance to the next start or end; return False if nothing is left."""
        due = self._due
        running = self._running
        if not running and not due:
            return False
        if not running:
            self._now = due[0][0]
        speed = min(1.0, self.count / len(running)) if running else 1.0
        over = self._now + (running[0][0] - self._served) / speed if running else self._now
        if due and (not running or due[0][0] < over):
            start, number, work, done = heappop(due)
            self._served += (start - self._now) * speed
            self._now = start
            heappush(running, (self._served + work, number, done))
        else:
            self._served, _, done = heappop(running)
            self._now = over
            done(over)
        return True
