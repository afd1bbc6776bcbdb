"""Connect ranks with their engines in the simulator: hosts that update weights, items of state that
are fetched and released, activations that are offloaded. The engines are in copy_engines.py and
shared_items.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import PER_ITEM, Kind
from hybridpar.schedules.passes.residency import Residency
from hybridpar.schedules.passes.segments import PartCounts
from hybridpar.schedules.passes.shared_items import ReplicaEngines, SharedItems
from hybridpar.schedules.simulate.collectives import Collectives
from hybridpar.schedules.simulate.copy_engines import BusyHost, CopyEngines, HostEngines
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.shared_cores import Cores
from hybridpar.schedules.simulate.simulated_rank import Rank, StuckError, Wake


def note_stall(rank: Rank, start: float, ready: float) -> float:
    """Return when the rank's next action can start, and note how long it waits for engines."""
    if ready > start:
        rank.stalls[len(rank.starts)] = ready - start
    return max(start, ready)


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
        self._hosts: dict[int, HostEngines | BusyHost] = {}
        for rank in ranks:
            if not any(action.kind is Kind.HOST for action in rank.actions):
                continue
            r = rank.index
            shares = _group_shares(costs, parts[r], r)
            if cores is None or not costs.host_works:
                to_host, host, from_host = times[r]
                self._hosts[r] = HostEngines(to_host, host, from_host, shares)
            else:
                self._hosts[r] = BusyHost(cores, times[r], shares, partial(self._arrived, rank))

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
        """A group of the weights that a busy host makes has arrived."""
        host = self._hosts[rank.index]
        assert isinstance(host, BusyHost)
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


class OffloadedActivations:
    """The engines of all ranks that offload and reload activations: one for each direction, which
    moves one micro-batch after the other.
    """

    def __init__(self, ranks: Sequence[Rank], costs: Costs):
        p = len(ranks)
        self._takes = {
            Kind.OFFLOAD: expand(costs.offload, p),
            Kind.RELOAD: expand(costs.reload, p),
        }
        self._free = {(kind, rank): 0.0 for kind in self._takes for rank in range(p)}
        # when the last move of a micro-batch of a stage is over
        self._over: dict[tuple[int, int], float] = {}

    def ready(self, rank: Rank, action: Action, start: float) -> float:
        """Dependency of EVICT and of actions that read activations: no move of them is under
        way.
        """
        return note_stall(rank, start, self._over.get((action.stage, action.microbatch), 0.0))

    def move(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of OFFLOAD and RELOAD: the copy starts."""
        engine = action.kind, rank.index
        over = max(rank.clock, self._free[engine]) + self._takes[action.kind][rank.index]
        self._free[engine] = self._over[action.stage, action.microbatch] = over
        rank.ends[step] = over


class MovedItems:
    """The engines of all ranks that fetch and release items of their state, or gather and reduce
    items that replicas shard. A rank may have both kinds.
    """

    def __init__(
        self,
        num_ranks: int,
        costs: Costs,
        residency: Mapping[int, Residency | SharedItems],
    ):
        self._num_ranks = num_ranks
        self._costs = costs
        self._tiers: dict[int, CopyEngines] = {}
        self._engines: dict[int, list[CopyEngines | ReplicaEngines]] = {
            rank: [] for rank in range(num_ranks)
        }
        for rank, items in residency.items():
            tiers = items.tiers if isinstance(items, SharedItems) else items
            if tiers is not None:
                self._tiers[rank] = CopyEngines(tiers, *self._times(costs, rank))
                self._engines[rank].append(self._tiers[rank])
            if isinstance(items, SharedItems):
                times = self._times(costs.shared or costs, rank)
                self._engines[rank].append(ReplicaEngines(items, *times))

    def __bool__(self) -> bool:
        return any(self._engines.values())

    def ready(self, rank: Rank, action: Action, start: float) -> float:
        """Dependency of actions that access or move items: all items that they need are
        resident.
        """
        times = (engine.ready(action) for engine in self._engines[rank.index])
        return note_stall(rank, start, max(times, default=start))

    def follow(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of actions that access or move items: a move starts, and created items are in the
        fast tier.

        Raises:
            StuckError: The action cannot run with the resident items.
        """
        start = end = rank.clock
        for engine in self._engines[rank.index]:
            fault, *span = engine.follow(action, rank.clock)
            if fault:
                raise StuckError({rank.index: (step, fault)})
            start, end = max((start, end), tuple(span), key=lambda times: times[1])
        if action.kind is Kind.HOST and (tiers := self._tiers.get(rank.index)) is not None:
            tiers.hold(action, rank.ends[step])
        if action.kind in PER_ITEM and self._engines[rank.index]:
            rank.ends[step] = end
            if start > rank.clock:
                rank.stalls[step] = start - rank.clock

    def durations(self, kind: Kind, homes: Sequence[int]) -> list[Sequence[float]]:
        """Return the rank's own time that a move takes, by stage and item. homes: ranks of the
        stages."""
        each = [[engine.work(kind) for engine in self._engines[rank]] for rank in homes]
        return [list(map(sum, zip_longest(*work, fillvalue=0.0))) or [0.0] for work in each]

    def _times(self, costs: Costs, rank: int) -> tuple[float, float, dict[Kind, float]]:
        """Return a rank's times to fetch and to release a MiB, and of its calls."""
        p = self._num_ranks
        calls = {kind: expand(cost, p)[rank] for kind, cost in costs.calls.items()}
        return expand(costs.fetch, p)[rank], expand(costs.release, p)[rank], calls
