"""Hosts that update weights, in the simulator: gradients leave by one engine and new weights arrive
by the other, group by group.

    rank         F B NORM0 F  HOST0 B F B  ..                  UPDATE0 F8   UPDATE0.1 F8.1
    to host           |-- 0 --||-- 1 --|
    host                      |---- 0 ----||---- 1 ----|
    from host                              |- 0 -|      |- 1 -|
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.passes.segments import PartCounts
from hybridpar.schedules.simulate.collectives import Collectives
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.shared_cores import Cores
from hybridpar.schedules.simulate.simulated_rank import Rank, Wake


class HostEngines:
    """The host of a rank, and the engines to and from it.

    Gradients overwrite the same group of the previous batch, once the host has read it; the host
    starts a batch when `begin` is called.

    Args:
        times: Time to copy the gradients of all groups, of their update, and to copy the weights.
        shares: Relative size of each group.
        cores: Cores that copies and updates share with ranks; None: they share none.
        arrived: Called when a group of the weights has arrived.
    """

    def __init__(
        self,
        times: Sequence[float],
        shares: Sequence[float],
        cores: Cores | None = None,
        arrived: Callable[[float], None] = lambda now: None,
    ):
        total = sum(shares)
        self._cores = cores
        self._notify = arrived
        self._times = [[time * share / total for share in shares] for time in times]
        # by row: groups, and when they may begin
        self._queues: list[deque[tuple[int, float]]] = [deque() for _ in times]
        self._running = [False for _ in times]
        self._free = [0.0 for _ in times]
        # by row and group: batches that are done, and when the newest was
        self._num_done = [[0] * len(shares) for _ in times]
        self._done = [[0.0] * len(shares) for _ in times]
        self._begun = [0] * len(shares)

    def send(self, now: float, groups: Sequence[int] | None = None) -> None:
        """Send the gradients of groups (None: all) of a batch."""
        self._enqueue(self._queues[:1], now, groups)

    def begin(self, now: float, groups: Sequence[int] | None = None) -> float:
        """Let the host use the gradients of groups (None: all); return the time at which their new
        weights have arrived, or, with shared cores, a time before which they have not.
        """
        for group in self._chosen(groups):
            self._begun[group] += 1
        self._enqueue(self._queues[1:], now, groups)
        return max(now, self._free[-1])

    def ready(self, group: int) -> float | None:
        """Return the time at which a group of the weights has arrived; None if it is not known."""
        return self._done[-1][group] if self._num_done[-1][group] == self._begun[group] else None

    @property
    def is_done(self) -> bool:
        """Whether all groups that were started have arrived."""
        return self._num_done[-1] == self._begun

    def _chosen(self, groups: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._begun)) if groups is None else groups

    def _enqueue(
        self, queues: Sequence[deque[tuple[int, float]]], now: float, groups: Sequence[int] | None
    ) -> None:
        for queue in queues:
            queue.extend((group, now) for group in self._chosen(groups))
        self._start()

    def _start(self) -> None:
        """Start what may begin. Without cores it is over at once, and then others may begin."""
        has_started = True
        while has_started:
            has_started = False
            for row, queue in enumerate(self._queues):
                while queue and not self._running[row] and self._may_begin(row, queue[0][0]):
                    self._run(row, *queue.popleft())
                    has_started = True

    def _run(self, row: int, group: int, earliest: float) -> None:
        # gradients need the buffer of the previous batch, which the host must have read
        needed = self._done[row - 1 if row else 1][group]
        start = max(earliest, self._free[row], needed)
        takes = self._times[row][group]
        if self._cores is None:
            self._complete(row, group, start + takes)
        else:
            self._running[row] = True
            self._cores.add(start, takes, partial(self._finish, row, group))

    def _may_begin(self, row: int, group: int) -> bool:
        """Return whether what a group waits for is done."""
        done = [counts[group] for counts in self._num_done]
        return done[0] == done[1] if row == 0 else done[row - 1] > done[row]

    def _finish(self, row: int, group: int, now: float) -> None:
        self._running[row] = False
        self._complete(row, group, now)
        self._start()

    def _complete(self, row: int, group: int, now: float) -> None:
        self._free[row] = self._done[row][group] = now
        self._num_done[row][group] += 1
        if row == len(self._queues) - 1:
            self._notify(now)


class Hosts:
    """The hosts of the ranks whose plan has HOST.

    Args:
        cores: The cores that hosts share with ranks; None: they share none.
        collectives: Say when gradients are reduced.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        costs: Costs,
        parts: Sequence[PartCounts],
        cores: Cores | None,
        collectives: Collectives,
        wake: Wake,
    ):
        self._collectives = collectives
        self._parts = parts
        self._wake = wake
        self._host_step = [0] * len(ranks)  # the newest HOST
        p = len(ranks)
        rows = [expand(cost, p) for cost in (costs.to_host, costs.host, costs.from_host)]
        times = list(zip(*rows, strict=True))
        self._hosts: dict[int, HostEngines] = {}
        for rank in ranks:
            if Kind.HOST not in rank.kinds:
                continue
            r = rank.index
            shares = _group_shares(costs, parts[r], r)
            self._hosts[r] = HostEngines(
                times[r], shares, cores if costs.host_works else None, partial(self._arrived, rank)
            )

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def weights_made(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of UPDATE: its group of the new weights has arrived."""
        host = self._hosts.get(rank.index)
        if host is None:
            return start
        made = host.ready(action.part)
        if made is None:
            rank.waits_for = host
            return None
        return max(start, made)

    def send_gradients(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of NORM: reduced gradients leave for the host."""
        host = self._hosts.get(rank.index)
        if action.part == 0 and host is not None and not self._comes_in_parts(rank):
            reduced = self._collectives.reduction_end(rank, action.microbatch)
            host.send(max(rank.clock, reduced))

    def begin(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of HOST: the host begins to make the new weights, or one group of them."""
        host = self._hosts[rank.index]
        self._host_step[rank.index] = step
        groups = [action.part] if self._comes_in_parts(rank) else None
        if groups:
            host.send(rank.clock, groups)
        rank.ends[step] = host.begin(rank.clock, groups)

    def _comes_in_parts(self, rank: Rank) -> bool:
        return self._parts[rank.index].count(Kind.HOST, rank.index) > 1

    def _arrived(self, rank: Rank, now: float) -> None:
        """A group of the weights has arrived."""
        host = self._hosts[rank.index]
        if host.is_done:
            rank.ends[self._host_step[rank.index]] = now
        self._wake(rank, host)


def _group_shares(costs: Costs, parts: PartCounts, rank: int) -> Sequence[float]:
    """Return the shares of the groups of a rank's weights; there is an UPDATE for each, or one for
    all."""
    shares = costs.host_shares[rank] if costs.host_shares else ()
    number = parts.count(Kind.UPDATE, rank)
    if number == 1:
        return (sum(shares) or 1.0,)
    return shares or [1.0] * number
