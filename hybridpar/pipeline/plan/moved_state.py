"""What moves a rank's state beside its work, in the simulator, and which actions wait for it: hosts
that make weights, items that come and go, and what micro-batches keep. The engines are in copies.py
and shared.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hybridpar.errors import HybridparError
from hybridpar.pipeline.plan.action import Action
from hybridpar.pipeline.plan.copies import (
    BusyHost,
    CopyEngines,
    HostEngines,
    StashEngines,
    TieredReplicaEngines,
)
from hybridpar.pipeline.plan.cores import Cores
from hybridpar.pipeline.plan.costs import Costs, expand
from hybridpar.pipeline.plan.kinds import BESIDE, PER_ITEM, ROWS, Kind
from hybridpar.pipeline.plan.parts import PartCounts
from hybridpar.pipeline.plan.residency import Residency
from hybridpar.pipeline.plan.shared import ReplicaEngines, SharedItems
from hybridpar.pipeline.plan.transfers import Rank

When = Callable[[Rank, Action], float | None]
Effect = Callable[[Rank, Action, int], None]
Work = Sequence[Sequence[float]]  # by stage and micro-batch
Entry = tuple[When | None, Work, Effect | None]
Table = dict[Kind, Entry]
Engines = CopyEngines | ReplicaEngines | TieredReplicaEngines


class StuckError(HybridparError):
    """A plan cannot go on: `waiting` says, by rank, at which step and for what."""

    def __init__(self, waiting: Mapping[int, tuple[int, str]]):
        self.waiting = waiting
        rank, (step, reason) = next(iter(waiting.items()))
        super().__init__(f"{len(waiting)} ranks wait forever; rank {rank}, step {step}: {reason}")


class MovedState:
    """Engines and hosts of all ranks. homes: ranks of the stages. parts: of each rank.

    reduced(rank, batch): when its gradients are. wake(rank, host): goes on with a rank that waits
    for its host.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        homes: Sequence[int],
        costs: Costs,
        parts: Sequence[PartCounts],
        residency: Mapping[int, Residency | SharedItems],
    ):
        self.ranks = ranks
        self.homes = homes
        self.costs = costs
        self.parts = parts
        p = len(ranks)
        self.engines: dict[int, Engines] = {
            r: self._engines(r, items) for r, items in residency.items()
        }
        offload = expand(costs.offload, p)
        reload = expand(costs.reload, p)
        self.stashes = {
            r: StashEngines(*times) for r, times in enumerate(zip(offload, reload, strict=True))
        }
        self.hosts: dict[int, HostEngines | BusyHost] = {}

    def _engines(self, rank: int, items: Residency | SharedItems) -> Engines:
        def times(costs: Costs) -> tuple[float, float, dict[Kind, float]]:
            fetch, release = (
                expand(cost, len(self.ranks))[rank] for cost in (costs.fetch, costs.release)
            )
            return (
                fetch,
                release,
                {kind: expand(cost, len(self.ranks))[rank] for kind, cost in costs.calls.items()},
            )

        if isinstance(items, Residency):
            return CopyEngines(items, *times(self.costs))
        replicas = ReplicaEngines(items, *times(self.costs.shared or self.costs))
        if items.tiers is None:
            return replicas
        return TieredReplicaEngines(CopyEngines(items.tiers, *times(self.costs)), replicas)

    def add_hosts(
        self,
        table: Table,
        cores: Cores | None,
        reduced: Callable[[Rank, int], float],
        wake: Callable[[Rank, BusyHost], None],
    ) -> None:
        """Changes the entries of what hosts begin with, and of what waits for them."""
        self.cores = cores
        self.reduced = reduced
        self.wake = wake
        self.hosts = self._hosts()
        if self.hosts:
            table[Kind.NORM] = self._sending(*table[Kind.NORM])
            table[Kind.UPDATE] = self._awaiting_host(*table[Kind.UPDATE])

    def add_stashes(self, table: Table) -> None:
        """Changes the entries of what moves activations, and of what waits for them."""
        if any(action.kind is Kind.OFFLOAD for rank in self.ranks for action in rank.actions):
            table |= {
                kind: self._with_stash(kind, *table[kind])
                for kind, row in ROWS.items()
                if row.of_stash or Kind.RELOAD in row.needs
            }

    def add_items(self, table: Table) -> None:
        """Changes the entries of what moves items, and of what touches them."""
        if self.engines:
            table |= {kind: self._with_items(kind, *entry) for kind, entry in table.items()}

    def _hosts(self) -> dict[int, HostEngines | BusyHost]:
        """The hosts of the ranks that have one."""
        p = len(self.ranks)
        costs = self.costs
        times = list(
            zip(
                expand(costs.to_host, p),
                expand(costs.host, p),
                expand(costs.from_host, p),
                strict=True,
            )
        )

        def host(rank: Rank) -> HostEngines | BusyHost:
            own = times[rank.index]
            shares = self._shares(rank.index)
            if self.cores is None or not costs.host_works:
                return HostEngines(*own, shares)
            return BusyHost(self.cores, own, shares, partial(self._host_arrived, rank))

        return {
            rank.index: host(rank)
            for rank in self.ranks
            if any(action.kind is Kind.HOST for action in rank.actions)
        }

    def _shares(self, rank: int) -> Sequence[float]:
        """Of the groups of a rank's weights; there is an UPDATE for each, or one for all."""
        shares = self.costs.host_shares[rank] if self.costs.host_shares else ()
        number = self.parts[rank].count(Kind.UPDATE, rank)
        return (sum(shares) or 1.0,) if number == 1 else shares or [1.0] * number

    def _sending(self, when: When | None, work: Work, effect: Effect | None) -> Entry:
        """The table's entry of NORM where gradients then leave for the host."""

        def effect_then_send(rank: Rank, action: Action, step: int) -> None:
            if effect is not None:
                effect(rank, action, step)
            if action.part == 0 and rank.index in self.hosts:
                reduced = self.reduced(rank, action.microbatch)
                self.hosts[rank.index].send(max(rank.clock, reduced))

        return when, work, effect_then_send

    def _awaiting_host(self, when: When | None, work: Work, effect: Effect | None) -> Entry:
        """The table's entry of UPDATE where the host makes the weights."""

        def when_made(rank: Rank, action: Action) -> float | None:
            start = rank.clock if when is None else when(rank, action)
            if start is None or (host := self.hosts.get(rank.index)) is None:
                return start
            if (made := host.ready(action.part)) is None:
                assert isinstance(host, BusyHost)
                rank.waits_for = host
                return None
            return max(start, made)

        return when_made, work, effect

    def _with_stash(
        self, kind: Kind, when: When | None, work: Work, effect: Effect | None
    ) -> Entry:
        """The table's entry of a kind that moves what micro-batches keep, or needs it."""

        def begin(rank: Rank, action: Action, step: int) -> None:
            rank.ends[step] = self.stashes[rank.index].start(action, rank.clock)

        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            return when, work, begin
        return self._once_ready(when, self.stashes), work, effect

    @staticmethod
    def _once_ready(when: When | None, engines: Mapping[int, StashEngines | Engines]) -> When:
        """When an action can start that also waits for what its rank's engines, if it has any,
        bring."""

        def when_ready(rank: Rank, action: Action) -> float | None:
            start = rank.clock if when is None else when(rank, action)
            if start is None or rank.index not in engines:
                return start
            ready = engines[rank.index].ready(action)
            if ready > start:
                rank.stalls[len(rank.starts)] = ready - start
            return max(start, ready)

        return when_ready

    def _with_items(
        self, kind: Kind, when: When | None, work: Work, effect: Effect | None
    ) -> Entry:
        """The table's entry of a kind that touches or moves items."""

        def follow(rank: Rank, action: Action, step: int) -> None:
            if effect is not None:
                effect(rank, action, step)
            if (engines := self.engines.get(rank.index)) is None:
                return
            fault, start, end = engines.follow(action, rank.clock)
            if fault:
                raise StuckError({rank.index: (step, fault)})
            if kind in PER_ITEM:
                rank.ends[step] = end
                if start > rank.clock:
                    rank.stalls[step] = start - rank.clock

        if kind in PER_ITEM:
            works = [
                self.engines[r].work(kind) if r in self.engines else [0.0]
                for r in range(len(self.ranks))
            ]
            return (
                self._once_ready(when, self.engines),
                [works[rank] for rank in self.homes],
                follow,
            )
        if kind in BESIDE - {Kind.NORM}:
            return when, work, effect
        return self._once_ready(when, self.engines), work, follow

    def begin(self, rank: Rank, action: Action, step: int) -> None:
        rank.host_step = step
        rank.ends[step] = self.hosts[rank.index].begin(rank.clock)

    def _host_arrived(self, rank: Rank, now: float) -> None:
        """A group of the weights that the host makes has arrived."""
        host = self.hosts[rank.index]
        assert isinstance(host, BusyHost)
        if host.is_done:
            rank.ends[rank.host_step] = now
        self.wake(rank, host)
