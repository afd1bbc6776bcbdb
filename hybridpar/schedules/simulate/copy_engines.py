"""Engines that work in parallel to a rank in the simulator: two copy engines, one for each
direction, and the host.

One engine of a rank with a fast tier loads items into it, the other writes them back.

    rank         F0            F0.1                                B0
    in           |-- FETCH1 --||         FETCH0 waits .. |-- FETCH0 --|
    out                         |---- RELEASE2 ----------|

Both take their moves in the order of the list. A FETCH waits until earlier evictions have freed
enough memory, and so does an action that creates an item. Unchanged items are evicted in no time.

Offloaded activations move in the same way (moved_state.py).

With a host optimizer, gradients leave by one engine and new weights arrive by the other, group by
group:

    rank         F B NORM0 F  HOST0 B F B  ..                  UPDATE0 F8   UPDATE0.1 F8.1
    to host           |-- 0 --||-- 1 --|
    host                      |---- 0 ----||---- 1 ----|
    from host                              |- 0 -|      |- 1 -|
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.residency import FastTier, Residency
from hybridpar.schedules.passes.shared_items import MIB, NO_CALLS
from hybridpar.schedules.simulate.shared_cores import Cores


class CopyEngines:
    """The two engines of a rank, and the times from which its items are in the fast tier.

    Args:
        residency: The items.
        fetch: Time to load a MiB.
        release: Time to write back a MiB.
        calls: The rank's own time for a MiB, by kind.
    """

    def __init__(
        self,
        residency: Residency,
        fetch: float,
        release: float,
        calls: Mapping[Kind, float] = NO_CALLS,
    ):
        self._residency = residency
        self._fetch = fetch
        self._release = release
        self._calls = calls
        self._tier = FastTier(residency)
        self._arrivals: dict[int, float] = {}
        self._gone: dict[int, float] = {}  # when an item was last written back
        self._held: dict[int, float] = {}  # until when the host works on an item
        self._leaving: deque[tuple[float, int]] = (
            deque()
        )  # when that is over, and bytes, of those written last
        self._in_free = self._out_free = 0.0

    def work(self, kind: Kind) -> list[float]:
        """Return an upper bound of the rank's own time for an action of a kind, by item."""
        return [
            self._calls.get(kind, 0.0) * num_bytes / MIB for num_bytes in self._residency.num_bytes
        ]

    def ready(self, action: Action) -> float:
        """Return the time at which all items that the action accesses are resident."""
        if self._residency.moves(action):
            return 0.0
        arrivals = (self._arrivals.get(item, 0.0) for item, _ in self._residency.accesses(action))
        made = self._tier.made(action)
        room = self._tier.room_for(action)
        has_room = self._has_room(made, room) if made or room < self._tier.room else 0.0
        return max(*arrivals, has_room, 0.0)

    def follow(self, action: Action, now: float) -> tuple[str, float, float]:
        """Advance past an action; return its fault (empty if there is none) and, for a move, its
        start and end.
        """
        item = action.microbatch
        written = action.kind is Kind.RELEASE and self._tier.is_changed(action.microbatch)
        while self._leaving and self._leaving[0][0] <= now:
            self._leaving.popleft()
        if not self._residency.moves(action):
            return self._tier.follow(action), now, now
        room = self._has_room([item], self._tier.room) if action.kind is Kind.FETCH else 0.0
        if fault := self._tier.follow(action):
            return fault, now, now
        num_bytes = self._residency.num_bytes[item]
        if action.kind is Kind.FETCH:
            start = max(now, self._in_free, room)
            self._in_free = self._arrivals[item] = start + num_bytes / MIB * self._fetch
            return "", start, self._in_free
        held = self._held.pop(item, 0.0)
        if not written and held <= now:
            return "", now, now
        start = max(now, self._out_free, held)
        self._out_free = start + written * num_bytes / MIB * self._release
        self._gone[item] = self._out_free
        self._leaving.append((self._out_free, num_bytes))
        return "", start, self._out_free

    def hold(self, action: Action, until: float) -> None:
        """Keep the items that an action accesses in the fast tier until the host has used them."""
        self._held |= {item: until for item, _ in self._residency.accesses(action)}

    def _has_room(self, items: Sequence[int], room: int) -> float:
        """Return the time from which there is room for items that are not resident, when none of
        them is still leaving.
        """
        found = max((self._gone.get(item, 0.0) for item in items), default=0.0)
        excess = (
            self._tier.num_bytes
            + sum(self._residency.num_bytes[item] for item in items)
            + sum(num_bytes for _, num_bytes in self._leaving)
            - room
        )
        for over, num_bytes in self._leaving:
            if excess <= 0:
                break
            excess -= num_bytes
            found = max(found, over)
        return found


class HostEngines:
    """The host of a rank, and the engines to and from it.

    Gradients overwrite the same group of the previous batch, once the host has read it; the host
    starts a batch when `begin` is called.

    Args:
        to_host: Time to copy the gradients of all groups.
        host: Time of the update of all groups.
        from_host: Time to copy the weights of all groups.
        shares: Relative size of each group.
    """

    def __init__(self, to_host: float, host: float, from_host: float, shares: Sequence[float]):
        total = sum(shares)
        self._times = [
            (to_host * share / total, host * share / total, from_host * share / total)
            for share in shares
        ]
        self._out_free = self._host_free = self._in_free = 0.0
        self._left, self._read, self._arrived = ([0.0] * len(shares) for _ in range(3))

    def send(self, now: float, groups: Sequence[int] | None = None) -> None:
        """Send the gradients of groups (None: all) of a batch."""
        for group in range(len(self._times)) if groups is None else groups:
            takes = self._times[group][0]
            self._out_free = self._left[group] = max(now, self._out_free, self._read[group]) + takes

    def begin(self, now: float, groups: Sequence[int] | None = None) -> float:
        """Let the host use the gradients of groups (None: all); return the time at which their new
        weights have arrived.
        """
        for group in range(len(self._times)) if groups is None else groups:
            _, takes, back = self._times[group]
            self._host_free = self._read[group] = (
                max(now, self._host_free, self._left[group]) + takes
            )
            self._in_free = self._arrived[group] = max(self._host_free, self._in_free) + back
        return self._in_free

    def ready(self, group: int) -> float:
        """Return the time at which a group of the weights has arrived."""
        return self._arrived[group]


class BusyHost:
    """A host whose copies and updates use the cores that ranks compute on: each is a piece of work
    like the ranks' own.

    It has the methods of HostEngines, but its times are not known in advance: `ready` is None until
    a group has arrived, and `arrived(when)` is called then. times: of all groups, to the host, of
    the update, and back.
    """

    def __init__(
        self,
        cores: Cores,
        times: Sequence[float],
        shares: Sequence[float],
        arrived: Callable[[float], None],
    ):
        total = sum(shares)
        number = len(shares)
        self._cores = cores
        self._notify = arrived
        self._times = [[time * share / total for share in shares] for time in times]
        self._queues: list[deque[tuple[int, float]]] = [
            deque() for _ in times
        ]  # group, and when it may begin
        self._running = [False for _ in times]
        self._done = [[0] * number for _ in times]  # by row and group: batches
        self._arrived = [0.0] * number
        self._begun = [0] * number

    def send(self, now: float, groups: Sequence[int] | None = None) -> None:
        """Send the gradients of groups (None: all) of a batch."""
        chosen = range(len(self._arrived)) if groups is None else groups
        self._queues[0] += [(group, now) for group in chosen]
        self._start(now)

    def begin(self, now: float, groups: Sequence[int] | None = None) -> float:
        """Let the host use the gradients of groups (None: all); return a time before which nothing
        has arrived.
        """
        for group in range(len(self._arrived)) if groups is None else groups:
            self._begun[group] += 1
            for queue in self._queues[1:]:
                queue.append((group, now))
        self._start(now)
        return now

    def ready(self, group: int) -> float | None:
        """Return the time at which a group of the weights has arrived; None if it has not."""
        return self._arrived[group] if self._done[-1][group] == self._begun[group] else None

    @property
    def is_done(self) -> bool:
        """Whether all groups that were started have arrived."""
        return self._done[-1] == self._begun

    def _start(self, now: float) -> None:
        for row, queue in enumerate(self._queues):
            if queue and not self._running[row] and self._may_begin(row, queue[0][0]):
                group, earliest = queue.popleft()
                self._running[row] = True
                self._cores.add(
                    max(now, earliest), self._times[row][group], partial(self._over, row, group)
                )

    def _may_begin(self, row: int, group: int) -> bool:
        """Return whether a group may start. Gradients need the buffer of the previous batch, which
        the host must have read; the other rows need the previous row.
        """
        done = [counts[group] for counts in self._done]
        return done[0] == done[1] if row == 0 else done[row - 1] > done[row]

    def _over(self, row: int, group: int, now: float) -> None:
        self._running[row] = False
        self._done[row][group] += 1
        if row == len(self._queues) - 1:
            self._arrived[group] = now
            self._notify(now)
        self._start(now)
