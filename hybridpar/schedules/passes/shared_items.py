"""Chunks that replicas share (ZeRO-2 and 3) along a plan: what is whole when, and what waits for
which collective.

FETCH     gathers weights            RELEASE   drops weights, or starts to sum gradients over the replicas
B I W     make the gradients that they add to, if these are not here; before, older sums are over
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
    """Items of a rank that replicas share. summed: the numbers of those that are gradients. tiers:
    the items of its tiers; None: it has none. shares: numbers of those among these that are shares,
    by those of what is shared."""

    weights: Residency
    gradients: Residency
    summed: frozenset[int]
    tiers: Residency | None = None
    shares: Mapping[int, int] = field(default_factory=dict)

    def moved(self, actions: Iterable[Action]) -> Iterator[Action]:
        """A rank's actions with FETCH and RELEASE of all."""
        moved = add_residency(add_residency(actions, self.gradients), self.weights)
        return moved if self.tiers is None else add_residency(moved, self.tiers)


class Sums(Generic[_T]):
    """Sums of gradients that are under way, the oldest first, each with whatever tells when it is
    over.

    What makes gradients waits for the sums that were started ahead of those that were made before,
    and for those of the same items. NORM and UPDATE wait for all. A share (`shares`: by what is
    summed into it) that is to leave does so once the sums into it are over.
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
        """Yield the ends of the oldest sums."""
        return (over for _, over in islice(self._sums, count))

    def num_due(self, action: Action, made: Collection[int]) -> int:
        """The number of sums, the oldest first, that must be over before an action, which makes
        these items."""
        if action.kind in (Kind.NORM, Kind.UPDATE):
            return len(self._sums)
        if not made:
            return 0
        return max(
            [self._num_older, *(i + 1 for i, (item, _) in enumerate(self._sums) if item in made)]
        )

    def num_into_leaving(self) -> int:
        """The number of sums that must be over before all shares that are to leave do."""
        return max(
            (i for i, item in enumerate(self, 1) if self._shares.get(item) in self.leaving),
            default=0,
        )

    def delays(self, action: Action) -> bool:
        """Whether an action has a share leave that is still added to; then it does later."""
        share = action.microbatch
        delayed = action.kind in (Kind.RELEASE, Kind.DROP) and any(
            self._shares.get(item) == share for item in self
        )
        if delayed:
            self.leaving[share] = action
        return delayed

    def start(self, item: int, over: _T) -> None:
        """A sum is started."""
        self._sums.append((item, over))

    def complete(self) -> tuple[int, _T, Action | None]:
        """The oldest is over, and a share leaves, if it was to."""
        self._num_older = max(self._num_older - 1, 0)
        item, over = self._sums.popleft()
        return item, over, self.leaving.pop(self._shares.get(item, -1), None)

    def note_backward(self) -> None:
        """Gradients are made, once what is due is over."""
        self._num_older = len(self._sums)


class SharedTiers:
    """The whole chunks of a rank's shared items, followed along its list. made: of the newest
    action, the gradients."""

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
        """The number of sums that must be over before an action: also those of shares that are to
        leave, where it brings one of them back, or takes memory of the tiers."""
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
        """Goes past an action. What is wrong with it; empty if nothing is. over: when the sum is
        that it starts; None: there is nothing to sum."""
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
        """The gradients that an action adds to."""
        return [item for item, mode in self._items.gradients.touches(action) if mode is Mode.ADD]

    def num_bytes(self) -> int:
        """Bytes of what is whole now."""
        sizes = self._items.gradients.num_bytes
        return (
            self._weights.num_bytes
            + self._gradients.num_bytes
            + sum(sizes[item] for item in self.sums)
        )

    def _made(self, action: Action) -> list[int]:
        return self._gradients.made(action) if action.kind not in PER_ITEM else []


class ReplicaEngines:
    """The collectives of a rank's shared items, one after the other, and when these are whole.

    What reads weights waits until they are gathered. fetch, release: time that a MiB takes. calls:
    the rank's own of it, by kind.
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
        """The rank's own time that an action of a kind takes, by item: nobody sends weights that
        are dropped."""
        return [
            self._calls.get(kind, 0.0) * num_bytes / MIB
            if kind in self._times and (item in self._items.summed) == (kind is Kind.RELEASE)
            else 0.0
            for item, num_bytes in enumerate(self._items.weights.num_bytes)
        ]

    def ready(self, action: Action) -> float:
        """Time at which all is there that the action touches, and all is over that must be."""
        if action.kind in PER_ITEM:
            return 0.0
        arrivals = [
            self._arrivals.get(item, 0.0)
            for item, mode in self._items.weights.touches(action)
            if mode is Mode.READ
        ]
        return max([0.0, *arrivals, *self._tiers.sums.first(self._tiers.num_due(action))])

    def follow(self, action: Action, now: float) -> tuple[str, float, float]:
        """Goes past an action: what is wrong with it, if anything is, and of a move its start and
        its end."""
        item = action.microbatch
        is_summed = item in self._items.summed
        if (
            action.kind not in PER_ITEM
            or is_summed != (action.kind is Kind.RELEASE)
            or (  # weights are dropped
                not self._items.weights.num_bytes[item]
            )
        ):  # it is of the tiers
            return self._tiers.follow(action), now, now
        start = max(now, self._free)
        end = start + self._items.weights.num_bytes[item] / MIB * self._times[action.kind]
        if fault := self._tiers.follow(action, end):
            return fault, now, now
        self._free = end
        if not is_summed:
            self._arrivals[item] = end
        return "", start, end
