"""Items of state in two tiers: memory of limited size, and a store with room for all.

    absent  --fetch-->  arriving  -->  here  --release-->  leaving  -->  absent
       \\------------ create -----------^  \\----------- drop ------------^

Requests are started in order, and are waited for only where they are needed. Memory counts as taken
from when an item begins to arrive until it has left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from hybridpar.comm import Waitable
from hybridpar.state.residency.pages import Region, Spare, SparePages
from hybridpar.state.residency.region import TensorRegion
from hybridpar.state.residency.store import Store

AnyRegion = Region | TensorRegion
_LOOKS_S = 2e-4
"""Seconds between looks at what holds an item: collectives do not report their end."""


class Where(Enum):
    """Location of an item, as seen from fast memory."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    HERE = "here"
    LEAVING = "leaving"


@dataclass(slots=True)
class Item:
    """One item: its memory, and where it is.

    Attributes:
        pinned: It is always resident.
        changed: The store lacks its content.
        written: The store has some content of it.
        used: When it was last requested, by a counter.
        holds: It may leave once these are done.
    """

    region: AnyRegion
    pinned: bool
    where: Where = Where.ABSENT
    changed: bool = False
    written: bool = False
    used: int = 0
    holds: list[Waitable] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return len(self.region.view)


@dataclass(slots=True)
class Traffic:
    """Bytes moved between the tiers, the peak in memory, and seconds waited."""

    read: int = 0
    written: int = 0
    peak: int = 0
    waited: float = 0.0


class Tiers:
    """Moves items between `regions` and a store, without ever having more than `budget` bytes in
    memory. The budget may change while items move.

    An error of the store is raised by the next call.

    Args:
        pinned: Numbers of the items that are always resident.
        spare: Keeps freed memory for other items.
        mark: Returns a marker that is done once the caller's work so far is complete; None: work is
            complete when its call returns.
    """

    def __init__(
        self,
        regions: Sequence[AnyRegion],
        pinned: frozenset[int],
        budget: int,
        store: Store,
        spare: Spare | None = None,
        mark: Callable[[], Waitable] | None = None,
    ):
        self.items = [Item(region, number in pinned) for number, region in enumerate(regions)]
        self.budget = budget
        self.traffic = Traffic()
        self._store = store
        self._resident = self._clock = 0
        self._spare = spare or SparePages()
        self._mark = mark
        self._error: Exception | None = None
        self._state = threading.Condition()
        self._queues: dict[Where, deque[int]] = {Where.ARRIVING: deque(), Where.LEAVING: deque()}
        self._closed = False
        for item in self.items:
            if item.pinned:
                item.where = Where.HERE
                self._take(item)
        self._movers = [
            threading.Thread(
                target=self._work, args=(where,), daemon=True, name=f"{where.value} state"
            )
            for where in self._queues
            if self.items
        ]
        for mover in self._movers:
            mover.start()

    def resize(self, budget: int) -> None:
        """Change the budget; return once no more is taken.

        Items that have to leave for it must be leaving already.
        """
        with self._looking():
            self.budget = budget
            self._spare.shrink_to(max(0, budget - self._resident))
            self._state.notify_all()
        if self._resident > budget:
            self._wait(lambda: self._resident <= budget)

    # -- requests of a plan

    def fetch(self, number: int) -> None:
        """Start to load an item that is absent or leaving."""
        with self._looking():
            self.items[number].where = Where.ARRIVING
            self._queues[Where.ARRIVING].append(number)
            self._state.notify_all()

    def release(self, number: int) -> None:
        """Start to write an item back, if the store lacks its content, and then free its memory."""
        item = self.items[number]
        if item.where is Where.ARRIVING:
            self._wait(lambda: item.where is Where.HERE)
        if self._mark is not None:
            item.holds.append(self._mark())
        with self._looking():
            if item.changed or item.holds:
                item.where = Where.LEAVING
                self._queues[Where.LEAVING].append(number)
            else:
                self._leave(item)
            self._state.notify_all()

    def drop(self, number: int) -> None:
        """Discard an item's content and free its memory."""
        item = self.items[number]
        assert item.where is Where.HERE, f"item {number} is {item.where.value}"
        item.changed = False
        self.release(number)

    def create(self, number: int) -> None:
        """Allocate zeros for an absent item; wait until leaving items have freed enough memory."""
        item = self.items[number]

        def has_taken() -> bool:  # in one step, because arriving items may take the same memory
            if item.where is not Where.ABSENT or not self._has_room(item):
                return False
            self._take(item)
            item.where = Where.HERE
            return True

        self._wait(has_taken)
        item.region.clear()

    def is_here(self, number: int) -> bool:
        """Return whether an item can be used at once."""
        return self.items[number].where is Where.HERE

    def is_absent(self, number: int) -> bool:
        """Return whether an item has no memory and is not about to get any."""
        return self.items[number].where in (Where.ABSENT, Where.LEAVING)

    def await_item(self, number: int, *, changing: bool = False) -> None:
        """Return once a fetched item is resident. changing: its content is about to change."""
        item = self.items[number]
        if item.where is not Where.HERE:
            assert item.where is Where.ARRIVING, (
                f"item {number} is {item.where.value} and nobody has fetched it"
            )
            self._wait(lambda: item.where is Where.HERE)
        self._use(item)
        item.changed |= changing

    def settle(self) -> None:
        """Wait for the end of all moves."""
        self._wait(lambda: not any(self._queues.values()))

    def hold(self, number: int, until: Waitable) -> None:
        """Keep a resident item in memory until this is done, even if it is released before."""
        item = self.items[number]
        item.holds = [hold for hold in item.holds if not hold.is_done()]  # of earlier batches
        item.holds.append(until)

    # -- requests outside plans

    @contextmanager
    def changing(self, numbers: Sequence[int]) -> Iterator[None]:
        """Make items resident to change them in this context, evicting the least recently used ones.
        Do not use it while a plan runs.
        """
        for number in numbers:
            self._use(self.items[number])
        for number in numbers:
            item = self.items[number]
            if item.where is Where.LEAVING:
                self._wait(lambda item=item: item.where is Where.ABSENT)  # type: ignore[misc]
            if item.where is Where.ABSENT:
                self._make_room(self.budget - item.num_bytes, frozenset(numbers))
                self.fetch(number)
            self.await_item(number, changing=True)
        yield

    def shrink(self, budget: int) -> None:
        """Change the budget, and evict the least recently used items until they fit."""
        self.settle()
        self._make_room(budget, frozenset())
        self.resize(budget)

    def content(self, number: int) -> Tensor:
        """Return an item's bytes: its own memory if it is resident, else a copy. Moves nothing."""
        item = self.items[number]
        if item.where in (Where.ARRIVING, Where.LEAVING):
            self._wait(lambda: item.where in (Where.HERE, Where.ABSENT))
        if item.where is Where.HERE:
            return item.region.tensor
        copy = item.region.another()
        if item.written:
            self._store.read(number, copy.view)
            self.traffic.read += item.num_bytes
        return copy.tensor

    def close(self) -> None:
        """End the transfers under way."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for mover in self._movers:
            mover.join()
        self._store.close()

    # -- implementation

    def _use(self, item: Item) -> None:
        self._clock += 1
        item.used = self._clock

    def _make_room(self, num_bytes: int, keep: frozenset[int]) -> None:
        """Evict the least recently used items until no more than these bytes are taken."""
        others = sorted(
            (one.used, number)
            for number, one in enumerate(self.items)
            if one.where is Where.HERE and not one.pinned and number not in keep
        )
        for _, number in others:
            if self._resident <= num_bytes:
                return
            self.release(number)
            self._wait(lambda number=number: self.items[number].where is Where.ABSENT)  # type: ignore[misc]

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._state:
            if self._error is not None:
                raise self._error
            yield

    def _wait(self, over: Callable[[], bool]) -> None:
        began = time.perf_counter()
        with self._state:
            self._state.wait_for(lambda: over() or self._error is not None)
            if self._error is not None:
                raise self._error
        self.traffic.waited += time.perf_counter() - began

    def _has_room(self, item: Item) -> bool:
        return self._resident + item.num_bytes <= self.budget

    def _take(self, item: Item) -> None:
        self._resident += item.num_bytes
        self._spare.hand_to(item.region)
        self._spare.shrink_to(max(0, self.budget - self._resident))
        self.traffic.peak = max(self.traffic.peak, self._resident)

    def _leave(self, item: Item) -> None:
        self._spare.add(item.region)
        item.changed = False
        self._resident -= item.num_bytes
        if item.where is not Where.ARRIVING:  # it may have been fetched again
            item.where = Where.ABSENT

    def _work(self, where: Where) -> None:
        """Run a mover thread: load arriving items, or write leaving ones, one after the other."""
        try:
            while self._move_next(where):
                pass
        except Exception as error:
            with self._state:
                self._error = error
                self._state.notify_all()

    def _move_next(self, where: Where) -> bool:
        """Wait for an item to move, and move it; return False once the tiers are closed."""
        queue = self._queues[where]
        with self._state:
            self._state.wait_for(lambda: self._closed or self._may_begin(where))
            if self._closed:
                return False
            number = queue[0]
            if where is Where.ARRIVING:
                self._take(self.items[number])
        (self._bring if where is Where.ARRIVING else self._take_away)(number)
        with self._state:
            queue.popleft()
            if where is Where.ARRIVING:
                self.items[number].where = Where.HERE
            else:
                self._leave(self.items[number])
            self._state.notify_all()
        return True

    def _may_begin(self, where: Where) -> bool:
        queue = self._queues[where]
        if not queue:
            return False
        # an item that is still to be written is not read before that
        return where is Where.LEAVING or (
            queue[0] not in self._queues[Where.LEAVING] and self._has_room(self.items[queue[0]])
        )

    def _bring(self, number: int) -> None:
        item = self.items[number]
        if item.written:
            self._store.read(number, item.region.view)
            self.traffic.read += item.num_bytes
        else:
            item.region.clear()

    def _take_away(self, number: int) -> None:
        item = self.items[number]
        while not all(hold.is_done() for hold in item.holds) and not self._closed:
            time.sleep(_LOOKS_S)
        item.holds.clear()
        if not item.changed:
            return
        self._store.write(number, item.region.view)
        item.written = True
        self.traffic.written += item.num_bytes
