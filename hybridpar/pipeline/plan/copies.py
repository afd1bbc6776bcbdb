"""What works beside a rank in the simulator: two copy engines, one each way, and the host.

Of a rank with a fast tier one engine brings items into it, the other writes them back.

    rank         F0            F0.1                                B0
    in           |-- FETCH1 --||         FETCH0 waits .. |-- FETCH0 --|
    out                         |---- RELEASE2 ----------|

Both take their moves in the order of the list. A FETCH waits for every RELEASE before it, whose room it may need; so
does an action that makes an item which was not there. What was not changed leaves in no time.

So are what micro-batches keep from forward to backward, where it leaves meanwhile (StashEngines).

Where the host makes the new weights, gradients leave by one engine and the weights arrive by the other, group by group:

    rank         F B NORM0 F  HOST0 B F B  ..                  UPDATE0 F8   UPDATE0.1 F8.1
    to host           |-- 0 --||-- 1 --|
    host                      |---- 0 ----||---- 1 ----|
    from host                              |- 0 -|      |- 1 -|
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.kinds import Kind
from hybridpar.pipeline.plan.residency import FastTier, Residency

MIB = 2**20


class CopyEngines:
    """The two engines of a rank, and the times from which its items are in the fast tier.

    fetch, release: time that a MiB takes.
    """

    def __init__(self, residency: Residency, fetch: float, release: float):
        self._residency, self._fetch, self._release = residency, fetch, release
        self._tier = FastTier(residency)
        self._arrivals: dict[int, float] = {}
        self._in_free = self._out_free = 0.0

    def ready(self, action: Action) -> float:
        """Time at which all is there that the action touches."""
        arrivals = (self._arrivals.get(item, 0.0) for item, _ in self._residency.touches(action))
        return max(*arrivals, self._out_free if self._tier.creates(action) else 0.0, 0.0)

    def follow(self, action: Action, now: float) -> tuple[str, float, float]:
        """Goes past an action: what is wrong with it, if anything is, and of a move its start and its end."""
        item, written = action.microbatch, action.kind is Kind.RELEASE and self._tier.is_changed(action.microbatch)
        if fault := self._tier.follow(action):
            return fault, now, now
        mib = self._residency.num_bytes[item] / MIB if written or action.kind is Kind.FETCH else 0.0
        if written:
            start = max(now, self._out_free)
            self._out_free = start + mib * self._release
            return "", start, self._out_free
        if action.kind is Kind.FETCH:
            start = max(now, self._in_free, self._out_free)
            self._in_free = self._arrivals[item] = start + mib * self._fetch
            return "", start, self._in_free
        return "", now, now


class StashEngines:
    """The two engines of a rank for what its micro-batches keep. offload, reload: time that one takes of each."""

    def __init__(self, offload: float, reload: float):
        self._takes = {Kind.OFFLOAD: offload, Kind.RELOAD: reload}
        self._free = dict.fromkeys(self._takes, 0.0)
        self._over: dict[tuple[int, int], float] = {}  # when the last move of a micro-batch of a stage is over

    def start(self, action: Action, now: float) -> float:
        """Starts an OFFLOAD or RELOAD, after those of its kind before it: the time at which it is over."""
        over = max(now, self._free[action.kind]) + self._takes[action.kind]
        self._free[action.kind] = self._over[action.stage, action.microbatch] = over
        return over

    def ready(self, action: Action) -> float:
        """Time at which nothing of this micro-batch is on its way."""
        return self._over.get((action.stage, action.microbatch), 0.0)


class HostEngines:
    """The host of a rank, and the engines to and from it.

    to_host, host, from_host: time that all groups take of each. shares: of each group. What leaves takes the place of
    the same group of the batch before, once the host has read that; the host begins a batch when it is told to.
    """

    def __init__(self, to_host: float, host: float, from_host: float, shares: Sequence[float]):
        total = sum(shares)
        self._times = [(to_host * share / total, host * share / total, from_host * share / total) for share in shares]
        self._out_free = self._host_free = self._in_free = 0.0
        self._left, self._read, self._arrived = ([0.0] * len(shares) for _ in range(3))

    def send(self, now: float) -> None:
        """The gradients of a batch may leave."""
        for group, (takes, _, _) in enumerate(self._times):
            self._out_free = self._left[group] = max(now, self._out_free, self._read[group]) + takes

    def begin(self, now: float) -> float:
        """The host may use them. Time at which all that it makes has arrived."""
        for group, (_, takes, back) in enumerate(self._times):
            self._host_free = self._read[group] = max(now, self._host_free, self._left[group]) + takes
            self._in_free = self._arrived[group] = max(self._host_free, self._in_free) + back
        return self._in_free

    def ready(self, group: int) -> float:
        """Time at which a group of the weights has arrived."""
        return self._arrived[group]
