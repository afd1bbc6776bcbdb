"""Passes: from the compute actions of one rank to everything it does. Iterator in, iterator out.

    compute_actions     F7v0  B4v0  F8v1  B5v0          stage 0 of 2bw with p = m = 4, all @0
    add_updates         F7v0  B4v0  UPDATE0  F8v1  B5v0
    add_communication   F7v0  SEND_F7  B4v0  RECV_B5  UPDATE0  F8v1  SEND_F8  RECV_B6  B5v0

A rank sees only its own list, so a plan may be endless; `check` proves that the lists of all ranks fit together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial

from hybridpar.pipeline.plan.action import COMPUTE, NO_VERSION, Action, Kind
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, find_schedule


def add_updates(
    actions: Iterable[Action], schedule: Schedule, sizes: Sizes, first_batch: int = 0, *, clip: bool = True,
    gather: bool = False,
) -> Iterator[Action]:
    """Adds REDUCE, NORM and UPDATE of each batch to the compute actions of one rank.

    REDUCE(t) follows the last backward of batch t. UPDATE(t) comes right before the first forward that needs W(t+1),
    or the first backward that needs its gradient buffer; where the range ends without one, right before the place where
    it would have been, or last of all. NORM(t) lies between, `schedule.norm_delay` after REDUCE(t) or at UPDATE(t),
    whichever is first, so at most one NORM is pending. All three come in the order of t.

    `clip=False` leaves NORM out: UPDATE waits for its own stage's gradients only (pipedream's stages then never wait
    for each other). `gather`: UPDATE(t) also starts to gather W(t+1) from the replicas, for which the first use waits;
    so it comes `schedule.update_delay` after REDUCE(t) if that is earlier.
    """
    m = sizes.num_microbatches
    # of a stage they are always the same, and are asked for with every action
    update_delay = cache(partial(schedule.update_delay, sizes))
    norm_delay = cache(partial(schedule.norm_delay, sizes, gather=gather))
    reduced = normed = updated = first_batch  # the first batch that has not got there yet
    stage = 0
    for action in actions:
        stage = action.stage
        needed = _needed_version(action, schedule, sizes, first_batch)
        position = _position(action, schedule, sizes)
        if gather and updated < reduced and position - 2 * m * (updated + 1) >= update_delay(stage):
            needed = max(needed, updated + 1)
        for batch in range(updated, needed):
            yield from _update(stage, batch, with_norm=clip and batch >= normed)
        updated, normed = max(updated, needed), max(normed, needed)
        if clip and normed < reduced and position - 2 * m * reduced >= norm_delay(stage):
            yield Action(Kind.NORM, stage, normed)
            normed += 1
        yield action
        if action.kind in (Kind.B, Kind.W) and (action.microbatch + 1) % m == 0:
            yield Action(Kind.REDUCE, stage, reduced)
            reduced += 1
    for batch in range(updated, reduced):
        yield from _update(stage, batch, with_norm=clip and batch >= normed)


def _position(action: Action, schedule: Schedule, sizes: Sizes) -> int:
    """Where the action stands in an endless row of forwards and backwards by turns: backward k at 2k + 1."""
    if action.kind is Kind.F:
        return 2 * (action.microbatch - schedule.warmup(sizes, action.stage))
    return 2 * action.microbatch + 1


def _update(stage: int, batch: int, with_norm: bool) -> Iterator[Action]:
    if with_norm:
        yield Action(Kind.NORM, stage, batch)
    yield Action(Kind.UPDATE, stage, batch, batch + 1)


def _needed_version(action: Action, schedule: Schedule, sizes: Sizes, first_batch: int) -> int:
    """The version that must exist when `action` starts.

    While a schedule that never flushes drains, the forward that would have come before a backward counts: so updates
    run in the gaps of the drain rather than after it. And a backward needs a gradient buffer, which an update empties.
    """
    if action.kind is Kind.F or schedule.flush:
        return action.version
    next_forward = action.microbatch + schedule.warmup(sizes, action.stage)
    emptied = action.microbatch // sizes.num_microbatches + 1 - schedule.num_gradient_buffers
    return max(schedule.version(sizes, action.stage, next_forward, first_batch), emptied)


def add_communication(actions: Iterable[Action], sizes: Sizes, *, ahead: int = 1) -> Iterator[Action]:
    """Adds to one rank's actions the receive of what each F and B needs, and the send of what it makes.

    A send directly follows its F or B. A receive is posted `ahead` compute actions before its use, that is, before the
    compute action `ahead` places earlier starts, so the transfer overlaps with it (0: right before its use). More
    than 1 can deadlock where all transfers of a rank on one axis share a queue, as with NCCL: a send then stands behind
    a receive that its own effect must fill. `check` finds out.
    """
    window: deque[Action] = deque()
    num_compute = 0  # in the window
    for action in actions:
        if action.kind in COMPUTE:
            yield from _receives(action, sizes)
            num_compute += 1
        window.append(action)
        while num_compute > ahead:
            head = window.popleft()
            yield head
            if head.kind in COMPUTE:
                num_compute -= 1
                yield from _sends(head, sizes)
    for action in window:
        yield action
        yield from _sends(action, sizes)


_TRANSFERS = {  # compute action: what brings its input, what takes its output away
    Kind.F: (Kind.RECV_F, Kind.SEND_F),
    Kind.B: (Kind.RECV_B, Kind.SEND_B),
    Kind.I: (Kind.RECV_B, Kind.SEND_B),
}


def _receives(action: Action, sizes: Sizes) -> Iterator[Action]:
    source = 0 if action.kind is Kind.F else sizes.num_stages - 1  # the stage that has its input itself
    if action.kind in _TRANSFERS and action.stage != source:
        yield Action(_TRANSFERS[action.kind][0], action.stage, action.microbatch)


def _sends(action: Action, sizes: Sizes) -> Iterator[Action]:
    sink = sizes.num_stages - 1 if action.kind is Kind.F else 0  # the stage that keeps its output
    if action.kind in _TRANSFERS and action.stage != sink:
        yield Action(_TRANSFERS[action.kind][1], action.stage, action.microbatch)


def lower(
    schedule: str | Schedule, sizes: Sizes, stage: int, first_batch: int = 0, num_batches: int | None = None, *,
    clip: bool = True, gather: bool = False, ahead: int | None = None,
) -> Iterator[Action]:
    """Yields everything that one rank does for batches [first_batch, first_batch + num_batches), lazily.

    The pipeline is drained and all updates are applied at both ends of the range; None means without end. `clip` and
    `gather`: see `add_updates`. `ahead`: see `add_communication`; None: what the schedule can bear on every transport.

    Raises: ConfigError, at once, if the schedule is unknown or cannot run on these sizes.
    """
    schedule = find_schedule(schedule)
    compute = schedule.compute_actions(sizes, stage, first_batch, num_batches)
    ahead = schedule.receive_ahead if ahead is None else ahead
    actions = add_updates(compute, schedule, sizes, first_batch, clip=clip, gather=gather)
    return add_communication(actions, sizes, ahead=ahead)


def make_plan(
    schedule: str | Schedule, sizes: Sizes, first_batch: int = 0, num_batches: int = 1, *, clip: bool = True,
    gather: bool = False, ahead: int | None = None,
) -> dict[int, tuple[Action, ...]]:
    """The lists of all ranks, for check, simulate and draw; a rank that runs needs only its own `lower`."""
    return {
        stage: tuple(lower(schedule, sizes, stage, first_batch, num_batches, clip=clip, gather=gather, ahead=ahead))
        for stage in range(sizes.num_stages)
    }


def forward_actions(
    sizes: Sizes, stage: int, num_microbatches: int, *, version: int = NO_VERSION, ahead: int = 1
) -> Iterator[Action]:
    """Yields one rank's actions of an evaluation: micro-batches [0, num_microbatches) forward, all with `version`."""
    forwards = (Action(Kind.F, stage, k, version) for k in range(num_microbatches))
    return add_communication(forwards, sizes, ahead=ahead)
