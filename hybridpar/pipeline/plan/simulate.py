"""How long a plan takes: an exact event-driven simulation of its dependencies, given what each step costs.

The rules are those of the executor, so a plan that ends here cannot deadlock there:

    F, B      wait for their receive, then take the rank's time
    SEND      returns at once. A transfer starts when it was sent, the receive is posted and the one before it on
              that link is over (there is no mailbox), and takes `transfer`; it arrives `latency` later. With
              `serial_links`, all transfers of a rank on one axis, SEND_F and RECV_F, or SEND_B and RECV_B, go one by
              one in the order they were issued: so does NCCL where the axis has one communicator
    RECV      posts the receive, returns at once
    REDUCE    returns at once, ends `reduce` later; with `tied` the end stages meet in it
    NORM      returns at once, ends `norm` after the last stage has issued it and ended its REDUCE
    UPDATE    waits for NORM of all stages (for its own REDUCE where there is no NORM), then takes the rank's time

Each rank runs until it must wait for another, and is woken by what it waits for. No result depends on the order in
which ranks are taken, because every queue has one writer and one reader: one run that ends is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridpar.errors import HybridparError
from hybridpar.pipeline.plan.action import Action, Kind, Plan
from hybridpar.pipeline.plan.timeline import Timeline

PerStage = float | Sequence[float]  # one number for all stages, or one for each


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, in any one unit of time.

    forward, backward: of one micro-batch. update: the optimizer step, on the rank's own time. reduce: gradients over
    the replicas. norm: the grid-wide reduction. transfer: how long one activation occupies a link; latency: from its
    leaving to its arrival. tied: REDUCE also meets over the first and the last stage (tied embeddings).
    blocking_norm: NORM waits for its REDUCE (a CPU rank that must read the result) instead of queueing behind it.
    serial_links: the transfers of a rank on one axis share a queue.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    update: PerStage = 0.0
    reduce: PerStage = 0.0
    norm: float = 0.0
    transfer: float = 0.0
    latency: float = 0.0
    tied: bool = False
    blocking_norm: bool = False
    serial_links: bool = False


class StuckError(HybridparError):
    """A plan cannot go on: `waiting` says, by rank, at which step and for what."""

    def __init__(self, waiting: Mapping[int, tuple[int, str]]):
        self.waiting = waiting
        rank, (step, reason) = next(iter(waiting.items()))
        super().__init__(f"{len(waiting)} ranks wait forever; rank {rank}, step {step}: {reason}")


def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Runs a lowered plan (`passes.make_plan`) with the given costs (default: a forward takes 1, a backward 2).

    Raises: StuckError if a rank waits for something that never comes.
    """
    assert sorted(plan) == list(range(len(plan))), f"ranks of a plan count from 0: {sorted(plan)}"
    machine = _Machine(plan, costs or Costs())
    machine.run()
    makespan = max((max(rank.ends) for rank in machine.ranks if rank.ends), default=0.0)
    return Timeline(
        plan, {rank.index: rank.starts for rank in machine.ranks}, {rank.index: rank.ends for rank in machine.ranks},
        makespan,
    )


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's place in its list, and its clock."""

    index: int
    actions: Sequence[Action]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    clock: float = 0.0
    waits_for: _Channel | _Meeting | None = None
    normed: set[int] = field(default_factory=set)  # batches whose NORM it has issued


@dataclass(slots=True, eq=False)
class _Queue:
    """Transfers that one rank has issued and that wait for each other: channel, and step of the rank."""

    pending: deque[tuple[_Channel, int]] = field(default_factory=deque)
    free: float = 0.0  # when the last one was over


@dataclass(slots=True, eq=False)
class _Channel:
    """What flows one way between two neighbours, in order: the i-th send meets the i-th receive."""

    sender: _Rank
    receiver: _Rank
    sends: _Queue
    receives: _Queue
    num_sent: int = 0
    num_posted: int = 0
    num_used: int = 0
    arrivals: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective of one batch: over when `size` ranks have issued it."""

    size: int
    issued: list[tuple[_Rank, int]] = field(default_factory=list)  # who, and at which step
    ready: float = 0.0
    end: float | None = None


class _Machine:
    """All ranks, and what connects them. One handler for each kind: it runs the action, or says what it waits for."""

    def __init__(self, plan: Plan, costs: Costs):
        p = len(plan)
        self.costs = costs
        self.ranks = [_Rank(r, plan[r]) for r in range(p)]
        forward, backward = self._channels(-1), self._channels(1)
        self.incoming = {Kind.F: forward, Kind.B: backward, Kind.RECV_F: forward, Kind.RECV_B: backward}
        self.outgoing = {Kind.SEND_F: [*forward[1:], None], Kind.SEND_B: [None, *backward[:-1]]}
        self.durations = {
            Kind.F: _per_stage(costs.forward, p), Kind.B: _per_stage(costs.backward, p),
            Kind.UPDATE: _per_stage(costs.update, p), Kind.REDUCE: _per_stage(costs.reduce, p),
        }
        self.meetings: dict[tuple[Kind, int, int], _Meeting] = {}  # by kind, batch, and stage (NORM: 0)
        self.handlers = {
            Kind.F: self._compute, Kind.B: self._compute, Kind.UPDATE: self._update,
            Kind.SEND_F: self._send, Kind.SEND_B: self._send, Kind.RECV_F: self._receive, Kind.RECV_B: self._receive,
            Kind.REDUCE: self._reduce, Kind.NORM: self._norm,
        }
        self.runnable = deque(self.ranks)

    def _channels(self, towards: int) -> list[_Channel | None]:
        """What each rank receives from the neighbour at that side."""
        queues = [_Queue() for _ in self.ranks]  # one for what a rank sends and receives
        apart = [_Queue() for _ in self.ranks] if not self.costs.serial_links else queues
        return [
            _Channel(self.ranks[r + towards], self.ranks[r], apart[r + towards], queues[r])
            if 0 <= r + towards < len(self.ranks) else None
            for r in range(len(self.ranks))
        ]

    def run(self) -> None:
        handlers = self.handlers
        while self.runnable:
            rank = self.runnable.popleft()
            actions, starts = rank.actions, rank.starts
            for step in range(len(starts), len(actions)):
                action = actions[step]
                rank.waits_for = handlers[action.kind](rank, action, step)
                if rank.waits_for is not None:
                    break
        waiting = {r.index: (len(r.starts), self._reason(r)) for r in self.ranks if r.waits_for is not None}
        if waiting:
            raise StuckError(waiting)

    def _compute(self, rank: _Rank, action: Action, step: int) -> _Channel | None:
        start = rank.clock
        channel = self.incoming[action.kind][rank.index]
        if channel is not None:
            if channel.num_used == len(channel.arrivals):
                return channel
            start = max(start, channel.arrivals[channel.num_used])
            channel.num_used += 1
        rank.starts.append(start)
        rank.clock = start + self.durations[action.kind][rank.index]
        rank.ends.append(rank.clock)
        return None

    def _send(self, rank: _Rank, action: Action, step: int) -> None:
        channel = self.outgoing[action.kind][rank.index]
        assert channel is not None, f"{action} has no stage to send to"
        self._issue(rank)
        channel.num_sent += 1
        channel.sends.pending.append((channel, step))
        self._transfer(channel)

    def _receive(self, rank: _Rank, action: Action, step: int) -> None:
        channel = self.incoming[action.kind][rank.index]
        assert channel is not None, f"{action} has no stage to receive from"
        self._issue(rank)
        channel.num_posted += 1
        channel.receives.pending.append((channel, step))
        self._transfer(channel)

    def _issue(self, rank: _Rank) -> None:
        """Starts something that takes none of the rank's time; its end is set when it is known."""
        rank.starts.append(rank.clock)
        rank.ends.append(rank.clock)

    def _transfer(self, channel: _Channel) -> None:
        """Runs the channel's next transfer if it is first in line at both ends, and those that it was in the way of."""
        freed = [channel]
        while freed:
            channel = freed.pop()
            sends, receives = channel.sends, channel.receives
            if not sends.pending or not receives.pending:
                continue
            (first, sent), (other, posted) = sends.pending[0], receives.pending[0]
            if first is not channel or other is not channel:
                continue
            sends.pending.popleft()
            receives.pending.popleft()
            sender, receiver = channel.sender, channel.receiver
            over = max(sender.starts[sent], receiver.starts[posted], sends.free, receives.free) + self.costs.transfer
            sends.free = receives.free = over
            sender.ends[sent] = receiver.ends[posted] = over + self.costs.latency
            channel.arrivals.append(over + self.costs.latency)
            self._wake(receiver, channel)
            freed += [queue.pending[0][0] for queue in (sends, receives) if queue.pending]

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
        self._issue(rank)
        meeting.issued.append((rank, step))
        meeting.ready = max(meeting.ready, ready)
        if len(meeting.issued) < meeting.size:
            return
        meeting.end = meeting.ready + duration
        for member, at in meeting.issued:
            member.ends[at] = meeting.end
            self._wake(member, meeting)

    def _wake(self, rank: _Rank, waited_for: _Channel | _Meeting) -> None:
        if rank.waits_for is waited_for:
            rank.waits_for = None
            self.runnable.append(rank)

    def _reduce(self, rank: _Rank, action: Action, step: int) -> None:
        self._join(
            self._reduction(rank, action.microbatch), rank, step, rank.clock, self.durations[Kind.REDUCE][rank.index],
        )

    def _norm(self, rank: _Rank, action: Action, step: int) -> _Meeting | None:
        batch = action.microbatch
        own = self._reduction(rank, batch)
        if self.costs.blocking_norm:
            if own.end is None:
                return own
            rank.clock = max(rank.clock, own.end)
        meeting = self._meeting(Kind.NORM, batch, 0, len(self.ranks))
        ready = rank.clock
        if len(meeting.issued) == meeting.size - 1:  # all have issued their REDUCE before
            ready = max(ready, *(self._reduction(r, batch).end or 0.0 for r in self.ranks))
        self._join(meeting, rank, step, ready, self.costs.norm)
        rank.normed.add(batch)
        return None

    def _update(self, rank: _Rank, action: Action, step: int) -> _Meeting | None:
        batch = action.microbatch
        has_norm = batch in rank.normed
        meeting = self._meeting(Kind.NORM, batch, 0, len(self.ranks)) if has_norm else self._reduction(rank, batch)
        if meeting.end is None:
            return meeting
        rank.starts.append(max(rank.clock, meeting.end))
        rank.clock = rank.starts[-1] + self.durations[Kind.UPDATE][rank.index]
        rank.ends.append(rank.clock)
        return None

    def _reason(self, rank: _Rank) -> str:
        action, missing = rank.actions[len(rank.starts)], rank.waits_for
        if isinstance(missing, _Channel):
            sender, n = missing.sender.index, missing.num_used
            what = f"{missing.num_sent} sent, {missing.num_posted} receives posted"
            return f"{action} waits for transfer {n} from rank {sender} ({what})"
        assert missing is not None, f"rank {rank.index} is not waiting"
        there = {member.index for member, _ in missing.issued}
        kind, batch = next((k, b) for (k, b, _), meeting in self.meetings.items() if meeting is missing)
        absent = [r.index for r in self.ranks if r.index not in there]
        return f"{action} waits for {kind}{batch}, which ranks {absent} have not reached"


def _per_stage(cost: PerStage, num_stages: int) -> Sequence[float]:
    if isinstance(cost, int | float):
        return [cost] * num_stages
    assert len(cost) == num_stages, f"{len(cost)} costs for {num_stages} stages"
    return cost
