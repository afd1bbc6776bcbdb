"""Copy engines of a rank in the simulator: one brings items into its fast tier, one writes them back.

    rank         F0            F0.1                                B0
    in           |-- FETCH1 --||         FETCH0 waits .. |-- FETCH0 --|
    out                         |---- RELEASE2 ----------|

Both take their moves in the order of the list. A FETCH waits for every RELEASE before it, whose room it may need; so
does an action that makes an item which was not there. What was not changed leaves in no time.
"""

from __future__ import annotations

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
