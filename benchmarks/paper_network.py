"""How long a plan takes on a cluster whose transfers share links: an event-driven simulation in order of time.

In `pipeline.plan.simulate` a transfer takes the same time whatever else is under way. On a cluster, the replicas of a
stage, and the stages of a server, meet at the server's network card. Here a transfer lasts as long as its bytes take at
the rate it gets, which changes whenever another one on its links starts or ends:

    rate of a transfer (share of it done in a second) = smallest, over the links it crosses, of
        bandwidth of the link / bytes of all transfers now on it

so equal messages share a link equally, and the messages of all replicas of a stage, which run in step, are one
transfer. All else is as in `simulate`: with links of its own for every transfer, both give the same times.

`blocking` is what Megatron-LM of 2021 and PipeDream-2BW's code do: a rank computes nothing while it communicates.
Transfers with one neighbour that follow each other in the plan run together, as one exchange, and the rank waits for
it, and for its REDUCE.
Plans for that post receives right before their use (`make_plan(..., ahead=0)`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridpar.pipeline.plan.action import Action, Plan
from hybridpar.pipeline.plan.kinds import ROWS, Kind
from hybridpar.pipeline.plan.simulate import Costs, StuckError
from hybridpar.pipeline.plan.timeline import Timeline
from hybridpar.planner.hardware import Cluster

_TRANSFERS = {kind: (row.met_by is not None, row.side) for kind, row in ROWS.items() if row.side}
"""By kind: whether this rank sends, and where the neighbour is."""


@dataclass(frozen=True, slots=True)
class Route:
    """What one transfer puts on each link that it crosses, in bytes, and its latency."""

    load: Mapping[Hashable, float]
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """Bytes a second of each link, and the routes from a stage to the next (`forward[r]`: r to r+1) and back.

    `blocking`: ranks do nothing else while they communicate.
    """

    bandwidth: Mapping[Hashable, float]
    forward: Sequence[Route]
    backward: Sequence[Route]
    blocking: bool = False


def pipeline_network(
    cluster: Cluster, stages: Sequence[Sequence[int]], message_bytes: float, *, blocking: bool = False,
    half_duplex: bool = False,
) -> Network:
    """The network of a pipeline: `stages[r][i]` is the device of stage r in replica i, which sends one message of
    `message_bytes` to `stages[r + 1][i]`.

    Devices of one server have a link of their own to each other. Everything that leaves a server, and everything that
    enters it, shares its `outer` links; `half_duplex`: both directions share them.
    """
    inner, outer = cluster.inner, cluster.outer
    own = (inner.pair_bandwidth or inner.bandwidth) * inner.share
    card = outer.bandwidth * outer.share * cluster.outer_links
    bandwidth: dict[Hashable, float] = {}
    routes: dict[int, list[Route]] = {1: [], -1: []}
    for r in range(len(stages) - 1):
        for step, sources, targets in ((1, stages[r], stages[r + 1]), (-1, stages[r + 1], stages[r])):
            load: dict[Hashable, float] = {}
            crosses = False
            for source, target in zip(sources, targets, strict=True):
                left, entered = cluster.server(source), cluster.server(target)
                keys: list[Hashable] = [("inner", source, target)]
                if left != entered:
                    crosses = True
                    keys = [(left, "card"), (entered, "card")] if half_duplex else [(left, "out"), (entered, "in")]
                for key in keys:
                    bandwidth[key] = card if left != entered else own
                    load[key] = load.get(key, 0.0) + message_bytes
            routes[step].append(Route(load, outer.latency if crosses else inner.latency))
    return Network(bandwidth, routes[1], routes[-1], blocking)


def simulate_on(network: Network, plan: Plan, costs: Costs) -> Timeline:
    """Runs a lowered plan. Of `costs`, forward, backward, update, reduce, norm and tied count; units: seconds.

    Raises: StuckError if a rank waits for something that never comes.
    """
    machine = _Machine(network, plan, costs)
    machine.run()
    return Timeline(plan, {rank.index: rank.starts for rank in machine.ranks},
                    {rank.index: rank.ends for rank in machine.ranks}, machine.makespan())


@dataclass(slots=True, eq=False)
class _Transfer:
    """One message on its way: `left` is the share of it that is still to come."""

    route: Route
    waiting: list[tuple[_Rank, int]] = field(default_factory=list)  # both ends, and the step of each
    left: float = 1.0
    rate: float = 0.0
    end: float = math.inf


@dataclass(slots=True, eq=False)
class _Channel:
    """What flows one way between two neighbours, in order: the i-th send meets the i-th receive."""

    route: Route
    sends: deque[tuple[_Rank, int]] = field(default_factory=deque)
    receives: deque[tuple[_Rank, int]] = field(default_factory=deque)
    busy: bool = False  # a transfer at a time
    arrivals: deque[float] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective of one batch: over when `size` ranks have come."""

    size: int
    members: list[tuple[_Rank, int]] = field(default_factory=list)
    end: float | None = None


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's place in its list."""

    index: int
    actions: Sequence[Action]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: float = 0.0  # busy until then
    exchange: set[int] = field(default_factory=set)  # blocking: steps that it waits for
    normed: set[int] = field(default_factory=set)


class _Machine:
    """Ranks that are due at some time, transfers under way, and meetings."""

    def __init__(self, network: Network, plan: Plan, costs: Costs):
        p = len(plan)
        assert len(network.forward) == len(network.backward) == p - 1, f"{p} stages on another network"
        self.network, self.costs = network, costs
        self.now = self.since = 0.0  # the time, and when the rates last changed
        self.ranks = [_Rank(r, plan[r]) for r in range(p)]
        self.channels = {1: [_Channel(route) for route in network.forward],
                         -1: [_Channel(route) for route in network.backward]}
        self.durations = {
            Kind.F: costs.forward, Kind.B: costs.backward, Kind.UPDATE: costs.update, Kind.REDUCE: costs.reduce}
        self.due: list[tuple[float, int]] = [(0.0, r) for r in range(p)]
        self.active: list[tuple[_Channel, _Transfer]] = []
        self.meetings: dict[tuple[Kind, int, int], _Meeting] = {}

    def makespan(self) -> float:
        return max((max(rank.ends) for rank in self.ranks if rank.ends), default=0.0)

    def run(self) -> None:
        while self.due or self.active:
            ends = min((transfer.end for _, transfer in self.active), default=math.inf)
            self.now = min([ends, *(time for time, _ in self.due[:1])])
            if ends <= self.now:
                ended = [pair for pair in self.active if pair[1].end <= self.now]
                self._progress()
                self.active = [pair for pair in self.active if pair not in ended]
                for channel, transfer in ended:
                    self._arrive(channel, transfer)
                self._set_rates()
            while self.due and self.due[0][0] <= self.now:
                self._advance(self.ranks[heapq.heappop(self.due)[1]])
        stuck = {r.index: (len(r.starts), f"{r.actions[len(r.starts)]} waits for another rank")
                 for r in self.ranks if len(r.starts) < len(r.actions)}
        if stuck:
            raise StuckError(stuck)

    def _progress(self) -> None:
        """Brings what is left of every transfer up to date, as rates are about to change."""
        for _, transfer in self.active:
            transfer.left -= transfer.rate * (self.now - self.since)
        self.since = self.now

    def _set_rates(self) -> None:
        load: dict[Hashable, float] = {}
        for _, transfer in self.active:
            for link, num_bytes in transfer.route.load.items():
                load[link] = load.get(link, 0.0) + num_bytes
        bandwidth = self.network.bandwidth
        for _, transfer in self.active:
            transfer.rate = min(bandwidth[link] / load[link] for link in transfer.route.load)
            transfer.end = self.now + transfer.left / transfer.rate

    def _duration(self, kind: Kind, rank: _Rank) -> float:
        cost = self.durations[kind]
        return cost if isinstance(cost, int | float) else cost[rank.index]

    def _wake(self, rank: _Rank, time: float) -> None:
        heapq.heappush(self.due, (max(time, rank.free), rank.index))

    def _advance(self, rank: _Rank) -> None:
        """Runs the rank until an action takes time, or it has to wait: then what it waits for wakes it."""
        while self.now >= rank.free and len(rank.starts) < len(rank.actions):
            action = rank.actions[len(rank.starts)]
            if action.kind in _TRANSFERS:
                proceeds = self._communicate(rank, action)
            elif action.kind in (Kind.REDUCE, Kind.NORM):
                proceeds = self._meet(rank, action)
            else:
                proceeds = self._work(rank, action)
            if not proceeds:
                return

    def _take(self, rank: _Rank, duration: float) -> bool:
        rank.starts.append(self.now)
        rank.ends.append(self.now + duration)
        if duration:
            rank.free = self.now + duration
            self._wake(rank, rank.free)
        return not duration

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _channel(self, rank: _Rank, kind: Kind) -> _Channel | None:
        sends, side = _TRANSFERS[kind]
        low = min(rank.index, rank.index + side)
        towards = side if sends else -side
        return self.channels[towards][low] if 0 <= low < len(self.ranks) - 1 else None

    def _communicate(self, rank: _Rank, action: Action) -> bool:
        channel = self._channel(rank, action.kind)
        assert channel is not None, f"{action} has no other end"
        sends, side = _TRANSFERS[action.kind]
        if rank.exchange:
            before = rank.actions[len(rank.starts) - 1].kind
            if before not in _TRANSFERS or _TRANSFERS[before][1] != side:  # another neighbour: after the one under way
                return False
        step = len(rank.starts)
        self._take(rank, 0.0)
        (channel.sends if sends else channel.receives).append((rank, step))
        if self.network.blocking:
            rank.exchange.add(step)
        self._match(channel)
        return True

    def _match(self, channel: _Channel) -> None:
        if channel.sends and channel.receives and not channel.busy:
            ends = [channel.sends.popleft(), channel.receives.popleft()]
            channel.busy = True
            self._progress()
            self.active.append((channel, _Transfer(channel.route, ends)))
            self._set_rates()

    def _arrive(self, channel: _Channel, transfer: _Transfer) -> None:
        arrival = self.now + transfer.route.latency
        channel.busy = False
        channel.arrivals.append(arrival)
        for rank, step in transfer.waiting:
            self._end(rank, step, arrival)
        self._match(channel)

    def _end(self, rank: _Rank, step: int, end: float) -> None:
        """An action that went on beside the rank's own is over at `end`."""
        rank.ends[step] = end
        if step in rank.exchange:
            rank.exchange.remove(step)
            rank.free = max(rank.free, end)
        if not rank.exchange:
            self._wake(rank, end)

    # -- computation and collectives -----------------------------------------------------------------------------------

    def _work(self, rank: _Rank, action: Action) -> bool:
        if rank.exchange:
            return False
        if action.kind is Kind.UPDATE:
            meeting = (self._meeting(Kind.NORM, action.microbatch, 0, len(self.ranks))
                       if action.microbatch in rank.normed else self._reduction(rank, action.microbatch))
            if meeting.end is None or meeting.end > self.now:
                return False
            return self._take(rank, self._duration(action.kind, rank))
        channel = self._channel(rank, Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B)
        if channel is not None:
            if not channel.arrivals or channel.arrivals[0] > self.now:
                return False
            channel.arrivals.popleft()
        return self._take(rank, self._duration(action.kind, rank))

    def _reduction(self, rank: _Rank, batch: int) -> _Meeting:
        last = len(self.ranks) - 1
        tied = self.costs.tied and last > 0 and rank.index in (0, last)
        return self._meeting(Kind.REDUCE, batch, 0 if tied else rank.index, 2 if tied else 1)

    def _meeting(self, kind: Kind, batch: int, stage: int, size: int) -> _Meeting:
        return self.meetings.setdefault((kind, batch, stage), _Meeting(size))

    def _meet(self, rank: _Rank, action: Action) -> bool:
        """REDUCE ends after the last of its stages has come; NORM after all have come and ended their REDUCE."""
        if rank.exchange:
            return False
        batch, step = action.microbatch, len(rank.starts)
        if action.kind is Kind.REDUCE:
            meeting, duration = self._reduction(rank, batch), self._duration(Kind.REDUCE, rank)
            if self.network.blocking:
                rank.exchange.add(step)
        else:
            meeting, duration = self._meeting(Kind.NORM, batch, 0, len(self.ranks)), self.costs.norm
            rank.normed.add(batch)
        meeting.members.append((rank, step))
        self._take(rank, 0.0)
        if len(meeting.members) == meeting.size:  # the last one to come
            reductions = [self._reduction(r, batch).end or 0.0 for r in self.ranks] if action.kind is Kind.NORM else []
            meeting.end = max([self.now, *reductions]) + duration
            for member, at in meeting.members:
                self._end(member, at, meeting.end)
        return True
