"""Time that a plan takes: an exact event-driven simulation of its dependencies, given what each step costs.

The rules are those of the executor, so a plan that ends here cannot deadlock there:

    F, B, I   wait for their receive (F also for the gather of its weights), then take the rank's time
    W         takes the rank's time
    SEND      returns at once. A transfer starts when it was sent, the receive is posted and the one before it on
              that link is over (there is no mailbox), and takes `transfer`; it arrives `latency` later. With
              `serial_links`, all transfers of a rank on one axis, SEND_F and RECV_F, or SEND_B and RECV_B, go one by
              one in the order they were issued: so does NCCL where the axis has one communicator
    RECV      posts the receive, returns at once
    REDUCE    returns at once, ends `reduce` later; with `tied` the end stages meet in it
    NORM      returns at once, ends `norm` after the last stage has issued it and ended its REDUCE
    HOST      waits for NORM of all stages, returns at once; the host then makes the new weights (copies.py), of
              gradients that have been on their way since NORM
    UPDATE    waits for NORM of all stages (for its own REDUCE where there is no NORM) and, where there is a HOST, for
              its part of what that makes, then takes the rank's time; with sharded optimizer state the new weights are
              there `gather` later

    OFFLOAD, RELOAD return at once; what a micro-batch keeps leaves and comes back beside the rank's work (copies.py).
              EVICT waits until it has left, its backward until it is back

    FETCH, RELEASE, DROP return at once; items come and go beside the rank's work (copies.py). What touches an item
              waits until it is there. Of chunks that replicas share they are collectives

Of what is cut into parts, the part that runs first waits (every part of an F for the gather of weights that were made
before it), the one that runs last sets going what follows, and all take equal times.

Where costs have a `network`, transfers share its links (network.py), and take what that lets them, not `transfer`. With
`blocking` a rank computes nothing while it communicates: SENDs and RECVs with one neighbour that follow each other are
one exchange, and what comes next waits for it to be over, and for a REDUCE.

"At once" is after the time that its call takes (`calls`). With a number of `cores`, work takes longer while more ranks,
hosts and transfers are at work than there are cores: all of them slow down alike.

Each rank runs until it must wait for another, and is woken by what it waits for; where cores are shared, it also stops
at each piece of work until that is done. No result depends on the order in which ranks are taken, because every queue
has one writer and one reader: one run that ends is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybridpar.errors import HybridparError
from hybridpar.pipeline.plan.action import Action, Plan
from hybridpar.pipeline.plan.copies import (
    BusyHost,
    CopyEngines,
    HostEngines,
    ReplicaEngines,
    SharedItems,
    StashEngines,
)
from hybridpar.pipeline.plan.cores import Cores
from hybridpar.pipeline.plan.costs import Costs, expand
from hybridpar.pipeline.plan.kinds import BESIDE, COMPUTE, PER_ITEM, ROWS, Kind
from hybridpar.pipeline.plan.network import Route, Wires
from hybridpar.pipeline.plan.parts import PartCounts
from hybridpar.pipeline.plan.residency import Residency
from hybridpar.pipeline.plan.sizes import Sizes
from hybridpar.pipeline.plan.timeline import Timeline


class StuckError(HybridparError):
    """A plan cannot go on: `waiting` says, by rank, at which step and for what."""

    def __init__(self, waiting: Mapping[int, tuple[int, str]]):
        self.waiting = waiting
        rank, (step, reason) = next(iter(waiting.items()))
        super().__init__(f"{len(waiting)} ranks wait forever; rank {rank}, step {step}: {reason}")


def simulate(
    plan: Plan, costs: Costs | None = None, residency: Mapping[int, Residency | SharedItems] | None = None,
) -> Timeline:
    """Runs a lowered plan (`passes.make_plan`) with the given costs (default: a forward takes 1, a backward 2).

    residency: by rank, where the plan moves items, between tiers or replicas; without it moves take no time.

    Raises: StuckError if a rank waits for something that never comes.
    """
    assert sorted(plan) == list(range(len(plan))), f"ranks of a plan count from 0: {sorted(plan)}"
    machine = _Machine(plan, costs or Costs(), residency or {})
    machine.run()
    ranks = machine.ranks
    makespan = max((max(rank.ends) for rank in ranks if rank.ends), default=0.0)
    return Timeline(
        plan, {r.index: r.starts for r in ranks}, {r.index: r.ends for r in ranks}, makespan,
        {r.index: r.returns for r in ranks}, {r.index: r.stalls for r in ranks})


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's place in its list, and its clock."""

    index: int
    actions: Sequence[Action]
    starts: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    clock: float = 0.0
    waits_for: _Channel | _Meeting | BusyHost | _Exchange | None = None
    exchange: _Exchange | None = None  # blocking: what it last began to send or receive
    normed: set[int] = field(default_factory=set)  # batches whose NORM it has issued
    host_step: int = 0  # its newest HOST
    newest: int = 0  # its newest weight version, and when its replicas have gathered that
    gathered: float = 0.0


@dataclass(slots=True, eq=False)
class _Exchange:
    """Transfers of a blocking rank with the neighbour on one side, or its REDUCE (side 0)."""

    side: int
    left: int = 0  # that are not over
    over: float = 0.0


@dataclass(slots=True, eq=False)
class _Queue:
    """Transfers that one rank has issued and that are not over: channel, and step of the rank."""

    pending: deque[tuple[_Channel, int]] = field(default_factory=deque)
    free: float = 0.0  # when the last one was over


@dataclass(slots=True, eq=False)
class _Channel:
    """A flow one way between two neighbours, in order: the i-th send meets the i-th receive."""

    sender: _Rank
    receiver: _Rank
    sends: _Queue
    receives: _Queue
    work: float
    transfer: float
    latency: float
    route: Route | None = None
    num_sent: int = 0
    num_posted: int = 0
    num_used: int = 0
    under_way: bool = False
    arrivals: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective of one batch: over when `size` ranks have issued it."""

    size: int
    issued: list[tuple[_Rank, int]] = field(default_factory=list)  # who, and at which step
    ready: float = 0.0
    end: float | None = None


_When = Callable[[_Rank, Action], float | None]
_Effect = Callable[[_Rank, Action, int], None]
_Work = Sequence[Sequence[float]]  # by stage and micro-batch
_Entry = tuple[_When | None, _Work, _Effect | None]


class _Machine:
    """All ranks, and what connects them.

    The table has for each kind: when an action can start (none: when the one before has returned; it returns None and
    notes what the rank waits for if that is not known yet), by rank what it takes of its time, and what it then does.
    """

    def __init__(self, plan: Plan, costs: Costs, residency: Mapping[int, Residency | SharedItems] | None = None):
        p = len(plan)
        self.costs = costs
        self.cores = None if costs.cores is None else Cores(costs.cores)
        self.wires = None if costs.network is None else Wires(costs.network.bandwidth)
        assert self.cores is None or self.wires is None, "cores or links are shared, not both"
        self.ranks = [_Rank(r, plan[r]) for r in range(p)]
        self.sizes = Sizes.found({a.stage: r for r, actions in plan.items() for a in actions if a.kind in COMPUTE}, p)
        self.homes = [self.sizes.rank_of(stage) for stage in range(self.sizes.num_stages)]  # ranks of the stages
        channels = {flow: self._channels(flow) for flow in (1, -1)}  # by flow: what each stage receives
        self.incoming = {kind: channels[row.flow] for kind, row in ROWS.items() if row.flow}
        leaving = {1: [*channels[1][1:], None], -1: [None, *channels[-1][:-1]]}  # likewise: what each sends
        self.outgoing = {kind: leaving[row.flow] for kind, row in ROWS.items() if row.met_by}
        self.reduce, self.gather = expand(costs.reduce, p), expand(costs.gather, p)
        self.meetings: dict[tuple[Kind, int, int], _Meeting] = {}  # by kind, batch, and stage (NORM: 0)
        gathers = any(self.gather)
        when = {Kind.HOST: self._when_normed, Kind.UPDATE: self._when_normed}
        if gathers:
            when[Kind.F] = self._when_gathered
        if costs.blocking_norm:
            when[Kind.NORM] = self._when_reduced
        effect = {Kind.REDUCE: self._reduce, Kind.NORM: self._norm, Kind.HOST: self._host}
        if gathers:
            effect[Kind.UPDATE] = self._gather
        self.table: dict[Kind, _Entry] = {kind: (
            when.get(kind, self._when_arrived if row.receive else None), costs.durations(kind, self.homes),
            effect.get(kind, self._send if row.met_by else self._post if row.side else None),
        ) for kind, row in ROWS.items()}
        self.parts = [PartCounts(rank.actions) for rank in self.ranks]
        if any(self.parts):
            self.table |= {kind: self._by_part(kind, *self.table[kind]) for kind, row in ROWS.items() if row.cut}
        self.hosts = self._hosts()
        if self.hosts:
            self.table[Kind.NORM] = self._sending(*self.table[Kind.NORM])
            self.table[Kind.UPDATE] = self._awaiting_host(*self.table[Kind.UPDATE])
        fetch, release = expand(costs.fetch, p), expand(costs.release, p)
        self.engines: dict[int, CopyEngines | ReplicaEngines] = {
            r: CopyEngines(items, fetch[r], release[r]) if isinstance(items, Residency) else
            ReplicaEngines(items, fetch[r], release[r]) for r, items in (residency or {}).items()}
        offload, reload = expand(costs.offload, p), expand(costs.reload, p)
        self.stashes = [StashEngines(*times) for times in zip(offload, reload, strict=True)]
        if any(action.kind is Kind.OFFLOAD for rank in self.ranks for action in rank.actions):
            self.table |= {kind: self._with_stash(kind, *self.table[kind]) for kind, row in ROWS.items()
                           if row.of_stash or Kind.RELOAD in row.needs}
        if costs.blocking:
            self.table = {kind: self._blocking(kind, *entry) for kind, entry in self.table.items()}
        if self.engines:
            self.table = {kind: self._with_items(kind, *entry) for kind, entry in self.table.items()}
        self.runnable = deque(self.ranks)

    def _channels(self, flow: int) -> list[_Channel | None]:
        """The channel that flows that way into each stage; none where it begins, or the rank hands over to itself."""
        costs, sizes, links = self.costs, self.sizes, self.sizes.num_links
        queues = [_Queue() for _ in self.ranks]  # one for what a rank sends and receives
        one_way = costs.transfer if flow > 0 or costs.transfer_back is None else costs.transfer_back
        work, transfer, latency = (expand(c, links) for c in (costs.transfer_work, one_way, costs.latency))
        network = costs.network
        routes = [] if network is None else network.forward if flow > 0 else network.backward
        assert not network or len(routes) == links, f"{len(routes)} routes for {links} links"

        found: dict[tuple[int, int], _Channel] = {}  # by sender and receiver: what has the same ones is in one order

        def channel(stage: int, receiver: int) -> _Channel | None:
            sender, link = sizes.peer(stage, -flow), sizes.link(stage, -flow)
            if sender is None or link is None:
                return None
            ends = (queues[sender], queues[receiver]) if costs.serial_links else (_Queue(), _Queue())
            return found.setdefault((sender, receiver), _Channel(
                self.ranks[sender], self.ranks[receiver], *ends, work[link], transfer[link],
                routes[link].latency if routes else latency[link], routes[link] if routes else None))

        return [channel(stage, receiver) for stage, receiver in enumerate(self.homes)]

    def _blocking(self, kind: Kind, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry where a rank waits for its exchange before it does anything else."""
        side, joins = ROWS[kind].side, ROWS[kind].side != 0 or kind is Kind.REDUCE

        def when_over(rank: _Rank, action: Action) -> float | None:
            exchange = rank.exchange
            if exchange is not None and (not side or side != exchange.side):
                if exchange.left:
                    rank.waits_for = exchange
                    return None
                rank.clock, rank.exchange = max(rank.clock, exchange.over), None
            return rank.clock if when is None else when(rank, action)

        def join(rank: _Rank, action: Action, step: int) -> None:
            rank.exchange = rank.exchange or _Exchange(side)
            rank.exchange.left += 1
            if effect is not None:
                effect(rank, action, step)

        return when_over, work, join if joins else effect

    def _over(self, rank: _Rank, when: float) -> None:
        """One of the transfers of a blocking rank, or its REDUCE, is over."""
        if (exchange := rank.exchange) is not None:
            exchange.left -= 1
            exchange.over = max(exchange.over, when)
            if not exchange.left:
                self._wake(rank, exchange)

    def _by_part(self, kind: Kind, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry of a kind of which ranks have a part at a time."""
        counts = [self.parts[rank] for rank in self.homes]

        def when_first(rank: _Rank, action: Action) -> float | None:
            if when is not None and action.part == counts[action.stage].first(kind, action.stage):
                return when(rank, action)
            return self._gathered(rank, action, rank.clock) if when == self._when_gathered else rank.clock

        def effect_last(rank: _Rank, action: Action, step: int) -> None:
            if effect is not None and action.part == counts[action.stage].last(kind, action.stage):
                effect(rank, action, step)

        shares = [[time / counts[stage].count(kind, stage) for time in times] for stage, times in enumerate(work)]
        return when_first, shares, effect_last

    def _hosts(self) -> dict[int, HostEngines | BusyHost]:
        """The hosts of the ranks that have one."""
        p, costs = len(self.ranks), self.costs
        times = list(zip(expand(costs.to_host, p), expand(costs.host, p), expand(costs.from_host, p), strict=True))

        def host(rank: _Rank) -> HostEngines | BusyHost:
            own, shares = times[rank.index], self._shares(rank.index)
            if self.cores is None or not costs.host_works:
                return HostEngines(*own, shares)
            return BusyHost(self.cores, own, shares, partial(self._host_arrived, rank))

        return {rank.index: host(rank) for rank in self.ranks
                if any(action.kind is Kind.HOST for action in rank.actions)}

    def _shares(self, rank: int) -> Sequence[float]:
        """Of the groups of a rank's weights; there is an UPDATE for each, or one for all."""
        shares = self.costs.host_shares[rank] if self.costs.host_shares else ()
        number = self.parts[rank].count(Kind.UPDATE, rank)
        return (sum(shares) or 1.0,) if number == 1 else shares or [1.0] * number

    def _sending(self, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry of NORM where gradients then leave for the host."""

        def effect_then_send(rank: _Rank, action: Action, step: int) -> None:
            if effect is not None:
                effect(rank, action, step)
            if action.part == 0 and rank.index in self.hosts:
                reduced = self._reduction(rank, action.microbatch).end or 0.0
                self.hosts[rank.index].send(max(rank.clock, reduced))

        return when, work, effect_then_send

    def _awaiting_host(self, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry of UPDATE where the host makes the weights."""

        def when_made(rank: _Rank, action: Action) -> float | None:
            start = rank.clock if when is None else when(rank, action)
            if start is None or (host := self.hosts.get(rank.index)) is None:
                return start
            if (made := host.ready(action.part)) is None:
                assert isinstance(host, BusyHost)
                rank.waits_for = host
                return None
            return max(start, made)

        return when_made, work, effect

    def _with_stash(self, kind: Kind, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry of a kind that moves what micro-batches keep, or needs it."""

        def when_there(rank: _Rank, action: Action) -> float | None:
            start = rank.clock if when is None else when(rank, action)
            if start is None:
                return None
            ready = self.stashes[rank.index].ready(action)
            if ready > start:
                rank.stalls[len(rank.starts)] = ready - start
            return max(start, ready)

        def begin(rank: _Rank, action: Action, step: int) -> None:
            rank.ends[step] = self.stashes[rank.index].start(action, rank.clock)

        return (when, work, begin) if kind in (Kind.OFFLOAD, Kind.RELOAD) else (when_there, work, effect)

    def _with_items(self, kind: Kind, when: _When | None, work: _Work, effect: _Effect | None) -> _Entry:
        """The table's entry of a kind that touches or moves items."""

        def when_ready(rank: _Rank, action: Action) -> float | None:
            start = rank.clock if when is None else when(rank, action)
            if start is None or rank.index not in self.engines:
                return start
            ready = self.engines[rank.index].ready(action)
            if ready > start:
                rank.stalls[len(rank.starts)] = ready - start
            return max(start, ready)

        def follow(rank: _Rank, action: Action, step: int) -> None:
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
            return when, self._move_times(kind), follow
        return (when, work, effect) if kind in BESIDE - {Kind.NORM} else (when_ready, work, follow)

    def _move_times(self, kind: Kind) -> _Work:
        """Rank's time that moving takes, by stage and item."""
        each = expand(self.costs.calls.get(kind, 0.0), len(self.ranks))
        of_ranks = [[seconds * mib for mib in self.engines[r].sizes(kind)] if r in self.engines else [0.0]
                    for r, seconds in enumerate(each)]
        return [of_ranks[rank] for rank in self.homes]

    def run(self) -> None:
        self._advance_all()
        while (shared := self.cores or self.wires) is not None and shared.step():
            self._advance_all()
        waiting = {r.index: (len(r.starts), self._reason(r)) for r in self.ranks if r.waits_for is not None}
        if waiting:
            raise StuckError(waiting)

    def _advance_all(self) -> None:
        while self.runnable:
            self._advance(self.runnable.popleft())

    def _advance(self, rank: _Rank) -> None:
        """Runs a rank's actions until it must wait or, where cores are shared, work."""
        table, cores, actions = self.table, self.cores, rank.actions
        starts, returns, ends = rank.starts, rank.returns, rank.ends
        for step in range(len(starts), len(actions)):
            action = actions[step]
            when, work, effect = table[action.kind]
            start = rank.clock if when is None else when(rank, action)
            if start is None:
                return
            starts.append(start)
            durations = work[action.stage]
            duration = durations[action.microbatch % len(durations)]
            if cores is not None and duration:
                cores.add(start, duration, partial(self._done, rank))
                return
            rank.clock = end = start + duration
            returns.append(end)
            ends.append(end)
            if effect is not None:
                effect(rank, action, step)

    def _done(self, rank: _Rank, now: float) -> None:
        """The work of the rank's action is done."""
        step = len(rank.starts) - 1
        action = rank.actions[step]
        rank.clock = now
        rank.returns.append(now)
        rank.ends.append(now)
        if (effect := self.table[action.kind][2]) is not None:
            effect(rank, action, step)
        self.runnable.append(rank)

    # -- when an action can start ---------------------------------------------------------------------------------

    def _when_arrived(self, rank: _Rank, action: Action) -> float | None:
        if (channel := self.incoming[action.kind][action.stage]) is None:
            return rank.clock
        if channel.num_used == len(channel.arrivals):
            rank.waits_for = channel
            return None
        arrival = channel.arrivals[channel.num_used]
        channel.num_used += 1
        return max(rank.clock, arrival)

    def _when_gathered(self, rank: _Rank, action: Action) -> float | None:
        start = self._when_arrived(rank, action)
        return None if start is None else self._gathered(rank, action, start)

    def _gathered(self, rank: _Rank, action: Action, start: float) -> float:
        return start if action.version < rank.newest else max(start, rank.gathered)

    def _when_reduced(self, rank: _Rank, action: Action) -> float | None:
        return self._when_over(rank, self._reduction(rank, action.microbatch))

    def _when_normed(self, rank: _Rank, action: Action) -> float | None:
        batch = action.microbatch
        if batch in rank.normed:
            return self._when_over(rank, self._meeting(Kind.NORM, batch, 0, len(self.ranks)))
        return self._when_over(rank, self._reduction(rank, batch))

    def _when_over(self, rank: _Rank, meeting: _Meeting) -> float | None:
        if meeting.end is None:
            rank.waits_for = meeting
            return None
        return max(rank.clock, meeting.end)

    # -- what an action does ----------------------------------------------------------------------------------------

    def _send(self, rank: _Rank, action: Action, step: int) -> None:
        channel = self.outgoing[action.kind][action.stage]
        assert channel is not None, f"{action} has no stage to send to"
        channel.num_sent += 1
        channel.sends.pending.append((channel, step))
        self._transfer(channel)

    def _post(self, rank: _Rank, action: Action, step: int) -> None:
        channel = self.incoming[action.kind][action.stage]
        assert channel is not None, f"{action} has no stage to receive from"
        channel.num_posted += 1
        channel.receives.pending.append((channel, step))
        self._transfer(channel)

    def _transfer(self, channel: _Channel) -> None:
        """Runs the channel's next transfer if it is first in line at both ends, and those that it was in the way of."""
        freed = [channel]
        while freed:
            channel = freed.pop()
            sends, receives = channel.sends, channel.receives
            if not sends.pending or not receives.pending or channel.under_way:
                continue
            (first, sent), (other, posted) = sends.pending[0], receives.pending[0]
            if first is not channel or other is not channel:
                continue
            start = max(channel.sender.returns[sent], channel.receiver.returns[posted], sends.free, receives.free)
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

    def _worked(self, channel: _Channel, now: float) -> None:
        channel.under_way = False
        self._arrive(channel, now)
        for queue in (channel.sends, channel.receives):
            if queue.pending:
                self._transfer(queue.pending[0][0])

    def _arrive(self, channel: _Channel, start: float) -> None:
        """The channel's first transfer occupies the link from `start` on."""
        sender, receiver = channel.sender, channel.receiver
        (_, sent), (_, posted) = channel.sends.pending.popleft(), channel.receives.pending.popleft()
        channel.sends.free = channel.receives.free = over = start + channel.transfer * (channel.route is None)
        sender.ends[sent] = receiver.ends[posted] = arrival = over + channel.latency
        channel.arrivals.append(arrival)
        self._wake(receiver, channel)
        if self.costs.blocking:
            self._over(sender, arrival)
            self._over(receiver, arrival)

    def _reduction(self, rank: _Rank, batch: int) -> _Meeting:
        """The REDUCE of that batch that this rank takes part in."""
        last = len(self.ranks) - 1
        tied = self.costs.tied and last > 0 and rank.index in (0, last)
        return self._meeting(Kind.REDUCE, batch, 0 if tied else rank.index, 2 if tied else 1)

    def _meeting(self, kind: Kind, batch: int, stage: int, size: int) -> _Meeting:
        key = (kind, batch, stage)
        if key not in self.meetings:
            self.meetings[key] = _Meeting(size)
        return self.meetings[key]

    def _join(self, meeting: _Meeting, rank: _Rank, step: int, ready: float, duration: float) -> None:
        """Takes part in a collective; the last one to come ends it, and wakes who waits for it."""
        meeting.issued.append((rank, step))
        meeting.ready = max(meeting.ready, ready)
        if len(meeting.issued) < meeting.size:
            return
        meeting.end = meeting.ready + duration
        for member, at in meeting.issued:
            member.ends[at] = meeting.end
            self._wake(member, meeting)
            if self.costs.blocking and member.actions[at].kind is Kind.REDUCE:
                self._over(member, meeting.end)

    def _wake(self, rank: _Rank, waited_for: _Channel | _Meeting | BusyHost | _Exchange) -> None:
        if rank.waits_for is waited_for:
            rank.waits_for = None
            self.runnable.append(rank)

    def _reduce(self, rank: _Rank, action: Action, step: int) -> None:
        self._join(self._reduction(rank, action.microbatch), rank, step, rank.clock, self.reduce[rank.index])

    def _norm(self, rank: _Rank, action: Action, step: int) -> None:
        batch = action.microbatch
        meeting = self._meeting(Kind.NORM, batch, 0, len(self.ranks))
        ready = rank.clock
        if len(meeting.issued) == meeting.size - 1:  # all have issued their REDUCE before
            ready = max(ready, *(self._reduction(r, batch).end or 0.0 for r in self.ranks))
        rank.normed.add(batch)
        self._join(meeting, rank, step, ready, self.costs.norm)

    def _host(self, rank: _Rank, action: Action, step: int) -> None:
        rank.host_step = step
        rank.ends[step] = self.hosts[rank.index].begin(rank.clock)

    def _host_arrived(self, rank: _Rank, now: float) -> None:
        """A group of the weights that the host makes has arrived."""
        host = self.hosts[rank.index]
        assert isinstance(host, BusyHost)
        if host.is_done:
            rank.ends[rank.host_step] = now
        self._wake(rank, host)

    def _gather(self, rank: _Rank, action: Action, step: int) -> None:
        rank.newest, rank.gathered = action.version, rank.clock + self.gather[rank.index]
        rank.ends[step] = rank.gathered

    def _reason(self, rank: _Rank) -> str:
        action, missing = rank.actions[len(rank.starts)], rank.waits_for
        if isinstance(missing, _Channel):
            sender, n = missing.sender.index, missing.num_used
            what = f"{missing.num_sent} sent, {missing.num_posted} receives posted"
            return f"{action} waits for transfer {n} from rank {sender} ({what})"
        if isinstance(missing, BusyHost):
            return f"{action} waits for the host"
        if isinstance(missing, _Exchange):
            return f"{action} waits for {missing.left} transfers of this rank"
        assert missing is not None, f"rank {rank.index} is not waiting"
        there = {member.index for member, _ in missing.issued}
        kind, batch = next((k, b) for (k, b, _), meeting in self.meetings.items() if meeting is missing)
        absent = [r.index for r in self.ranks if r.index not in there]
        return f"{action} waits for {kind}{batch}, which ranks {absent} have not reached"
