"""Send window: the number of sends of a rank that may be unfinished, each of which keeps its
tensor.

After one more send the rank waits for its oldest one. A send finishes once its receive is posted,
so a window that is too narrow for a plan is a deadlock; the simulator finds the width that a plan
needs (`simulator.fitting_send_window`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.simulate.simulated_rank import Rank, Wake
from hybridpar.schedules.simulate.transfers import Channel


def min_send_window(num_ranks: int) -> int:
    """Return the number of unfinished sends that a rank may have with every plan.

    After that many later sends, a neighbour that keeps step has received the oldest one, so waiting
    for it takes no time. A plan whose ranks run further ahead needs a wider window.
    """
    return 2 * num_ranks


class SendWindow:
    """The send windows of all simulated ranks, which have one width.

    `outgoing`: by kind and stage, the channel that a send uses. `wake(rank, waited_for)`: continues
    a rank that waits.
    """

    def __init__(
        self, ranks: Sequence[Rank], outgoing: Mapping[Kind, Sequence[Channel | None]], wake: Wake
    ):
        self.width = min_send_window(len(ranks))
        self._outgoing = outgoing
        self._wake = wake
        self._ranks = ranks
        # by rank, from the oldest on: the channel, and the number of the transfer there
        self._unfinished = [deque[tuple[Channel, int]]() for _ in ranks]

    def oldest_send_finished(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of every action: no more sends are unfinished than the window allows."""
        unfinished = self._unfinished[rank.index]
        while len(unfinished) > self.width:
            channel, number = unfinished[0]
            if number >= len(channel.arrivals):
                rank.waits_for = unfinished
                return None
            unfinished.popleft()
            rank.clock = max(rank.clock, channel.arrivals[number])
        return max(start, rank.clock)

    def note_send(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of SEND, before its transfer is issued: one more send is unfinished."""
        channel = self._outgoing[action.kind][action.stage]
        assert channel is not None, f"{action} has no stage to send to"
        self._unfinished[rank.index].append((channel, channel.num_sent))

    def arrived(self, sender: Rank) -> None:
        """Continue a rank that waits for its oldest send; another one of its sends has arrived."""
        self._wake(sender, self._unfinished[sender.index])

    def widen(self) -> bool:
        """Widen all windows by one send if a rank waits for its oldest one, and return whether."""
        waiting = [rank for rank in self._ranks if rank.waits_for is self._unfinished[rank.index]]
        if not waiting:
            return False
        self.width += 1
        for rank in waiting:
            self._wake(rank, self._unfinished[rank.index])
        return True
