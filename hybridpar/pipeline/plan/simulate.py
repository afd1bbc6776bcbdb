"""Simulates the time that a plan takes, event by event, from the cost of each action.

The rules are the executor's, so a plan that ends here cannot deadlock there:

    F, B, I   wait for their receive (F also for the gather of its weights), then take the rank's
              time
    W         takes the rank's time
    SEND      returns at once. Its transfer starts once the sender knows that the receive is posted
              (word takes `latency`; nothing is buffered) and the link's previous transfer is over.
              It takes `transfer`, and arrives `latency` later. With `serial_links`, a rank's
              transfers on one axis (SEND_F and RECV_F, or SEND_B and RECV_B) go one by one in the
              order of issue, as NCCL's do on one communicator. With a send window (send_window.py)
              a rank that has too many unfinished sends waits for the oldest one
    RECV      posts the receive, returns at once
    REDUCE    returns at once, ends `reduce` later; with `tied`, the first and the last stage share
              one
    NORM      returns at once, ends `norm` after all stages have issued it and ended their REDUCE
    HOST      waits for NORM of all stages, returns at once; the host then makes the new weights
              (copies.py). Gradients have been on their way to it since NORM
    UPDATE    waits for NORM of all stages (without a NORM, for its own REDUCE) and for its part of
              HOST's new weights, if there is a HOST; then takes the rank's time. With sharded
              optimizer state the new weights are there `gather` later

    OFFLOAD, RELOAD return at once; a micro-batch's activations leave and come back beside the
    rank's work (copies.py).
              EVICT waits until they have left, the backward until they are back

    FETCH, RELEASE, DROP return at once; items move beside the rank's work (copies.py). An action
    waits for the items
              that it touches. For chunks that replicas share, these are collectives

Where an action is cut into parts, the first part to run waits (of an F, every part waits for the
gather), the last one starts what follows, and all take equal times.

With a `network`, transfers share its links (network.py), which say how long they take; `transfer`
does not count. With `blocking` a rank computes nothing while it communicates: consecutive SENDs and
RECVs with one neighbour are one exchange, and the next action waits for its end, as for that of a
REDUCE.

"At once" means after the time of the call itself (`calls`). With a number of `cores`, all ranks,
hosts and transfers slow down alike while more of them are at work than there are cores.

Each rank runs until it must wait, and is woken by what it waits for; where cores are shared, it
also stops at each piece of work until that is done. The order in which ranks are taken changes no
result, because every queue has one writer and one reader: one run that ends is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybridpar.pipeline.plan.action import Action, Plan
from hybridpar.pipeline.plan.copies import BusyHost
from hybridpar.pipeline.plan.costs import Costs, expand
from hybridpar.pipeline.plan.kinds import COMPUTE, ROWS, Kind
from hybridpar.pipeline.plan.moved_state import Effect, Entry, MovedState, Table, When, Work
from hybridpar.pipeline.plan.moved_state import StuckError as StuckError
from hybridpar.pipeline.plan.parts import PartCounts
from hybridpar.pipeline.plan.residency import Residency
from hybridpar.pipeline.plan.send_window import SendWindow
from hybridpar.pipeline.plan.shared import SharedItems
from hybridpar.pipeline.plan.sizes import Sizes
from hybridpar.pipeline.plan.timeline import Timeline
from hybridpar.pipeline.plan.transfers import Channel, Exchange, Rank, Transfers


def simulate(
    plan: Plan,
    costs: Costs | None = None,
    residency: Mapping[int, Residency | SharedItems] | None = None,
    ready: Sequence[float] | None = None,
) -> Timeline:
    """Runs a lowered plan (`passes.make_plan`) with the given costs (default: a forward takes 1, a
    backward 2).

    residency: by rank, the items that the plan moves between tiers or replicas; without it, moves
    take no time. ready: by rank, the time at which it has its first weights; None: at once.

    Raises: StuckError if a rank waits for something that never comes.
    """
    assert sorted(plan) == list(range(len(plan))), f"ranks of a plan count from 0: {sorted(plan)}"
    machine = _Machine(plan, costs or Costs(), residency or {}, ready)
    machine.run()
    ranks = machine.ranks
    makespan = max((max(rank.ends) for rank in ranks if rank.ends), default=0.0)
    return Timeline(
        plan,
        {r.index: r.starts for r in ranks},
        {r.index: r.ends for r in ranks},
        makespan,
        {r.index: r.returns for r in ranks},
        {r.index: r.stalls for r in ranks},
    )


def fitting_send_window(plan: Plan, costs: Costs | None = None) -> int:
    """Return the smallest send window, at least `min_send_window`, with which the plan runs to its
    end.

    Whenever no rank can continue and at least one waits for its oldest send, the window of all
    ranks grows by one. A wider window only removes waits, so the plan also ends if every rank has
    the final window from the start.

    Raises: StuckError if a rank waits for something that never comes, however wide the window is.
    """
    machine = _Machine(plan, costs or Costs(), {}, limit_sends=True)
    machine.run()
    assert machine.window is not None
    return machine.window.width


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective of one batch: over when `size` ranks have issued it."""

    size: int
    issued: list[tuple[Rank, int]] = field(default_factory=list)  # who, and at which step
    ready: float = 0.0
    end: float | None = None


class _Machine:
    """All ranks, and what connects them.

    The table has three entries for each kind of action: a function that says when it can start
    (None: once the one before has returned), its durations by stage, and its effect. The function
    returns None while the start is not known, and notes what the rank waits for.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        residency: Mapping[int, Residency | SharedItems],
        ready: Sequence[float] | None = None,
        *,
        limit_sends: bool = False,
    ):
        p = len(plan)
        self.costs = costs
        self.ranks = [Rank(r, plan[r], gathered=ready[r] if ready else 0.0) for r in range(p)]
        self.sizes = Sizes.found(
            {a.stage: r for r, actions in plan.items() for a in actions if a.kind in COMPUTE}, p
        )
        self.homes = [
            self.sizes.rank_of(stage) for stage in range(self.sizes.num_stages)
        ]  # ranks of the stages
        self.transfers = Transfers(self.ranks, self.sizes, self.homes, costs, self._arrived)
        self.cores = self.transfers.cores
        self.incoming = self.transfers.incoming
        self.parts = [PartCounts(rank.actions) for rank in self.ranks]
        self.moved = moved = MovedState(self.ranks, self.homes, costs, self.parts, residency)
        self.reduce, self.gather = expand(costs.reduce, p), expand(costs.gather, p)
        self.meetings: dict[
            tuple[Kind, int, int], _Meeting
        ] = {}  # by kind, batch, and stage (NORM: 0)
        gathers = any(self.gather)
        when = {Kind.HOST: self._when_normed, Kind.UPDATE: self._when_normed}
        if gathers or ready:
            when[Kind.F] = self._when_gathered
        if costs.blocking_norm:
            when[Kind.NORM] = self._when_reduced
        effect = {Kind.REDUCE: self._reduce, Kind.NORM: self._norm, Kind.HOST: moved.begin}
        if gathers:
            effect[Kind.UPDATE] = self._gather
        self.table: Table = {
            kind: (
                when.get(kind, self._when_arrived if row.receive else None),
                costs.durations(kind, self.homes),
                effect.get(
                    kind,
                    self.transfers.send
                    if row.met_by
                    else self.transfers.post
                    if row.side
                    else None,
                ),
            )
            for kind, row in ROWS.items()
        }
        if any(self.parts):
            self.table |= {
                kind: self._by_part(kind, *self.table[kind])
                for kind, row in ROWS.items()
                if row.cut
            }
        moved.add_hosts(
            self.table,
            self.cores,
            lambda rank, batch: self._reduction(rank, batch).end or 0.0,
            self._wake,
        )
        moved.add_stashes(self.table)
        if costs.blocking:
            self.table = {kind: self._blocking(kind, *entry) for kind, entry in self.table.items()}
        moved.add_items(self.table)
        self.window = (
            SendWindow(self.ranks, self.transfers.outgoing, self._wake) if limit_sends else None
        )
        if self.window is not None:
            self.table = self.window.limit(self.table)
        self.runnable = deque(self.ranks)

    def _blocking(self, kind: Kind, when: When | None, work: Work, effect: Effect | None) -> Entry:
        """The table's entry under `blocking`: a rank waits for its exchange before anything
        else."""
        side = ROWS[kind].side
        joins = ROWS[kind].side != 0 or kind is Kind.REDUCE

        def when_over(rank: Rank, action: Action) -> float | None:
            exchange = rank.exchange
            if exchange is not None and (not side or side != exchange.side):
                if exchange.left:
                    rank.waits_for = exchange
                    return None
                rank.clock = max(rank.clock, exchange.over)
                rank.exchange = None
            return rank.clock if when is None else when(rank, action)

        def join(rank: Rank, action: Action, step: int) -> None:
            rank.exchange = rank.exchange or Exchange(side)
            rank.exchange.left += 1
            if effect is not None:
                effect(rank, action, step)

        return when_over, work, join if joins else effect

    def _arrived(self, channel: Channel, when: float) -> None:
        self._wake(channel.receiver, channel)
        if self.window is not None:
            self.window.arrived(channel.sender)
        if self.costs.blocking:
            self._over(channel.sender, when)
            self._over(channel.receiver, when)

    def _over(self, rank: Rank, when: float) -> None:
        """One of the transfers of a blocking rank, or its REDUCE, is over."""
        if (exchange := rank.exchange) is not None:
            exchange.left -= 1
            exchange.over = max(exchange.over, when)
            if not exchange.left:
                self._wake(rank, exchange)

    def _by_part(self, kind: Kind, when: When | None, work: Work, effect: Effect | None) -> Entry:
        """The table's entry of a kind that is cut into parts."""
        counts = [self.parts[rank] for rank in self.homes]

        def when_first(rank: Rank, action: Action) -> float | None:
            if when is not None and action.part == counts[action.stage].first(kind, action.stage):
                return when(rank, action)
            return (
                self._gathered(rank, action, rank.clock)
                if when == self._when_gathered
                else rank.clock
            )

        def effect_last(rank: Rank, action: Action, step: int) -> None:
            if effect is not None and action.part == counts[action.stage].last(kind, action.stage):
                effect(rank, action, step)

        shares = [
            [time / counts[stage].count(kind, stage) for time in times]
            for stage, times in enumerate(work)
        ]
        return when_first, shares, effect_last

    def run(self) -> None:
        self._advance_all()
        while self._step_shared() or (self.window is not None and self.window.widen()):
            self._advance_all()
        waiting = {
            r.index: (len(r.starts), self._reason(r)) for r in self.ranks if r.waits_for is not None
        }
        if waiting:
            raise StuckError(waiting)

    def _step_shared(self) -> bool:
        """Run the next event of shared cores or links, if there is one."""
        shared = self.cores or self.transfers.wires
        return shared is not None and shared.step()

    def _advance_all(self) -> None:
        while self.runnable:
            self._advance(self.runnable.popleft())

    def _advance(self, rank: Rank) -> None:
        """Runs a rank's actions until it must wait or, where cores are shared, work."""
        table = self.table
        cores = self.cores
        actions = rank.actions
        starts = rank.starts
        returns = rank.returns
        ends = rank.ends
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

    def _done(self, rank: Rank, now: float) -> None:
        """The work of the rank's action is done."""
        step = len(rank.starts) - 1
        action = rank.actions[step]
        rank.clock = now
        rank.returns.append(now)
        rank.ends.append(now)
        if (effect := self.table[action.kind][2]) is not None:
            effect(rank, action, step)
        self.runnable.append(rank)

    # -- when an action can start

    def _when_arrived(self, rank: Rank, action: Action) -> float | None:
        if (channel := self.incoming[action.kind][action.stage]) is None:
            return rank.clock
        if channel.num_used == len(channel.arrivals):
            rank.waits_for = channel
            return None
        arrival = channel.arrivals[channel.num_used]
        channel.num_used += 1
        return max(rank.clock, arrival)

    def _when_gathered(self, rank: Rank, action: Action) -> float | None:
        start = self._when_arrived(rank, action)
        return None if start is None else self._gathered(rank, action, start)

    def _gathered(self, rank: Rank, action: Action, start: float) -> float:
        return start if action.version < rank.newest else max(start, rank.gathered)

    def _when_reduced(self, rank: Rank, action: Action) -> float | None:
        return self._when_over(rank, self._reduction(rank, action.microbatch))

    def _when_normed(self, rank: Rank, action: Action) -> float | None:
        batch = action.microbatch
        if batch in rank.normed:
            return self._when_over(rank, self._meeting(Kind.NORM, batch, 0, len(self.ranks)))
        return self._when_over(rank, self._reduction(rank, batch))

    def _when_over(self, rank: Rank, meeting: _Meeting) -> float | None:
        if meeting.end is None:
            rank.waits_for = meeting
            return None
        return max(rank.clock, meeting.end)

    # -- what an action does

    def _reduction(self, rank: Rank, batch: int) -> _Meeting:
        """The REDUCE of that batch that this rank takes part in."""
        last = len(self.ranks) - 1
        tied = self.costs.tied and last > 0 and rank.index in (0, last)
        return self._meeting(Kind.REDUCE, batch, 0 if tied else rank.index, 2 if tied else 1)

    def _meeting(self, kind: Kind, batch: int, stage: int, size: int) -> _Meeting:
        key = (kind, batch, stage)
        if key not in self.meetings:
            self.meetings[key] = _Meeting(size)
        return self.meetings[key]

    def _join(
        self, meeting: _Meeting, rank: Rank, step: int, ready: float, duration: float
    ) -> None:
        """Takes part in a collective; the last one to join sets its end, and wakes those who wait
        for it."""
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

    def _wake(self, rank: Rank, waited_for: object) -> None:
        if rank.waits_for is waited_for:
            rank.waits_for = None
            self.runnable.append(rank)

    def _reduce(self, rank: Rank, action: Action, step: int) -> None:
        self._join(
            self._reduction(rank, action.microbatch),
            rank,
            step,
            rank.clock,
            self.reduce[rank.index],
        )

    def _norm(self, rank: Rank, action: Action, step: int) -> None:
        batch = action.microbatch
        meeting = self._meeting(Kind.NORM, batch, 0, len(self.ranks))
        ready = rank.clock
        if len(meeting.issued) == meeting.size - 1:  # all have issued their REDUCE before
            ready = max(ready, *(self._reduction(r, batch).end or 0.0 for r in self.ranks))
        rank.normed.add(batch)
        self._join(meeting, rank, step, ready, self.costs.norm)

    def _gather(self, rank: Rank, action: Action, step: int) -> None:
        rank.newest = action.version
        rank.gathered = rank.clock + self.gather[rank.index]
        rank.ends[step] = rank.gathered

    def _reason(self, rank: Rank) -> str:
        action = rank.actions[len(rank.starts)]
        missing = rank.waits_for
        if isinstance(missing, Channel):
            sender = missing.sender.index
            n = missing.num_used
            what = f"{missing.num_sent} sent, {missing.num_posted} receives posted"
            return f"{action} waits for transfer {n} from rank {sender} ({what})"
        if isinstance(missing, BusyHost):
            return f"{action} waits for the host"
        if isinstance(missing, Exchange):
            return f"{action} waits for {missing.left} transfers of this rank"
        assert missing is not None, f"rank {rank.index} is not waiting"
        there = {member.index for member, _ in missing.issued}
        kind, batch = next(
            (k, b) for (k, b, _), meeting in self.meetings.items() if meeting is missing
        )
        absent = [r.index for r in self.ranks if r.index not in there]
        return f"{action} waits for {kind}{batch}, which ranks {absent} have not reached"
