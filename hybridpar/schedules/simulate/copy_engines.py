"""Engines that move a rank's memory while it computes, in the simulator.

A rank with a fast tier has two copy engines: one loads items into it, the other writes them back.

    rank         F0            F0.1                                B0
    in           |-- FETCH1 --||         FETCH0 waits .. |-- FETCH0 --|
    out                         |---- RELEASE2 ----------|

Both take their moves in the order of the list. A FETCH waits until earlier evictions have freed
enough memory, and so does an action that creates an item. Unchanged items are evicted in no time.

Items that replicas shard are gathered and reduced by collectives, one after the other. Offloaded
activations have two engines of their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import AWAITS_ACTIVATIONS, BESIDE, OFFLOAD_KINDS, PER_ITEM, Kind
from hybridpar.schedules.passes.fast_tier import FastTier, FastTiers
from hybridpar.schedules.passes.residency import Away, Mode, Pool
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.simulated_rank import Rank, StuckError

MIB = 2**20
_TRANSFERS = {
    Away.STORE: (Kind.FETCH, Kind.RELEASE),
    Away.GATHERED: (Kind.FETCH,),
    Away.REDUCED: (Kind.RELEASE,),
}
"""Moves that transfer an item; others only free its memory."""


class MemoryMoves:
    """The engines of all ranks, connected with the ranks.

    Args:
        costs: Times of moves. Collectives have `costs.shared`, if it is set.
        pools: By rank, the items that it moves; moves of the other ranks take no time.
    """

    def __init__(self, ranks: Sequence[Rank], costs: Costs, pools: Mapping[int, Sequence[Pool]]):
        p = max(len(ranks), 1)
        self._engines = [RankEngines(pools.get(rank, ()), costs, rank, p) for rank in range(p)]
        self._moves_items = any(pools.values())
        self._offloads = any(Kind.OFFLOAD in rank.kinds for rank in ranks)

    def concern(self, kind: Kind) -> bool:
        """Return whether actions of a kind move or access what moves."""
        if self._offloads and (kind in OFFLOAD_KINDS or kind in AWAITS_ACTIVATIONS):
            return True
        accesses = kind in PER_ITEM or kind in (Kind.NORM, Kind.HOST) or kind not in BESIDE
        return self._moves_items and accesses

    def ready(self, rank: Rank, action: Action, start: float) -> float:
        """Dependency of actions that access or move memory: all that they need is resident."""
        ready = self._engines[rank.index].ready(action)
        if ready > start:
            rank.stalls[len(rank.starts)] = ready - start
        return max(start, ready)

    def follow(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of actions that access or move memory: a move starts, and created items are in the
        fast tier.

        Raises:
            StuckError: The action cannot run with the resident items.
        """
        engines = self._engines[rank.index]
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            rank.ends[step] = engines.move_activations(action, rank.clock)
            return
        if not engines.pools:
            return
        fault, start, end = engines.follow(action, rank.clock)
        if fault:
            raise StuckError({rank.index: (step, fault)})
        if action.kind is Kind.HOST:
            engines.hold(action, rank.ends[step])
        if action.kind in PER_ITEM:
            rank.ends[step] = end
            if start > rank.clock:
                rank.stalls[step] = start - rank.clock

    def durations(self, kind: Kind, homes: Sequence[int]) -> list[Sequence[float]]:
        """Return the rank's own time for a move, by stage and item. homes: ranks of the stages."""
        return [self._engines[rank].work(kind) for rank in homes]


class RankEngines:
    """The engines of a rank, and the times from which its items and activations are in memory."""

    def __init__(self, pools: Sequence[Pool], costs: Costs, rank: int, num_ranks: int):
        self.pools = pools
        self._rank = rank
        self._num_ranks = num_ranks
        self._costs = costs
        self._fast = FastTiers(pools)
        self._free: defaultdict[Hashable, float] = defaultdict(float)  # by engine
        self._arrivals: dict[int, float] = {}
        self._gone: dict[int, float] = {}  # when an item was last written back
        self._held: dict[int, float] = {}  # until when the host works on an item
        # when that is over, and bytes, of the items written last
        self._leaving: deque[tuple[float, int]] = deque()
        # when the last move of a micro-batch's activations is over, by stage and micro-batch
        self._moved: dict[tuple[int, int], float] = {}

    def work(self, kind: Kind) -> list[float]:
        """Return an upper bound of the rank's own time for a move of a kind, by item."""
        found = [0.0] * max((len(pool.num_bytes) for pool in self.pools), default=1)
        for pool in self.pools:
            if kind in _TRANSFERS[pool.away]:
                calls = expand(self._costs_of(pool).calls.get(kind, 0.0), self._num_ranks)
                for item in pool.items:
                    found[item] = calls[self._rank] * pool.num_bytes[item] / MIB
        return found

    def ready(self, action: Action) -> float:
        """Return when an action's memory is resident and the reductions it waits for are over."""
        found = 0.0
        if action.kind in AWAITS_ACTIVATIONS:
            found = self._moved.get((action.stage, action.microbatch), 0.0)
        moving = self._fast.moving(action)
        if moving is not None and moving.pool.away is Away.STORE:
            return found
        for _, (item, mode) in self._fast.accesses(action):
            if mode is not Mode.RENEW:
                found = max(found, self._arrivals.get(item, 0.0))
        if (store := self._fast.store) is not None:
            created = self._fast.lacking(action, Away.STORE)
            room = store.room_for(action)
            if created or room < store.room:
                found = max(found, self._has_room(store, created, room))
        if action.kind in PER_ITEM:
            return found
        due = self._fast.num_due(action)
        return max([found, *self._fast.reductions.first(due)])

    def follow(self, action: Action, now: float) -> tuple[str, float, float]:
        """Advance past an action; return its fault (empty if there is none) and, for a move of an
        item, its start and end.
        """
        while self._leaving and self._leaving[0][0] <= now:
            self._leaving.popleft()
        tier = self._fast.moving(action)
        if tier is None:
            return self._fast.follow(action), now, now
        item = action.microbatch
        is_fetch = action.kind is Kind.FETCH
        earliest = (
            self._has_room(tier, [item], tier.room) if is_fetch else self._held.pop(item, 0.0)
        )
        transfers = is_fetch or (action.kind is Kind.RELEASE and self._fast.is_changed(item))
        if not transfers and earliest <= now:
            return self._fast.follow(action), now, now
        is_copied = tier.pool.away is Away.STORE
        engine = action.kind is Kind.FETCH if is_copied else "collectives"
        start = max(now, self._free[engine], earliest)
        num_bytes = tier.pool.num_bytes[item]
        end = start + transfers * num_bytes / MIB * self._seconds(tier.pool, is_fetch=is_fetch)
        if fault := self._fast.follow(action, end):
            return fault, now, now
        self._free[engine] = end
        if is_fetch:
            self._arrivals[item] = end
        elif is_copied:
            self._gone[item] = end
            self._leaving.append((end, num_bytes))
        return "", start, end

    def hold(self, action: Action, until: float) -> None:
        """Keep the items that an action accesses in the fast tier until the host has used them."""
        self._held |= {item: until for _, (item, _) in self._fast.accesses(action)}

    def move_activations(self, action: Action, now: float) -> float:
        """Start an OFFLOAD or a RELOAD; return when it is over."""
        costs = self._costs
        cost = costs.offload if action.kind is Kind.OFFLOAD else costs.reload
        over = max(now, self._free[action.kind]) + expand(cost, self._num_ranks)[self._rank]
        self._free[action.kind] = self._moved[action.stage, action.microbatch] = over
        return over

    def _costs_of(self, pool: Pool) -> Costs:
        shared = self._costs.shared
        return self._costs if pool.away is Away.STORE or shared is None else shared

    def _seconds(self, pool: Pool, *, is_fetch: bool) -> float:
        """Return the time of an engine for a MiB."""
        costs = self._costs_of(pool)
        return expand(costs.fetch if is_fetch else costs.release, self._num_ranks)[self._rank]

    def _has_room(self, tier: FastTier, items: Sequence[int], room: int) -> float:
        """Return when there is room for items that are not resident, and none is leaving."""
        found = max((self._gone.get(item, 0.0) for item in items), default=0.0)
        if tier.pool.away is not Away.STORE:
            return found
        excess = (
            tier.num_bytes
            + sum(tier.pool.num_bytes[item] for item in items)
            + sum(num_bytes for _, num_bytes in self._leaving)
            - room
        )
        for over, num_bytes in self._leaving:
            if excess <= 0:
                break
            excess -= num_bytes
            found = max(found, over)
        return found
