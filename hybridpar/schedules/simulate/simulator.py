"""Simulates the time that a plan takes, event by event, from the cost of each action (costs.py).

The rules are the executor's, so a plan that ends here cannot deadlock there:

    F, B, I   wait for their receive, and F for the gather of its weights
    SEND      its transfer starts once the sender knows that the receive is posted (word takes
              `latency`; nothing is buffered) and the link's previous transfer is over. With a send
              window (send_window.py) a rank with too many unfinished sends waits for the oldest one
    NORM      ends once all stages have issued it and ended their REDUCE
    HOST      waits for NORM of all stages; gradients have been on their way to the host since NORM
    UPDATE    waits for NORM of all stages (without a NORM, for its own REDUCE), and for its part of
              HOST's new weights
    EVICT     waits until a micro-batch's activations have left, the backward until they are back

Computations and UPDATE take the rank's time. All others return after the time of the call itself,
and what they start goes on beside the rank's work. An action waits for the items of state that it
accesses. For chunks that replicas share, FETCH, RELEASE and DROP are collectives.

Where an action is cut into parts, the first part to run waits (of an F, every part waits for the
gather), the last one starts what follows, and all take equal times.

Each rank runs until it must wait, and is woken by what it waits for; where cores are shared, it
also stops at each piece of work until that is done. The order in which ranks are taken changes no
result, because every queue has one writer and one reader: one run that ends is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, PER_ITEM, Kind
from hybridpar.schedules.passes.residency import Pool
from hybridpar.schedules.passes.segments import PartCounts
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.collectives import Collectives, Meeting
from hybridpar.schedules.simulate.copy_engines import MemoryMoves
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.hosts import HostEngines, Hosts
from hybridpar.schedules.simulate.send_window import SendWindow
from hybridpar.schedules.simulate.simulated_rank import Dependency, Effect, Rank
from hybridpar.schedules.simulate.simulated_rank import StuckError as StuckError
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.schedules.simulate.transfers import Channel, Transfers


def simulate(
    plan: Plan,
    costs: Costs | None = None,
    pools: Mapping[int, Sequence[Pool]] | None = None,
    ready: Sequence[float] | None = None,
) -> Timeline:
    """Simulate a lowered plan; by default a forward takes 1, a backward 2.

    Args:
        pools: By rank, the items that the plan moves between tiers or replicas; without them, moves
            take no time.
        ready: By rank, the time at which it has its first weights; None: at once.

    Raises: StuckError, if a rank waits for something that never comes.
    """
    return Simulation(plan, costs or Costs(), pools, ready).timeline()


def fitting_send_window(plan: Plan, costs: Costs | None = None) -> int:
    """Return the smallest send window, at least `min_send_window`, that the plan needs.

    Whenever no rank can continue and at least one waits for its oldest send, the window of all
    ranks grows by one. A wider window only removes waits, so the plan also ends if every rank has
    the final window from the start.

    Raises: StuckError if a rank waits for something that never comes, however wide the window is.
    """
    simulation = Simulation(plan, costs or Costs(), limit_sends=True)
    simulation.run()
    assert simulation.window is not None
    return simulation.window.width


@dataclass(frozen=True, slots=True)
class _Rule:
    """How actions of a kind run.

    Args:
        dependencies: Say one after the other when an action can start.
        durations: Time of the rank that it takes, by stage and micro-batch.
        effects: What follows, in this order.
    """

    dependencies: tuple[Dependency, ...]
    durations: Sequence[Sequence[float]]
    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class _OfFirstPart:
    """A dependency that applies only to the first segment of an action."""

    dependency: Dependency
    parts: Sequence[PartCounts]

    def __call__(self, rank: Rank, action: Action, start: float) -> float | None:
        first = self.parts[rank.index].first(action.kind, action.stage)
        return self.dependency(rank, action, start) if action.part == first else start


@dataclass(frozen=True)
class _OfLastPart:
    """An effect that applies only to the last segment of an action."""

    effect: Effect
    parts: Sequence[PartCounts]

    def __call__(self, rank: Rank, action: Action, step: int) -> None:
        if action.part == self.parts[rank.index].last(action.kind, action.stage):
            self.effect(rank, action, step)


class Simulation:
    """A graph: ranks, the resources beside them, and the rules by kind of action.

    ranks ------ transfers ---- cores or wires, which these share
          |----- collectives    REDUCE, NORM, gather
          |----- hosts          only where a host makes the weights
          |----- moves          only where state or activations move
          '----- window         only where unfinished sends are limited
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        pools: Mapping[int, Sequence[Pool]] | None = None,
        ready: Sequence[float] | None = None,
        *,
        limit_sends: bool = False,
    ):
        assert sorted(plan) == list(range(len(plan))), (
            f"ranks of a plan count from 0: {sorted(plan)}"
        )
        p = len(plan)
        self._plan = plan
        self.costs = costs
        self.ranks = [Rank(r, plan[r]) for r in range(p)]
        self.shape = PipelineShape.found(
            {stage: rank.index for rank in self.ranks for stage in _stages(rank, COMPUTE)}, p
        )
        self.shape = replace(self.shape, num_frozen=_num_frozen(self.ranks, self.shape))
        self.homes = [self.shape.rank_of(stage) for stage in range(self.shape.num_stages)]
        self.parts = [PartCounts(rank.actions) for rank in self.ranks]
        self.transfers = Transfers(self.ranks, self.shape, self.homes, costs, self.arrived)
        self.cores = self.transfers.cores
        self.collectives = Collectives(self.ranks, costs, ready, self.wake)
        self.hosts = Hosts(self.ranks, costs, self.parts, self.cores, self.collectives, self.wake)
        self.moves = MemoryMoves(self.ranks, costs, pools or {})
        self.window = None
        if limit_sends:
            self.window = SendWindow(self.ranks, self.transfers.outgoing, self.wake)
        self.waits_for_gather = self.collectives.gathers or bool(ready)
        self.rules = {
            kind: _Rule(self.dependencies(kind), self._durations(kind), self.effects(kind))
            for kind in ACTION_SPECS
        }
        self.runnable = deque(self.ranks)

    # -- rules

    def dependencies(self, kind: Kind) -> tuple[Dependency, ...]:
        """Return what an action of a kind waits for; what sets the clock comes first."""
        row = ACTION_SPECS[kind]
        found: list[Dependency] = []
        if self.window is not None:
            found.append(self.window.oldest_send_finished)
        if row.receive:
            found.append(self._once_for_all_parts(kind, self.transfers.received))
        if kind is Kind.F and self.waits_for_gather:
            found.append(self.collectives.gathered)
        if kind is Kind.NORM and self.costs.blocking_norm:
            found.append(self._once_for_all_parts(kind, self.collectives.reduced))
        if kind in (Kind.HOST, Kind.UPDATE):
            found.append(self._once_for_all_parts(kind, self.collectives.normed))
        if kind is Kind.UPDATE and self.hosts:
            found.append(self.hosts.weights_made)
        if self.moves.concern(kind):
            found.append(self.moves.ready)
        return tuple(found)

    def effects(self, kind: Kind) -> tuple[Effect, ...]:
        """Return the effects of an action of a kind."""
        row = ACTION_SPECS[kind]
        found: list[Effect] = []
        if row.matching_recv and self.window is not None:
            found.append(self.window.note_send)
        if row.matching_recv:
            found.append(self.transfers.send)
        elif row.peer_offset:
            found.append(self.transfers.post)
        if kind is Kind.REDUCE:
            found.append(self.collectives.reduce)
        if kind is Kind.NORM:
            found.append(self._once_for_last_part(kind, self.collectives.norm))
            if self.hosts:
                found.append(self.hosts.send_gradients)
        if kind is Kind.HOST:
            found.append(self.hosts.begin)
        if kind is Kind.UPDATE and self.collectives.gathers:
            found.append(self._once_for_last_part(kind, self.collectives.gather))
        if self.moves.concern(kind):
            found.append(self.moves.follow)
        return tuple(found)

    def _durations(self, kind: Kind) -> Sequence[Sequence[float]]:
        """Return the rank's time by stage and micro-batch; parts take equal times."""
        if kind in PER_ITEM:
            return self.moves.durations(kind, self.homes)
        durations = self.costs.durations(kind, self.homes)
        if not any(self.parts) or not ACTION_SPECS[kind].cut:
            return durations
        return [
            [time / self.parts[self.homes[stage]].count(kind, stage) for time in times]
            for stage, times in enumerate(durations)
        ]

    def _once_for_all_parts(self, kind: Kind, dependency: Dependency) -> Dependency:
        if any(self.parts) and ACTION_SPECS[kind].cut:
            return _OfFirstPart(dependency, self.parts)
        return dependency

    def _once_for_last_part(self, kind: Kind, effect: Effect) -> Effect:
        if any(self.parts) and ACTION_SPECS[kind].cut:
            return _OfLastPart(effect, self.parts)
        return effect

    def timeline(self) -> Timeline:
        """Simulate the plan. Raises: StuckError."""
        self.run()
        ranks = self.ranks
        makespan = max((max(rank.ends) for rank in ranks if rank.ends), default=0.0)
        return Timeline(
            self._plan,
            {r.index: r.starts for r in ranks},
            {r.index: r.ends for r in ranks},
            makespan,
            {r.index: r.returns for r in ranks},
            {r.index: r.stalls for r in ranks},
        )

    # -- events

    def run(self) -> None:
        """Run all ranks to the ends of their lists. Raises: StuckError."""
        shared = self.cores or self.transfers.wires
        self._advance_all()
        while (shared is not None and shared.step()) or (
            self.window is not None and self.window.widen()
        ):
            self._advance_all()
        waiting = {
            r.index: (len(r.starts), self._reason(r)) for r in self.ranks if r.waits_for is not None
        }
        if waiting:
            raise StuckError(waiting)

    def _advance_all(self) -> None:
        while self.runnable:
            self._advance(self.runnable.popleft())

    def _advance(self, rank: Rank) -> None:
        """Run a rank's actions until it must wait or, where cores are shared, work."""
        rules = self.rules
        cores = self.cores
        actions = rank.actions
        starts = rank.starts
        returns = rank.returns
        ends = rank.ends
        for step in range(len(starts), len(actions)):
            action = actions[step]
            rule = rules[action.kind]
            start = rank.clock
            for dependency in rule.dependencies:
                reached = dependency(rank, action, start)
                if reached is None:
                    return
                start = reached
            starts.append(start)
            durations = rule.durations[action.stage]
            duration = durations[action.microbatch % len(durations)]
            if cores is not None and duration:
                cores.add(start, duration, partial(self._done, rank))
                return
            rank.clock = end = start + duration
            returns.append(end)
            ends.append(end)
            for effect in rule.effects:
                effect(rank, action, step)

    def _done(self, rank: Rank, now: float) -> None:
        """Complete the rank's current action, whose work is done."""
        step = len(rank.starts) - 1
        action = rank.actions[step]
        rank.clock = now
        rank.returns.append(now)
        rank.ends.append(now)
        for effect in self.rules[action.kind].effects:
            effect(rank, action, step)
        self.runnable.append(rank)

    def arrived(self, channel: Channel) -> None:
        """Wake both ends of a transfer that has arrived."""
        self.wake(channel.receiver, channel)
        if self.window is not None:
            self.window.arrived(channel.sender)

    def wake(self, rank: Rank, waited_for: object) -> None:
        if rank.waits_for is waited_for:
            rank.waits_for = None
            self.runnable.append(rank)

    def _reason(self, rank: Rank) -> str:
        """Return what a rank waits for, in words."""
        action = rank.actions[len(rank.starts)]
        missing = rank.waits_for
        if isinstance(missing, Channel):
            sender = missing.sender.index
            n = missing.num_used
            what = f"{missing.num_sent} sent, {missing.num_posted} receives posted"
            return f"{action} waits for transfer {n} from rank {sender} ({what})"
        if isinstance(missing, HostEngines):
            return f"{action} waits for the host"
        assert isinstance(missing, Meeting), f"rank {rank.index} is not waiting"
        there = {member.index for member, _ in missing.issued}
        absent = [r.index for r in self.ranks if r.index not in there]
        return (
            f"{action} waits for {missing.kind}{missing.batch}, which ranks {absent} have not "
            "reached"
        )


def _stages(rank: Rank, kinds: Collection[Kind]) -> list[int]:
    """Return the stages of a rank's actions of these kinds."""
    return [stage for kind, stage in rank.stages if kind in kinds]


def _num_frozen(ranks: Sequence[Rank], shape: PipelineShape) -> int:
    """Return how many of the first stages receive no gradient, though they run backwards."""
    if all(rank.kinds.isdisjoint((Kind.B, Kind.I)) for rank in ranks):
        return 0
    receiving = [stage for rank in ranks for stage in _stages(rank, (Kind.RECV_B,))]
    return min(receiving, default=shape.num_stages - 1)
