"""Transfers between simulated ranks: flows one way between two neighbours, in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.network import Route, Wires
from hybridpar.schedules.simulate.shared_cores import Cores
from hybridpar.schedules.simulate.simulated_rank import Rank


@dataclass(slots=True, eq=False)
class Queue:
    """Incomplete transfers that one rank has issued: channel, and step of the rank."""

    pending: deque[tuple[Channel, int]] = field(default_factory=deque)
    free: float = 0.0  # when the last one was over


@dataclass(slots=True, eq=False)
class Channel:
    """A flow one way between two neighbours, in order: the i-th send meets the i-th receive."""

    sender: Rank
    receiver: Rank
    sends: Queue
    receives: Queue
    work: float
    transfer: float
    latency: float
    route: Route | None = None
    num_sent: int = 0
    num_posted: int = 0
    num_used: int = 0
    under_way: bool = False
    arrivals: list[float] = field(default_factory=list)


class Transfers:
    """All channels, each with the order in which its ends have issued transfers.

    Args:
        costs: Durations. Shared cores or links decide how long transfers take.
        arrived: Called with the channel at each arrival.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        shape: PipelineShape,
        homes: Sequence[int],
        costs: Costs,
        arrived: Callable[[Channel], None],
    ):
        self.ranks = ranks
        self.shape = shape
        self.homes = homes
        self.costs = costs
        self.arrived = arrived
        self.cores = None if costs.cores is None else Cores(costs.cores)
        self.wires = None if costs.network is None else Wires(costs.network.bandwidth)
        assert self.cores is None or self.wires is None, "cores or links are shared, not both"
        # by flow: the channels into and out of each stage
        channels = {flow: self._channels(flow) for flow in (1, -1)}
        leaving = {1: [*channels[1][1:], None], -1: [None, *channels[-1][:-1]]}
        self.incoming = {kind: channels[row.flow] for kind, row in ACTION_SPECS.items() if row.flow}
        self.outgoing = {
            kind: leaving[row.flow] for kind, row in ACTION_SPECS.items() if row.matching_recv
        }

    def _channels(self, flow: int) -> list[Channel | None]:
        """Return the channel in this direction into each stage; None at the first stage, or if the
        rank hands over to itself.
        """
        costs = self.costs
        shape = self.shape
        links = self.shape.num_links
        # one for what a rank sends and receives, on a V of each turn
        queues = defaultdict[tuple[int, int], Queue](Queue)
        one_way = costs.transfer if flow > 0 or costs.transfer_back is None else costs.transfer_back
        work, transfer, latency = (
            expand(c, links) for c in (costs.transfer_work, one_way, costs.latency)
        )
        network = costs.network
        routes = [] if network is None else network.forward if flow > 0 else network.backward
        assert not network or len(routes) == links, f"{len(routes)} routes for {links} links"

        # by sender, receiver and turn: transfers of one channel are in order
        found: dict[tuple[int, int, int], Channel] = {}

        def channel(stage: int, receiver: int) -> Channel | None:
            sender = shape.peer(stage, -flow)
            link = shape.link(stage, -flow)
            if sender is None or link is None or not shape.carries(flow, stage, -flow):
                return None
            turn = shape.turn(stage)
            ends = Queue(), Queue()
            if costs.serial_links:
                ends = queues[sender, turn], queues[receiver, turn]
            return found.setdefault(
                (sender, receiver, turn),
                Channel(
                    self.ranks[sender],
                    self.ranks[receiver],
                    *ends,
                    work[link],
                    transfer[link],
                    routes[link].latency if routes else latency[link],
                    routes[link] if routes else None,
                ),
            )

        return [channel(stage, receiver) for stage, receiver in enumerate(self.homes)]

    def received(self, rank: Rank, action: Action, start: float) -> float | None:
        """Dependency of F, B and I: the neighbour's transfer has arrived."""
        channel = self.incoming[action.kind][action.stage]
        if channel is None:
            return start
        if channel.num_used == len(channel.arrivals):
            rank.waits_for = channel
            return None
        arrival = channel.arrivals[channel.num_used]
        channel.num_used += 1
        return max(start, arrival)

    def send(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of SEND: issue its transfer."""
        channel = self.outgoing[action.kind][action.stage]
        assert channel is not None, f"{action} has no stage to send to"
        channel.num_sent += 1
        channel.sends.pending.append((channel, step))
        self._transfer(channel)

    def post(self, rank: Rank, action: Action, step: int) -> None:
        """Effect of RECV: post it."""
        channel = self.incoming[action.kind][action.stage]
        assert channel is not None, f"{action} has no stage to receive from"
        channel.num_posted += 1
        channel.receives.pending.append((channel, step))
        self._transfer(channel)

    def _transfer(self, channel: Channel) -> None:
        """Run the channel's next transfer if it is first at both ends, and those it blocked."""
        freed = [channel]
        while freed:
            channel = freed.pop()
            sends = channel.sends
            receives = channel.receives
            if not sends.pending or not receives.pending or channel.under_way:
                continue
            (first, sent), (other, posted) = sends.pending[0], receives.pending[0]
            if first is not channel or other is not channel:
                continue
            known = channel.receiver.returns[posted] + channel.latency  # to the sender
            start = max(channel.sender.returns[sent], known, sends.free, receives.free)
            if self.wires is not None and channel.route is not None:
                channel.under_way = True
                self.wires.add(start, channel.route.load, partial(self._worked, channel))
                continue
            if channel.work and self.cores is not None:
                channel.under_way = True
                self.cores.add(start, channel.work, partial(self._worked, channel))
                continue
            self._arrive(channel, start + channel.work)
            if sends.pending:
                freed.append(sends.pending[0][0])
            if receives.pending:
                freed.append(receives.pending[0][0])

    def _worked(self, channel: Channel, now: float) -> None:
        channel.under_way = False
        self._arrive(channel, now)
        for queue in (channel.sends, channel.receives):
            if queue.pending:
                self._transfer(queue.pending[0][0])

    def _arrive(self, channel: Channel, start: float) -> None:
        """Let the channel's first transfer occupy the link from `start` on."""
        sender = channel.sender
        receiver = channel.receiver
        (_, sent), (_, posted) = channel.sends.pending.popleft(), channel.receives.pending.popleft()
        channel.sends.free = channel.receives.free = over = start + channel.transfer * (
            channel.route is None
        )
        sender.ends[sent] = receiver.ends[posted] = arrival = over + channel.latency
        channel.arrivals.append(arrival)
        self.arrived(channel)
