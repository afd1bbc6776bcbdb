"""Simulates ranks that compute nothing while they communicate, as the code of PipeDream-2BW's paper
does. hybridpar's ranks overlap the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.kinds import ACTION_SPECS, Kind
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulated_rank import Dependency, Effect, Rank
from hybridpar.schedules.simulate.simulator import Simulation
from hybridpar.schedules.simulate.transfers import Channel


@dataclass(slots=True)
class Exchange:
    """Consecutive transfers of a rank with the neighbour on one side, or a REDUCE (side 0).

    Attributes:
        transfers: The channel of each transfer, and its number there.
        reduction: The REDUCE.
    """

    side: int
    transfers: list[tuple[Channel, int]] = field(default_factory=list)
    reduction: Action | None = None


class BlockingSimulation(Simulation):
    """A simulation in which the action after an exchange waits for the end of all its transfers."""

    def __init__(self, plan: Plan, costs: Costs):
        self._exchanges: dict[int, Exchange] = {}  # the newest, by rank
        super().__init__(plan, costs)

    def dependencies(self, kind: Kind) -> tuple[Dependency, ...]:
        return (self._exchanged, *super().dependencies(kind))

    def effects(self, kind: Kind) -> tuple[Effect, ...]:
        found = super().effects(kind)
        if ACTION_SPECS[kind].peer_offset or kind is Kind.REDUCE:
            return (self._join, *found)
        return found

    def arrived(self, channel: Channel) -> None:
        super().arrived(channel)
        self.wake(channel.sender, channel)

    def _exchanged(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of every action: the exchange is complete, unless the action continues it."""
        exchange = self._exchanges.get(rank.index)
        side = ACTION_SPECS[action.kind].peer_offset
        if exchange is None or (side and side == exchange.side):
            return start
        for channel, number in exchange.transfers:
            if number >= len(channel.arrivals):
                rank.waits_for = channel
                return None
            start = max(start, channel.arrivals[number])
        if exchange.reduction is not None:
            over = self.collectives.reduced(rank, exchange.reduction, start)
            if over is None:
                return None
            start = over
        rank.clock = start
        del self._exchanges[rank.index]
        return start

    def _join(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of SEND, RECV and REDUCE: start an exchange, or continue it."""
        row = ACTION_SPECS[action.kind]
        exchange = self._exchanges.setdefault(rank.index, Exchange(row.peer_offset))
        if action.kind is Kind.REDUCE:
            exchange.reduction = action
            return
        channels = self.transfers.outgoing if row.matching_recv else self.transfers.incoming
        channel = channels[action.kind][action.stage]
        assert channel is not None, f"{action} has no neighbour"
        number = channel.num_sent if row.matching_recv else channel.num_posted
        exchange.transfers.append((channel, number))
