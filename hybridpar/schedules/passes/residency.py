"""Residency: decide from the plan which items of a rank's state are in its fast tier at which time.

A rank's state is cut into items. An action accesses some: they must be in the fast tier while it
runs. All other items are in a slow tier of any size. Three segments whose weights are items 0 to 2,
with room for two:

    actions          F0                          F0.1                     F0.2   B0.2   B0.1                      B0
    add_residency    FETCH0 FETCH1  F0  RELEASE0 FETCH2   F0.1            F0.2   B0.2   RELEASE2 FETCH0   B0.1   B0

The plan says what comes next, so this is Belady's rule, without a first iteration to observe: the
item that is accessed last is evicted. The pass first decides the evictions at each action that
lacks an item. Then it places each eviction right after the item's last use, and each fetch as early
as there is room.

The fast tier's room is a constant budget, or what a limit leaves beside the memory of each action
(rooms.py): items leave ahead of an action with many activations, and come back when these are freed.

Sources: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems
Journal 5 (1966); PatrickStar, arXiv 2108.05818, for chunks that use the memory that activations
leave. PatrickStar measures that memory in a first iteration; here it is known from the plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from hybridpar.errors import config_error
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import PER_ITEM, Kind
from hybridpar.schedules.passes.rooms import Room


class Mode(Enum):
    """How an action uses an item's content."""

    READ = "read"
    WRITE = "write"  # replaces all of it, so the old content does not matter
    UPDATE = "update"  # reads and changes it
    # Adds to it, from zero if it is not resident; a RELEASE then adds it to the stored one.
    ADD = "add"
    RENEW = "renew"  # changes it elsewhere, so a resident copy would be outdated


CREATING = (Mode.WRITE, Mode.ADD)
"""Accesses that do not need the item to be fetched before."""


class Access(NamedTuple):
    """An item that an action accesses, and how."""

    item: int
    mode: Mode


class Away(Enum):
    """The place of a pool's items while they are not in its fast tier.

    STORE: a slow tier. FETCH reads an item, RELEASE writes it back if it has changed.
    GATHERED: each replica has a shard of an item. FETCH gathers it, RELEASE frees its memory.
    REDUCED: likewise, and RELEASE reduces what was added to an item over the replicas, into their
        shards. Its memory is free once that is complete.
    """

    STORE = "store"
    GATHERED = "gathered"
    REDUCED = "reduced"


@dataclass(frozen=True)
class Pool:
    """Items of a rank's state that share a fast tier.

    Attributes:
        accesses: Returns the accesses of an action to items of all pools; no item occurs twice. A
            move may access an item of another pool. All pools of a rank have the same function.
        num_bytes: Bytes of each item, in all pools.
        room: The size of the fast tier.
        pinned: Items that are always in it.
        resident: The other items that are in it at the start, and whether they have changed since
            they were last in the slow tier.
        void: Items without content at the start and at the end, in neither tier.
        spare: Bytes of the room that are left free if possible where items are fetched or written
            back, so that a fetch need not wait for an eviction.
        own: Numbers of its items; None: all.
        away: Where items are that are not in the fast tier.
        shards: The item of another pool that an item is reduced into, if it is in a pool.
    """

    accesses: Callable[[Action], Sequence[Access]]
    num_bytes: Sequence[int]
    room: Room
    pinned: Collection[int] = frozenset()
    resident: Mapping[int, bool] = field(default_factory=dict)
    void: Collection[int] = frozenset()
    spare: int = 0
    own: Container[int] | None = None
    away: Away = Away.STORE
    shards: Mapping[int, int] = field(default_factory=dict)

    def has(self, item: int) -> bool:
        """Return whether an item belongs to this pool."""
        return self.own is None or item in self.own

    def moves(self, action: Action) -> bool:
        """Return whether an action moves one of these items."""
        return action.kind in PER_ITEM and self.has(action.microbatch)

    def accessed(self, action: Action) -> Sequence[Access]:
        """Return the accesses of an action to these items."""
        accesses = self.accesses(action)
        if self.own is None:
            return accesses
        return [access for access in accesses if access.item in self.own]

    def needed_bytes(self, accesses: Iterable[Access]) -> int:
        """Return the bytes of the fast tier that an action with these accesses needs."""
        accessed = (item for item, mode in accesses if mode is not Mode.RENEW)
        return sum(self.num_bytes[item] for item in {*self.pinned, *accessed})

    @property
    def items(self) -> list[int]:
        """Numbers of the items."""
        return [item for item in range(len(self.num_bytes)) if self.has(item)]

    @property
    def start_bytes(self) -> int:
        """Bytes in the fast tier at the start."""
        return sum(self.num_bytes[item] for item in {*self.pinned, *self.resident})


def add_residency(
    actions: Iterable[Action], pools: Iterable[Pool], *, ahead: int = 16, batches: int = 4
) -> Iterator[Action]:
    """Add FETCH, RELEASE and DROP to one rank's actions: the last pass over a plan, which may be
    endless. The items of one pool after the other are added, so moves may access items of later
    pools.

    Items that are overwritten at their next access are evicted first, because that costs nothing;
    then items whose next access is last; among equals, items that need not be written back. A
    RELEASE (DROP, if the content is overwritten next) follows the last use. A FETCH is placed as
    early as there is space, with at most `ahead` actions that access anything before its use. An
    item that is not accessed for `batches` batches counts as never accessed; the pass reads so far
    ahead. At the end all items stay where they are.

    Raises:
        ConfigError: Once it is within these batches, if an action needs more than its room.
    """
    for pool in pools:
        actions = _Pass(actions, pool, ahead, batches).run()
    return iter(actions)


@dataclass(slots=True, eq=False)
class _Step:
    """An action, and the moves after it."""

    number: int
    action: Action | None  # None: the start
    accesses: Sequence[Access] = ()  # accesses to items that are not pinned
    room: int = 0  # bytes of the fast tier while it runs
    used: int = 0  # bytes in the fast tier while it runs
    leaving: list[Action] = field(default_factory=list)
    coming: list[Action] = field(default_factory=list)

    def all(self) -> Iterator[Action]:
        if self.action is not None:
            yield self.action
        yield from self.leaving
        yield from self.coming

    @property
    def ends_batch(self) -> bool:
        return self.action is not None and self.action.kind is Kind.UPDATE and self.action.part == 0


class _Pass:
    """Three ranges of the plan: read, decided but still open for moves after it, and yielded."""

    def __init__(self, actions: Iterable[Action], pool: Pool, ahead: int, batches: int):
        self._source = iter(actions)
        self._pool = pool
        self._ahead = ahead
        self._batches = batches
        self._pinned_bytes = sum(pool.num_bytes[item] for item in pool.pinned)
        self._resident = dict(pool.resident)  # items that are not pinned; whether changed
        self._room_of = pool.room.follow()
        self._bytes = pool.start_bytes
        self._free: float = inf  # bytes of the room that every action so far leaves
        self._number = self._num_updates = self._num_accessing = 0
        self._last_use: dict[int, int] = {}
        self._left: dict[int, int] = {}  # step after which an item was evicted
        # steps that access each item
        self._upcoming: defaultdict[int, deque[tuple[int, Mode]]] = defaultdict(deque)
        self._decided = deque([_Step(-1, None, used=self._bytes)])
        self._read = deque[_Step]()
        self._fill()
        self._stage = min((step.action.stage for step in self._read if step.action), default=0)
        self._spare = 0 if self._fits_without_moves() else pool.spare

    def run(self) -> Iterator[Action]:
        decided = self._decided
        while self._read:
            step = self._read.popleft()
            self._decide(step)
            decided.append(step)
            self._num_accessing += bool(step.accesses)
            while (
                len(decided) > 1 and self._num_accessing - bool(decided[0].accesses) > self._ahead
            ):
                self._num_accessing -= bool(decided[0].accesses)
                yield from decided.popleft().all()
            self._num_updates -= step.ends_batch
            self._fill()
        for step in decided:
            yield from step.all()

    def _fill(self) -> None:
        """Read as many batches ahead as necessary."""
        pinned = self._pool.pinned
        while (
            self._num_updates < self._batches and (action := next(self._source, None)) is not None
        ):
            accesses = [
                access for access in self._pool.accessed(action) if access.item not in pinned
            ]
            step = _Step(self._number, action, accesses, self._room_of(action))
            assert len({item for item, _ in accesses}) == len(accesses), (
                f"{action} accesses an item twice: {accesses}"
            )
            for item, mode in accesses:
                self._upcoming[item].append((step.number, mode))
            self._free = min(self._free, step.room - self._pool.needed_bytes(accesses))
            self._number += 1
            self._num_updates += step.ends_batch
            self._read.append(step)
        room = self._pool.room
        free = min(self._free, room.most - self._pool.start_bytes)
        if free < 0:
            rule = (
                "too small: the state at the start, and the state that any single action needs, "
                f"take {-free:.0f} bytes more"
            )
            raise config_error(room.field, room.most, rule, f"{room.most - free:.0f}")

    def _fits_without_moves(self) -> bool:
        """Return whether there is always room for all content that is read later.

        Content that is overwritten next needs no room: a weight that an update makes again from the
        master copy may be dropped, and the gradient takes its place.
        """
        num_bytes = self._pool.num_bytes
        live = set(self._pool.items).difference(self._pool.pinned, self._pool.void)
        counts = self._num_updates < self._batches  # the plan ends here
        if not counts:
            live.clear()
        for step in reversed(self._read):
            modes = {item: mode for item, mode in step.accesses if mode is not Mode.RENEW}
            held = sum(num_bytes[item] for item in live | modes.keys())
            if counts and self._pinned_bytes + held > step.room:
                return False
            live -= {item for item, mode in modes.items() if mode is Mode.WRITE}
            live |= {item for item, mode in modes.items() if mode is not Mode.WRITE}
            counts = counts or step.ends_batch  # all items are accessed in the batch behind it
        return True

    def _decide(self, step: _Step) -> None:
        """Evict items until the items that the step lacks fit, and fetch these. Items that the step
        changes elsewhere are evicted, too.
        """
        num_bytes = self._pool.num_bytes
        resident = self._resident
        accessed = {item for item, _ in step.accesses}
        renewed = [item for item, mode in step.accesses if mode is Mode.RENEW]
        for item in renewed:
            if item in resident:
                self._give_up(item)
            self._left[item] = step.number - 1  # may come back right behind this step
        lacking = [
            access
            for access in step.accesses
            if access.item not in resident and access.mode is not Mode.RENEW
        ]
        needed = self._bytes + sum(num_bytes[item] for item, _ in lacking)
        spare = int(min(self._spare, self._free))
        for item in self._victims(accessed, needed + spare - step.room):
            self._give_up(item)
        for item, mode in lacking:
            self._bytes += num_bytes[item]
            resident[item] = False
            if mode not in CREATING:
                self._fetch(item)
        step.used = self._bytes
        for item, mode in step.accesses:
            self._upcoming[item].popleft()
            if mode is not Mode.RENEW:
                self._last_use[item] = step.number
                resident[item] |= mode is not Mode.READ

    def _victims(self, accessed: Collection[int], excess: int) -> list[int]:
        """Return the items to evict for `excess` bytes."""
        if excess <= 0:
            return []
        num_bytes = self._pool.num_bytes
        victims = []
        for item in sorted(self._resident.keys() - accessed, key=self._worth):
            if excess <= 0:
                break
            victims.append(item)
            excess -= num_bytes[item]
        for item in victims[:-1]:  # the last one may be so large that others can stay
            if num_bytes[item] <= -excess:
                victims.remove(item)
                excess += num_bytes[item]
        return victims

    def _worth(self, item: int) -> tuple[bool, float, bool, int]:
        """Return the sort key of eviction: the smallest is evicted first."""
        when, mode = self._next(item)
        return mode is not Mode.WRITE, -when, self._resident[item], item

    def _next(self, item: int) -> tuple[float, Mode | None]:
        if accesses := self._upcoming[item]:
            return accesses[0]
        return inf, Mode.WRITE if item in self._pool.void else None

    def _give_up(self, item: int) -> None:
        """Evict an item right after its last use, or at the next point that is not yet yielded."""
        _, mode = self._next(item)
        del self._resident[item]
        self._bytes -= self._pool.num_bytes[item]
        last_use = self._last_use.get(item, -1)
        behind = self._decided[0]
        for step in reversed(self._decided):
            if step.number <= last_use:
                behind = step
                break
            if step is not behind:
                step.used -= self._pool.num_bytes[item]
        self._left[item] = behind.number
        behind.leaving.append(
            Action(Kind.DROP if mode is Mode.WRITE else Kind.RELEASE, self._stage, item)
        )

    def _fetch(self, item: int) -> None:
        """Place the FETCH as early as there is space, and no earlier than the item was evicted."""
        num_bytes = self._pool.num_bytes[item]
        left = self._left.get(item, -2)
        passed = 0
        steps = reversed(self._decided)
        behind = next(steps)
        for before in steps:
            passed += bool(behind.accesses)
            if (
                passed > self._ahead
                or before.number <= left
                or behind.used + num_bytes > behind.room
            ):
                break
            behind.used += num_bytes
            behind = before
        behind.coming.append(Action(Kind.FETCH, self._stage, item))
