"""Chunks that replicas shard (ZeRO-2 and 3) along a plan: which ones are unsharded at which time,
and which actions wait for which collective.

FETCH     gathers weights            RELEASE   drops weights, or starts to reduce gradients over the
replicas
B I W     create the gradients that they add to, if these are not resident; earlier reductions are
complete before
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Generic, TypeVar

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import PER_ITEM, Kind
from hybridpar.schedules.passes.residency import FastTier, Mode, Residency, add_residency

MIB = 2**20
NO_CALLS: Mapping[Kind, float] = MappingProxyType({})
_T = TypeVar("_T")


@dataclass(frozen=True)
class SharedItems:
    """Items of a rank that replicas shard.

    Attributes:
        weights: Residency of weights.
        gradients: Residency of gradients.
        summed: Numbers of the items that are gradients.
        tiers: Items of the rank's tiers; None: it has none.
        shares: Numbers of the shards among the tiers' items, by the numbers of the unsharded items.
    """

    weights: Residency
    gradients: Residency
    summed: frozenset[int]
    tiers: Residency | None = None
    shares: Mapping[int, int] = field(default_factory=dict)

    def moved(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Return a rank's actions with FETCH and RELEASE of all items."""
        moved = add_residency(add_residency(actions, self.gradients), self.weights)
        return moved if self.tiers is None else add_residency(moved, self.tiers)


class Sums(Generic[_T]):
    """Reductions of gradients that are under way, the oldest first, each with an object that tells
    when it is complete.

    An action that creates gradients waits for the reductions that were started before the previous
    gradients were created, and for reductions of the same items. NORM and UPDATE wait for all. A
    shard that is to be evicted (`shares`: by the item that is reduced into it) leaves once the
    reductions into it are complete.
    """

    def __init__(self, shares: Mapping[int, int] = MappingProxyType({})) -> None:
        self._shares = shares
        self.leaving: dict[int, Action] = {}
        """The RELEASE of each share that is still added to."""
        self._sums: deque[tuple[int, _T]] = deque()
        self._num_older = 0  # that were started ahead of the gradients that were made last

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[int]:
        return (item for item, _ in self._sums)

    def first(self, count: int) -> Iterator[_T]:
        """Return the ends of the oldest reductions."""
        return (over for _, over in islice(self._sums, count))

    def num_due(self, action: Action, made: Collection[int]) -> int:
        """Return the number of reductions, the oldest first, that must be complete before an action
        that creates these items.
        """
        if action.kind in (Kind.NORM, Kind.UPDATE):
            return len(self._sums)
        if not made:
            return 0
        return max(
            [self._num_older, *(i + 1 for i, (item, _) in enumerate(self._sums) if item in made)]
        )

    def num_into_leaving(self) -> int:
        """Return the number of reductions that must be complete before all leaving shards are
        free.
        """
        return max(
            (i for i, item in enumerate(self, 1) if self._shares.get(item) in self.leaving),
            default=0,
        )

    def delays(self, action: Action) -> bool:
        """Return whether an action evicts a shard that is still added to; the eviction is then
        delayed.
        """
        share = action.microbatch
        delayed = action.kind in (Kind.RELEASE, Kind.DROP) and any(
            self._shares.get(item) == share for item in self
        )
        if delayed:
            self.leaving[share] = action
        return delayed

    def start(self, item: int, over: _T) -> None:
        """Note that a reduction has started."""
        self._sums.append((item, over))

    def complete(self) -> tuple[int, _T, Action | None]:
        """Remove the oldest reduction, which is complete, and return it with the eviction that it
        has delayed, if any.
        """
        self._num_older = max(self._num_older - 1, 0)
        item, over = self._sums.popleft()
        return item, over, self.leaving.pop(self._shares.get(item, -1), None)

    def note_backward(self) -> None:
        """Note that gradients are created, after the due reductions are complete."""
        self._num_older = len(self._sums)


class SharedTiers:
    """The unsharded chunks of a rank, followed along its list. made: gradients that the newest
    action creates.
    """

    def __init__(self, items: SharedItems):
        self._items, self._weights, self._gradients = (
            items,
            FastTier(items.weights),
            FastTier(items.gradients),
        )
        self._tiers = None if items.tiers is None else FastTier(items.tiers)
        self.sums: Sums[float] = Sums(items.shares)
        self.made: list[int] = []

    def num_due(self, action: Action) -> int:
        """Return the number of reductions that must be complete before an action, including
        reductions into leaving shards if it fetches one of them or needs memory of the tiers.
        """
        due = self.sums.num_due(action, self._made(action))
        sums = self.sums
        if self._tiers is None or not sums.leaving:
            return due
        needs = (
            action.microbatch in sums.leaving
            if self._moves_share(action)
            else self._tiers.made(action)
        )
        return max(due, sums.num_into_leaving()) if needs else due

    def follow(self, action: Action, over: float | None = 0.0) -> str:
        """Advance past an action; return the fault that it shows, empty if there is none. over:
        when the reduction that it starts is complete; None: there is nothing to reduce.
        """
        due = self.num_due(action)
        in_tiers = ""
        self.made = self._made(action)
        for _ in range(due):
            self.sums.complete()
        if self._tiers is not None:
            in_tiers = self._tiers.follow(action)
            if self._moves_share(action):
                self.sums.delays(action)
                return in_tiers
        if action.kind in PER_ITEM and action.microbatch in self._items.summed:
            fault = self._gradients.follow(action)
            if not fault and over is not None:
                self.sums.start(action.microbatch, over)
            return fault or in_tiers
        if self.made:
            self.sums.note_backward()
        fault = self._weights.follow(action)
        return (
            fault or in_tiers or ("" if action.kind in PER_ITEM else self._gradients.follow(action))
        )

    def _moves_share(self, action: Action) -> bool:
        return self._items.tiers is not None and self._items.tiers.moves(action)

    def added(self, action: Action) -> list[int]:
        """Return the gradients that an action adds to."""
        return [item for item, mode in self._items.gradients.accesses(action) if mode is Mode.ADD]

    def num_bytes(self) -> int:
        """Return the bytes of the chunks that are unsharded now."""
        sizes = self._items.gradients.num_bytes
        return (
            self._weights.num_bytes
            + self._gradients.num_bytes
            + sum(sizes[item] for item in self.sums)
        )

    def _made(self, action: Action) -> list[int]:
        return self._gradients.made(action) if action.kind not in PER_ITEM else []


class ReplicaEngines:
    """The collectives of a rank's sharded items, one after the other, and when these are unsharded.

    Actions that read weights wait until they are gathered. fetch, release: time for a MiB. calls:
    the rank's own part of it, by kind.
    """

    def __init__(
        self,
        items: SharedItems,
        fetch: float,
        release: float,
        calls: Mapping[Kind, float] = NO_CALLS,
    ):
        self._items = items
        self._times = {Kind.FETCH: fetch, Kind.RELEASE: release}
        self._calls = calls
        self._tiers = SharedTiers(items)
        self._free = 0.0
        self._arrivals: dict[int, float] = {}

    def work(self, kind: Kind) -> list[float]:
        """Return the rank's own time for an action of a kind, by item. Dropping weights sends
        nothing.
        """
        return [
            self._calls.get(kind, 0.0) * num_bytes / MIB
            if kind in self._times and (item in self._items.summed) == (kind is Kind.RELEASE)
            else 0.0
            for item, num_bytes in enumerate(self._items.weights.num_bytes)
        ]

    def ready(self, action: Action) -> float:
        """Return the time at which all items that the action accesses have arrived, and all
        reductions that it waits for are complete.
        """
        if action.kind in PER_ITEM:
            return 0.0
        arrivals = [
            self._arrivals.get(item, 0.0)
            for item, mode in self._items.weights.accesses(action)
            if mode is Mode.READ
        ]
        return max([0.0, *arrivals, *self._tiers.sums.first(self._tiers.num_due(action))])

    def follow(self, action: Action, now: float) -> tuple[str, float, float]:
        """Advance past an action; return its fault (empty if there is none) and, for a move, its
        start and end.
        """
        item = action.microbatch
        is_summed = item in self._items.summed
        if (
            action.kind not in PER_ITEM
            or is_summed != (action.kind is Kind.RELEASE)
            or item >= len(self._items.weights.num_bytes)
        ):  # weights are dropped, or it is of the tiers
            return self._tiers.follow(action), now, now
        start = max(now, self._free)
        end = start + self._items.weights.num_bytes[item] / MIB * self._times[action.kind]
        if fault := self._tiers.follow(action, end):
            return fault, now, now
        self._free = end
        if not is_summed:
            self._arrivals[item] = end
        return "", start, end
