"""Prove that the lists of all ranks fit together, before anything runs.

    exactly once    every rank has exactly the actions that the schedule asks of it, with the
                    versions it defines
    order           an action comes after the actions on its rank that it needs; collectives come in
                    the order of batches
    transfers       sends and receives of each link come in one order (NCCL has no tags: the i-th
                    matches the i-th)
    items           the items of state that an action accesses are in the fast tier, which never
                    exceeds its budget
    offload         offloaded activations are evicted, and reloaded before their backward, each once
    memory          activations, weight versions and gradients alive at once stay within the
                    schedule's bounds
    no deadlock     the plan runs to its end in the simulator, under the executor's rules. Its ranks
                    may wait for their oldest sends; the report says how many must be allowed to
                    be unfinished (send_window.py)

Together these imply happens-before: F(k) of a stage waits for a receive that F(k) of the previous
stage completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from hybridpar.errors import HybridparError
from hybridpar.schedules.action import NO_VERSION, Action, Plan
from hybridpar.schedules.draw.draw_text import draw_steps, related_step
from hybridpar.schedules.kinds import (
    ACTION_SPECS,
    COMPUTE,
    INPUTS,
    MOVES,
    OFFLOAD_KINDS,
    PER_BATCH,
    PER_ITEM,
    Kind,
)
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.passes.residency import Pool
from hybridpar.schedules.passes.segments import PartCounts, order
from hybridpar.schedules.proof.liveness import Live, live_counts
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, find_schedule
from hybridpar.schedules.simulate.simulator import Costs, StuckError, fitting_send_window


class PlanError(HybridparError):
    """A plan is wrong. `cells` are the (rank, step) at fault; the message draws them."""

    def __init__(self, reason: str, plan: Plan, cells: Sequence[tuple[int, int]]):
        self.reason = reason
        self.cells = tuple(cells)
        super().__init__(f"{reason}\n\n{draw_steps(plan, cells)}")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Proof of a plan: its batches, each rank's peaks, the send window that it needs."""

    schedule: str
    shape: PipelineShape
    first_batch: int
    num_batches: int
    num_actions: int
    peaks: tuple[Live, ...]  # by rank
    send_window: int

    def __str__(self) -> str:
        worst = reduce(Live.peak, self.peaks, Live())
        held = f" on {self.shape.num_ranks} ranks" if self.shape.virtual_stages > 1 else ""
        return (
            f"{self.schedule}, {self.shape.num_stages} stages{held}, {self.shape.num_microbatches} "
            f"micro-batches, batches {self.first_batch} to "
            f"{self.first_batch + self.num_batches - 1}: {self.num_actions} actions are right; at "
            f"most {worst.activations} activations, {worst.versions} weight versions, "
            f"{worst.gradients} gradients"
        )


def check(
    plan: Plan,
    shape: PipelineShape,
    schedule: str | Schedule,
    batches: range | None = None,
    *,
    serial_links: bool = True,
    pools: Mapping[int, Sequence[Pool]] | None = None,
) -> CheckReport:
    """Prove that `plan` runs `batches` (None: all of its forwards) by the schedule's rules.

    The transport is the strictest one that can occur (see simulate): the end stages meet in REDUCE,
    NORM waits for its REDUCE, and, unless `serial_links` is off, the transfers of a rank on one
    axis wait for each other. `pools`: by rank, the items that the plan moves.

    Raises: PlanError at the first fault, with the place drawn; ConfigError if the schedule cannot
    run on this shape.
    """
    schedule = find_schedule(schedule)
    schedule.check_shape(shape)
    p = shape.num_ranks
    if sorted(plan) != list(range(p)):
        raise PlanError(f"the plan has ranks {sorted(plan)}, but parallel.pp = {p}", plan, [])
    if batches is None:
        batches = _batches_of(plan, shape)
    kinds = _kinds_in(plan[0])
    for rank in range(p):
        parts = PartCounts(plan[rank])
        expected = _expected(schedule, shape, rank, batches, kinds, plan[rank])
        _check_complete(
            plan,
            rank,
            (
                replace(action, part=part)
                for action in expected
                for part in order(action.kind, parts.count(action.kind, action.stage))
            ),
        )
        _check_order(plan, rank, shape, parts)
        _check_items(plan, rank, (pools or {}).get(rank, ()))
    for rank in range(p):
        for kind, row in ACTION_SPECS.items():
            if row.matching_recv:
                for receiver, turn in dict.fromkeys(
                    (shape.peer(stage, row.peer_offset), shape.turn(stage))
                    for stage in shape.stages_of(rank)
                ):
                    if receiver is not None:
                        _check_link(plan, shape, kind, (rank, receiver), turn)
    peaks = tuple(_check_memory(plan, rank, schedule, shape, batches.stop) for rank in range(p))
    try:
        send_window = fitting_send_window(
            plan, Costs(tied=True, blocking_norm=True, serial_links=serial_links)
        )
    except StuckError as error:
        cells = [(rank, step) for rank, (step, _) in error.waiting.items()]
        reasons = "; ".join(
            f"rank {rank} at step {step}: {why}" for rank, (step, why) in error.waiting.items()
        )
        raise PlanError(f"deadlock: {reasons}", plan, cells) from None
    num_actions = sum(map(len, plan.values()))
    return CheckReport(
        schedule.name, shape, batches.start, len(batches), num_actions, peaks, send_window
    )


def _batches_of(plan: Plan, shape: PipelineShape) -> range:
    """Return the batches, from the first to the last, that the plan has forwards of."""
    microbatches = [
        action.microbatch
        for actions in plan.values()
        for action in actions
        if action.kind is Kind.F
    ]
    first = min(microbatches, default=0) // shape.num_microbatches
    last = max(microbatches, default=-1) // shape.num_microbatches
    return range(first, last + 1)


def _kinds_in(actions: Sequence[Action]) -> frozenset[Kind]:
    """Return the kinds that a plan consists of: it may leave out NORM or HOST."""
    return frozenset(Kind) - MOVES - ({Kind.NORM, Kind.HOST} - {action.kind for action in actions})


def _expected(
    schedule: Schedule,
    shape: PipelineShape,
    rank: int,
    batches: range,
    kinds: frozenset[Kind],
    actions: Sequence[Action],
) -> Iterator[Action]:
    """Yield all actions of `rank`, undivided, in no particular order: each backward as B, or as I
    and W if `actions` have the I; all moves of activations of which `actions` have one.
    """
    m = shape.num_microbatches
    split = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.I}
    moved = {(a.stage, a.microbatch) for a in actions if a.kind in OFFLOAD_KINDS}
    for stage in shape.stages_of(rank):
        own = [
            (kind, kind in COMPUTE)
            for kind in Kind
            if kind in kinds - PER_BATCH
            and (
                not ACTION_SPECS[kind].peer_offset
                or shape.carries(ACTION_SPECS[kind].flow, stage, ACTION_SPECS[kind].peer_offset)
            )
        ]
        for k in range(batches.start * m, batches.stop * m):
            version = schedule.version(shape, stage, k, batches.start)
            other = {Kind.B} if (stage, k) in split else {Kind.I, Kind.W}
            for kind, computes in own:
                if kind not in other:
                    yield Action(kind, stage, k, version if computes else NO_VERSION)
            for kind in OFFLOAD_KINDS if (stage, k) in moved else ():
                yield Action(kind, stage, k)
    for t in batches:
        for kind in sorted(kinds & PER_BATCH):
            yield Action(kind, rank, t, t + 1 if ACTION_SPECS[kind].makes else NO_VERSION)


_Key = tuple[Kind, int, int, int]


def _key(action: Action) -> _Key:
    return action.kind, action.stage, action.microbatch, action.part


def _check_complete(plan: Plan, rank: int, expected: Iterator[Action]) -> None:
    """Check that every expected action occurs once, and no other action except moves of items."""
    missing = {_key(action): action for action in expected}
    own = {action.stage for action in missing.values()}
    done: dict[_Key, int] = {}
    for step, action in enumerate(plan[rank]):
        key = _key(action)
        if action.kind in PER_ITEM:
            continue
        if own and action.stage not in own:
            reason = f"{action} is on rank {rank}, which does not hold its stage"
            raise PlanError(reason, plan, [(rank, step)])
        if key in done:
            raise PlanError(f"{action} appears twice", plan, [(rank, done[key]), (rank, step)])
        if key not in missing:
            raise PlanError(f"{action} does not belong in this plan", plan, [(rank, step)])
        if action.version != missing[key].version:
            reason = f"{action} has the wrong version; it must be {missing[key]}"
            raise PlanError(reason, plan, [(rank, step)])
        done[key] = step
        del missing[key]
    if missing:
        action = next(iter(missing.values()))
        raise PlanError(f"{action} is missing", plan, [(rank, related_step(plan[rank], action))])


def _check_order(plan: Plan, rank: int, shape: PipelineShape, parts: PartCounts) -> None:
    """Check that the actions that an action needs on its own rank come before it."""
    steps = {_key(action): step for step, action in enumerate(plan[rank])}
    for step, action in enumerate(plan[rank]):
        for key in _needs(action, shape, parts):
            if steps.get(key, -1) > step:
                reason = f"{action} comes before {plan[rank][steps[key]]}, which it needs"
                raise PlanError(reason, plan, [(rank, step), (rank, steps[key])])


def _needs(action: Action, shape: PipelineShape, parts: PartCounts) -> Iterator[_Key]:
    """Yield the actions that come before this one on its rank: the update of its weights; for a
    segment, the previous segment; for the first segment, the inputs of all.
    """
    m = shape.num_microbatches
    k = action.microbatch
    stage = action.stage
    row = ACTION_SPECS[action.kind]
    if row.per_item:
        return
    for kind in () if row.per_batch else PER_BATCH.intersection(row.needs):
        stages = shape.stages_of(shape.rank_of(stage))
        yield kind, stages[0], action.version - 1, parts.needed(kind, action, stages)
    if action.kind is Kind.UPDATE:  # each part waits for its own
        yield Kind.HOST, stage, k, min(action.part, parts.last(Kind.HOST, stage))
    if action.part != parts.first(action.kind, stage):
        yield action.kind, stage, k, action.part - row.cut
        return
    for kind in set(row.needs) - {Kind.HOST}:
        if ACTION_SPECS[kind].per_batch == row.per_batch:
            yield kind, stage, k, parts.last(kind, stage)
            if (
                kind is row.receive
                and (beside := _beside(stage, ACTION_SPECS[kind].peer_offset, shape)) is not None
            ):
                for other in (kind for kind in INPUTS if ACTION_SPECS[kind].receive is row.receive):
                    yield other, beside, k, parts.last(other, beside)
        elif row.per_batch:
            for own in shape.stages_of(shape.rank_of(stage)):
                for microbatch in range(k * m, (k + 1) * m):
                    yield kind, own, microbatch, parts.last(kind, own)
    if row.per_batch:
        yield action.kind, stage, k - 1, parts.last(action.kind, stage)
    if row.after is not None:
        yield row.after, stage, k - 1, parts.last(row.after, stage)


def _beside(stage: int, side: int, shape: PipelineShape) -> int | None:
    """Return the stage's neighbour on that side, if it is on the same rank; None otherwise."""
    there = 0 <= stage + side < shape.num_stages and shape.peer(stage, side) is None
    return stage + side if there else None


def _check_items(plan: Plan, rank: int, pools: Sequence[Pool]) -> None:
    """Prove that what an action accesses is in its fast tier and within room, and moves can run."""
    items = FastTiers(pools)
    for step, action in enumerate(plan[rank]):
        fault = ""
        if action.kind in PER_ITEM and (not pools or action.stage != rank):
            why = "which does not hold its stage" if pools else "where nothing moves"
            fault = f"{action} is on rank {rank}, {why}"
        if fault := fault or items.follow(action):
            raise PlanError(fault, plan, [(rank, step)])


def _check_link(
    plan: Plan, shape: PipelineShape, kind: Kind, ranks: tuple[int, int], turn: int
) -> None:
    """Check that the i-th send of one rank to another, of a turn, matches its i-th receive."""
    row = ACTION_SPECS[kind]
    sender, receiver = ranks

    def steps(rank: int, kind: Kind | None, offset: int, peer: int) -> list[int]:
        return [
            step
            for step, action in enumerate(plan[rank])
            if action.kind is kind
            and shape.turn(action.stage) == turn
            and shape.peer(action.stage, offset) == peer
        ]

    sent = steps(sender, kind, row.peer_offset, receiver)
    received = steps(receiver, row.matching_recv, -row.peer_offset, sender)
    for i, j in zip(sent, received, strict=True):
        one = plan[sender][i]
        other = plan[receiver][j]
        if (one.stage + row.peer_offset, one.microbatch) != (other.stage, other.microbatch):
            reason = f"{one} of rank {sender} would be matched with {other} of rank {receiver}"
            raise PlanError(reason, plan, [(sender, i), (receiver, j)])


def _check_memory(
    plan: Plan, rank: int, schedule: Schedule, shape: PipelineShape, next_batch: int
) -> Live:
    """Return the peaks of one rank after checking them against the bounds. The versions that the
    next batch needs count to the end.
    """
    first_needed = schedule.version(shape, rank, next_batch * shape.num_microbatches, next_batch)
    keep = range(first_needed, next_batch + 1)
    bound = Live(
        schedule.max_live_activations(shape, rank),
        schedule.max_live_versions(shape, rank),
        schedule.num_gradient_buffers,
    )
    peak = Live()
    for step, live in enumerate(live_counts(plan[rank], shape.num_microbatches, keep)):
        peak = peak.peak(live)
        if peak.peak(bound) != bound:
            held = f"rank {rank} holds {live} after {plan[rank][step]}"
            reason = f"{held}, but schedule {schedule.name} allows {bound}"
            raise PlanError(reason, plan, [(rank, step)])
    return peak
