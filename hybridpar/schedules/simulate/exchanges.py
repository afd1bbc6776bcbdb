"""Exchanges of simulated ranks that compute nothing while they communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.simulate.simulated_rank import Rank, Wake


@dataclass(slots=True, eq=False)
class Exchange:
    """Transfers of a rank with the neighbour on one side, or its REDUCE (side 0)."""

    side: int
    left: int = 0  # that are not over
    over: float = 0.0


class Exchanges:
    """The newest exchange of each rank: consecutive transfers with one neighbour are one, and the
    next action waits for its end."""

    def __init__(self, ranks: Sequence[Rank], wake: Wake):
        self._current: list[Exchange | None] = [None for _ in ranks]
        self._wake = wake

    def finished(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of every action: the exchange is complete, unless the action continues it."""
        exchange = self._current[rank.index]
        if exchange is None:
            return start
        side = ACTION_SPECS[action.kind].peer_offset
        if side and side == exchange.side:
            return start
        if exchange.left:
            rank.waits_for = exchange
            return None
        rank.clock = max(rank.clock, exchange.over)
        self._current[rank.index] = None
        return max(start, rank.clock)

    def join(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of SEND, RECV and REDUCE: start an exchange, or continue it."""
        exchange = self._current[rank.index]
        if exchange is None:
            exchange = self._current[rank.index] = Exchange(ACTION_SPECS[action.kind].peer_offset)
        exchange.left += 1

    def complete(self, rank: Rank, when: float) -> None:
        """Note that one of the rank's transfers, or its REDUCE, is complete."""
        exchange = self._current[rank.index]
        if exchange is None:
            return
        exchange.left -= 1
        exchange.over = max(exchange.over, when)
        if not exchange.left:
            self._wake(rank, exchange)
