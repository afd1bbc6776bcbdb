"""Follow the items of a rank's state along its plan, and prove that each one is in its fast tier
while an action accesses it.

Gradients that replicas shard (Away.REDUCED) are created by the actions that add to them. A RELEASE
starts to reduce them, and an action that creates gradients waits for earlier reductions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import PER_ITEM, Kind
from hybridpar.schedules.passes.residency import CREATING, Access, Away, Mode, Pool
from hybridpar.schedules.passes.rooms import BytesOf

_T = TypeVar("_T")


class Reductions(Generic[_T]):
    """Reductions of gradients that are under way, the oldest first, each with an object that tells
    when it is complete.

    An action that creates gradients waits for the reductions that were started before the previous
    gradients were created, and for reductions of the same items. NORM and UPDATE wait for all. A
    shard that is to be evicted (`shards`: by the item that is reduced into it) leaves once the
    reductions into it are complete.
    """

    def __init__(self, shards: Mapping[int, int]):
        self._shards = shards
        self.leaving: dict[int, Action] = {}
        """The RELEASE of each shard that is still added to."""
        self._under_way: deque[tuple[int, _T]] = deque()
        self._num_older = 0  # that were started ahead of the gradients that were created last

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[int]:
        return (item for item, _ in self._under_way)

    def first(self, count: int) -> Iterator[_T]:
        """Return the ends of the oldest reductions."""
        return (over for _, over in islice(self._under_way, count))

    def num_due(self, action: Action, created: Collection[int]) -> int:
        """Return the number of reductions, the oldest first, that must be complete before an action
        that creates these items.
        """
        if action.kind in (Kind.NORM, Kind.UPDATE):
            return len(self._under_way)
        if not created:
            return 0
        return max(
            [
                self._num_older,
                *(i + 1 for i, (item, _) in enumerate(self._under_way) if item in created),
            ]
        )

    def num_into_leaving(self) -> int:
        """Return how many reductions must be complete before all leaving shards are free."""
        return max(
            (i for i, item in enumerate(self, 1) if self._shards.get(item) in self.leaving),
            default=0,
        )

    def delays(self, action: Action) -> bool:
        """Return whether an action evicts a shard that is still added to; it is then delayed."""
        shard = action.microbatch
        delayed = action.kind in (Kind.RELEASE, Kind.DROP) and any(
            self._shards.get(item) == shard for item in self
        )
        if delayed:
            self.leaving[shard] = action
        return delayed

    def start(self, item: int, over: _T) -> None:
        """Note that a reduction has started."""
        self._under_way.append((item, over))

    def complete(self) -> tuple[int, _T, Action | None]:
        """Remove the oldest reduction, now complete; return it and the eviction it has delayed."""
        self._num_older = max(self._num_older - 1, 0)
        item, over = self._under_way.popleft()
        return item, over, self.leaving.pop(self._shards.get(item, -1), None)

    def note_backward(self) -> None:
        """Note that gradients are created, after the due reductions are complete."""
        self._num_older = len(self._under_way)


@dataclass(slots=True)
class FastTier:
    """The fast tier of a pool.

    Attributes:
        room_of: Returns its size, for each action in order.
        room: Its size while the newest action runs; moves have the room of both neighbours.
        next_room: Its size while the next action runs, once that is known.
        num_bytes: Bytes in it.
        fetched, written: Bytes that FETCH has moved so far, and changed bytes that RELEASE has.
    """

    pool: Pool
    room_of: BytesOf
    room: int
    num_bytes: int
    next_room: int | None = None
    fetched: int = 0
    written: int = 0

    def room_for(self, action: Action) -> int:
        """Return its size while the next action runs."""
        if self.pool.moves(action):
            return self.pool.room.most
        if self.next_room is None:
            self.next_room = self.room_of(action)
        return self.next_room


class FastTiers:
    """Follows the content of a rank's fast tiers along its list, and checks it.

    Attributes:
        tiers: The fast tier of each pool.
        reductions: The reductions of gradients that are under way.
        created: Gradients that the newest action creates.
    """

    def __init__(self, pools: Sequence[Pool]):
        self.tiers = [
            FastTier(pool, pool.room.follow(), pool.room.most, pool.start_bytes) for pool in pools
        ]
        self._tier_of = {item: tier for tier in self.tiers for item in tier.pool.items}
        self._accesses = pools[0].accesses if pools else _no_accesses
        # the action whose accesses were found last
        self._newest: tuple[Action | None, Sequence[tuple[FastTier, Access]]] = (None, ())
        # by item in its fast tier: whether it is changed
        self._changed: dict[int, bool] = {}
        self._void: set[int] = set()
        shards: dict[int, int] = {}
        for pool in pools:
            self._changed |= dict.fromkeys(pool.pinned, False) | dict(pool.resident)
            self._void.update(pool.void)
            shards |= pool.shards
        self.reductions: Reductions[float] = Reductions(shards)
        self.created: list[int] = []

    # -- what is in the tiers

    @property
    def store(self) -> FastTier | None:
        """The tier of the items that are in a slow tier otherwise, if there is one."""
        return next((tier for tier in self.tiers if tier.pool.away is Away.STORE), None)

    def accesses(self, action: Action) -> Sequence[tuple[FastTier, Access]]:
        """Return an action's accesses, with their tiers. A move accesses only other tiers."""
        if action is not self._newest[0]:
            self._newest = action, self._find_accesses(action)
        return self._newest[1]

    def _find_accesses(self, action: Action) -> list[tuple[FastTier, Access]]:
        moving = self.moving(action)
        if action.kind in PER_ITEM and (moving is None or moving.pool.away is Away.STORE):
            return []
        tiers = [(self._tier_of.get(access.item), access) for access in self._accesses(action)]
        return [(tier, access) for tier, access in tiers if tier is not None and tier is not moving]

    def moving(self, action: Action) -> FastTier | None:
        """Return the tier whose item an action moves, if it moves one."""
        return self._tier_of.get(action.microbatch) if action.kind in PER_ITEM else None

    def is_changed(self, item: int) -> bool:
        """Return whether the item would have to be written back."""
        return self._changed.get(item, False)

    def lacking(self, action: Action, away: Away) -> list[int]:
        """Return the items of a kind of pool that the action creates in their tier."""
        return [
            item
            for tier, (item, mode) in self.accesses(action)
            if tier.pool.away is away and item not in self._changed and mode is not Mode.RENEW
        ]

    def added(self, action: Action) -> list[int]:
        """Return the gradients that an action adds to."""
        return [item for _, (item, mode) in self.accesses(action) if mode is Mode.ADD]

    def unsharded_bytes(self) -> int:
        """Return the bytes of the chunks that replicas shard and that are unsharded now."""
        reduced = sum(self._num_bytes(item) for item in self.reductions)
        sharded = (tier for tier in self.tiers if tier.pool.away is not Away.STORE)
        return reduced + sum(tier.num_bytes for tier in sharded)

    def num_due(self, action: Action) -> int:
        """Return the number of reductions that must be complete before an action, including
        reductions into leaving shards if it fetches one of them or needs memory of the store's
        tier.
        """
        reductions = self.reductions
        due = reductions.num_due(action, self.lacking(action, Away.REDUCED))
        if reductions.leaving:
            moving = self.moving(action)
            needs = (
                action.microbatch in reductions.leaving
                if moving is not None and moving.pool.away is Away.STORE
                else self.lacking(action, Away.STORE)
            )
            due = max(due, reductions.num_into_leaving()) if needs else due
        return due

    # -- along the list

    def follow(self, action: Action, over: float | None = 0.0) -> str:
        """Advance past an action; return the fault that it shows, empty if there is none. over:
        when the reduction that it starts is complete; None: there is nothing to reduce.
        """
        due = self.num_due(action)
        self.created = self.lacking(action, Away.REDUCED)
        for _ in range(due):
            self.reductions.complete()
        moving = self.moving(action)
        rooms = [tier.room_for(action) for tier in self.tiers]
        fault = self._access(action) or self._move(action, moving)
        for tier, room in zip(self.tiers, rooms, strict=True):
            if tier is not moving:
                tier.room = room
                tier.next_room = None
            if not fault and tier.num_bytes > room:
                fault = f"{tier.num_bytes} bytes are in the fast tier, of {room}"
        if fault:
            return f"{action}: {fault}"
        if self.created:
            self.reductions.note_backward()
        if moving is not None and moving.pool.away is Away.STORE:
            self.reductions.delays(action)
        elif moving is not None and moving.pool.away is Away.REDUCED and over is not None:
            self.reductions.start(action.microbatch, over)
        return ""

    def _access(self, action: Action) -> str:
        for tier, (item, mode) in self.accesses(action):
            if mode is Mode.RENEW:
                if item in self._changed:
                    return f"item {item} is still in the fast tier, where it would be out of date"
                self._void.discard(item)
                continue
            if mode in CREATING:
                if item not in self._changed:
                    tier.num_bytes += self._num_bytes(item)
                self._void.discard(item)
            elif item in self._void:
                return f"item {item} has no content"
            elif item not in self._changed:
                return f"item {item} is not in the fast tier"
            self._changed[item] = self._changed.get(item, False) or mode is not Mode.READ
        return ""

    def _move(self, action: Action, tier: FastTier | None) -> str:
        if tier is None:
            return "there is no such item" if action.kind in PER_ITEM else ""
        item = action.microbatch
        is_fetch = action.kind is Kind.FETCH
        if item in tier.pool.pinned:
            return "the item always stays in the fast tier"
        if (item in self._changed) == is_fetch:
            return f"the item is {'' if is_fetch else 'not '}in the fast tier"
        if is_fetch:
            if item in self._void:
                return "the item has no content"
            self._changed[item] = False
            tier.num_bytes += self._num_bytes(item)
            tier.fetched += self._num_bytes(item)
            return ""
        if self._changed.pop(item) and action.kind is Kind.RELEASE:
            tier.written += self._num_bytes(item)
        tier.num_bytes -= self._num_bytes(item)
        if action.kind is Kind.DROP:
            self._void.add(item)
        return ""

    def _num_bytes(self, item: int) -> int:
        return self._tier_of[item].pool.num_bytes[item]


def _no_accesses(action: Action) -> Sequence[Access]:
    return ()
