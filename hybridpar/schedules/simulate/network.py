"""Links that transfers share, in the simulator: the rate of each transfer changes whenever another
one starts or ends.

    rate of a transfer (share of it done in a second) = smallest, over the links it crosses, of
        bandwidth of the link / bytes of all transfers now on it

So equal transfers share a link equally, and the transfers of all replicas of a stage, which run in
step, count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes that one transfer puts on each link that it crosses, and its latency."""

    load: Mapping[Hashable, float]
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """Bytes a second of each link, and the routes from a rank to the next (`forward[r]`: r to r+1)
    and back."""

    bandwidth: Mapping[Hashable, float]
    forward: Sequence[Route]
    backward: Sequence[Route]


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer on its way: `left` is the share of it that is still to come."""

    load: Mapping[Hashable, float]
    done: Callable[[float], None]
    left: float = 1.0
    rate: float = 0.0


class Wires:
    """Transfers under way and to come, in order of time."""

    def __init__(self, bandwidth: Mapping[Hashable, float]):
        self._bandwidth = bandwidth
        self._now = 0.0
        self._due: list[tuple[float, int, _Flow]] = []
        self._number = 0  # only keeps the heap from comparing flows
        self._flows: list[_Flow] = []

    def add(
        self, start: float, load: Mapping[Hashable, float], done: Callable[[float], None]
    ) -> None:
        """Call `done(when)` once a transfer that starts at `start` is complete."""
        self._number += 1
        heappush(self._due, (start, self._number, _Flow(load, done)))

    def step(self) -> bool:
        """Advance to the next start or end; return False if nothing is left."""
        ends = [self._now + flow.left / flow.rate for flow in self._flows]
        until = min([*ends, *(start for start, _, _ in self._due[:1])], default=inf)
        if until == inf:
            return False
        for flow in self._flows:
            flow.left -= flow.rate * (until - self._now)
        ended = [flow for flow, end in zip(self._flows, ends, strict=True) if end <= until]
        self._flows = [flow for flow, end in zip(self._flows, ends, strict=True) if end > until]
        self._now = until
        while self._due and self._due[0][0] <= until:
            self._flows.append(heappop(self._due)[2])
        self._set_rates()
        for flow in ended:
            flow.done(until)
        return True

    def _set_rates(self) -> None:
        load: Counter[Hashable] = Counter()
        for flow in self._flows:
            load.update(flow.load)  # type: ignore[arg-type]
        for flow in self._flows:
            flow.rate = min(self._bandwidth[link] / load[link] for link in flow.load)
