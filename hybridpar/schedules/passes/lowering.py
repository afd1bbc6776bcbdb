"""Passes from the compute actions of one rank to its complete list of actions. Iterator in,
iterator out.

    compute_actions     F7v0  B4v0  F8v1  B5v0          stage 0 of 2bw with p = m = 4, all @0
    add_updates         F7v0  B4v0  UPDATE0  F8v1  B5v0
    add_communication   F7v0  SEND_F7  B4v0  RECV_B5  UPDATE0  F8v1  SEND_F8  RECV_B6  B5v0

With a host optimizer, which gets most of the slack, an UPDATE only waits; 2bw, one rank, m = 4:

    F3 B3 REDUCE0 NORM0 F4 HOST0 B4  F5 B5  F6 B6  F7 B7 REDUCE1  UPDATE0  F8v1     HOST0: the host makes W(1)

split_backward, if requested, is the first pass: I4v0 W4v0 replace B4v0. With a zero bubble
delay_weight_gradients is the second. merge_backward, after the transfers are added, joins an I and
W that have stayed together into one B again. add_offload (offload.py) follows these, and divide
(segments.py) is last: F7v0 F7.1v0 replace F7v0. A rank sees only its own list, so a plan may be
endless; `check` proves that the lists of all ranks fit together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial

from hybridpar.schedules.action import NO_VERSION, Action
from hybridpar.schedules.kinds import ACTION_SPECS, INPUTS, Kind
from hybridpar.schedules.orders.interleaved import Receives, forward_order
from hybridpar.schedules.passes.offload import add_offload, num_away
from hybridpar.schedules.passes.segments import WHOLE, Division
from hybridpar.schedules.passes.segments import divide as divide
from hybridpar.schedules.schedule_table import (
    PipelineShape,
    Schedule,
    ScheduleOptions,
    find_schedule,
)


def split_backward(actions: Iterable[Action]) -> Iterator[Action]:
    """Split each B of one rank's compute actions into I and W.

    W follows its I. The gradient that I computes for the previous stage is sent in between
    (`add_communication`), earlier than after a B by the time of W. Transfers keep their order, so
    properties of a plan's links also hold after the split.
    """
    for action in actions:
        if action.kind is Kind.B:
            yield Action(Kind.I, action.stage, action.microbatch, action.version)
            yield Action(Kind.W, action.stage, action.microbatch, action.version)
        else:
            yield action


def delay_weight_gradients(
    actions: Iterable[Action], delay: int, num_backwards: int
) -> Iterator[Action]:
    """Move each W of a rank's actions behind the next `delay` I, if its batch has so many.

        1f1b, p = 4, rank 3, delay 3    F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 .. W5

    So the gradients that other ranks wait for come first, and weight gradients fill the time in
    which the pipeline drains. Their order stays, and with it the order of accumulation.
    `num_backwards`: backwards of the rank in a batch.

    Source: ZB-H1, arXiv 2401.10241, section 2.2.
    """
    waiting: deque[Action] = deque()
    left = num_backwards
    for action in actions:
        if action.kind is not Kind.W:
            yield action
            continue
        waiting.append(action)
        left -= 1
        while len(waiting) > delay or (waiting and not left):
            yield waiting.popleft()
        left = left or num_backwards


def add_updates(
    actions: Iterable[Action], schedule: Schedule, shape: PipelineShape, first_batch: int = 0
) -> Iterator[Action]:
    """Add REDUCE, NORM, HOST and UPDATE of each batch to the compute actions of one rank.

    REDUCE(t) follows the last backward of batch t. UPDATE(t) comes right before the first forward
    that needs W(t+1), or the first backward that needs its gradient buffer; if the range ends
    without one, right before the place where it would have been, or at the end. NORM(t) lies
    between, `schedule.norm_delay` after REDUCE(t) or at UPDATE(t), whichever is first, so at most
    one NORM is pending. All three come in the order of t.

    Options of the schedule decide the rest. Without `clip` there is no NORM: UPDATE waits only for
    the gradients of its own stage (pipedream's stages then never wait for each other). With
    `gather` UPDATE(t) also starts to gather W(t+1) from the replicas, for which the first use
    waits; so it comes `schedule.update_delay` after REDUCE(t) if that is earlier.

    `host` is the share of the slack that the host has to make the new weights; 0: no host
    optimizer. HOST(t) starts the host's step: `schedule.host_delay` after REDUCE(t), once W(t) is
    made, or at UPDATE(t), which then waits for the host.

    With `feedback` UPDATE(t) commits the unsent rest that REDUCE(t+1) adds to its gradients, so it
    comes before the last backward of batch t+1; with a host, HOST(t) does.
    """
    options = schedule.options
    host = options.host
    assert options.clip or not host, "the host waits for the norm"
    m = shape.num_microbatches
    of_batch = 2 * schedule.pairs(shape)
    # constant for a stage, but requested with every action
    update_delay = cache(partial(schedule.update_delay, shape))
    norm_delay = cache(partial(schedule.norm_delay, shape, gather=options.gather, host=host))
    host_delay = cache(partial(schedule.host_delay, shape, host=host))
    reduced = normed = hosted = updated = first_batch  # the first batch without this action
    # the rank's first stage
    stage = 0
    first = True
    completing = ACTION_SPECS[Kind.REDUCE].needs
    adding = {kind for kind, row in ACTION_SPECS.items() if row.adds}
    alike = schedule.flush and not host  # a batch changes only at its last backwards

    def update(batch: int) -> Iterator[Action]:
        if options.clip and batch >= normed:
            yield Action(Kind.NORM, stage, batch)
        if host and batch >= hosted:
            yield Action(Kind.HOST, stage, batch, batch + 1)
        yield Action(Kind.UPDATE, stage, batch, batch + 1)

    for action in actions:
        if first:
            stage = shape.rank_of(action.stage)
            first = False
        is_last = action.kind in adding and (action.microbatch + 1) % m == 0
        if alike and action.version <= updated and normed == reduced and not is_last:
            yield action
            continue
        needed = action.version
        if not schedule.flush:
            needed = _needed_version(action, schedule, shape, first_batch)
        settled = action.microbatch // m if options.feedback and is_last else first_batch
        if not host:
            needed = max(needed, settled)
        # if the pipeline drains, all updates come as early as possible
        position = 0 if schedule.flush else schedule.position(shape, action)
        early = options.gather and not schedule.flush and updated < reduced
        if early and position - of_batch * (updated + 1) >= update_delay(stage):
            needed = max(needed, updated + 1)
        for batch in range(updated, needed):
            yield from update(batch)
        updated = max(updated, needed)
        normed = max(normed, needed)
        hosted = max(hosted, needed)
        if host and hosted == updated < settled:
            if normed == hosted:
                yield Action(Kind.NORM, stage, normed)
                normed += 1
            yield Action(Kind.HOST, stage, hosted, hosted + 1)
            hosted += 1
        if options.clip and normed < reduced and position - of_batch * reduced >= norm_delay(stage):
            yield Action(Kind.NORM, stage, normed)
            normed += 1
        if (
            host
            and hosted == updated < normed
            and position - of_batch * normed >= host_delay(stage)
        ):
            yield Action(Kind.HOST, stage, hosted, hosted + 1)
            hosted += 1
        yield action
        if action.kind in completing and (action.microbatch + 1) % m == 0 and action.stage == stage:
            yield Action(Kind.REDUCE, stage, reduced)
            reduced += 1
    for batch in range(updated, reduced):
        yield from update(batch)


def _needed_version(
    action: Action, schedule: Schedule, shape: PipelineShape, first_batch: int
) -> int:
    """Return the version that must exist when an action of a schedule that never flushes starts.

    While it drains, the forward that would have come before a backward counts, so that updates run
    in the gaps of the drain rather than after it. A backward also needs a gradient buffer, which an
    update frees.
    """
    if action.kind is Kind.F:
        return action.version
    next_forward = schedule.forwards_before(shape, action)
    emptied = action.microbatch // shape.num_microbatches + 1 - schedule.num_gradient_buffers
    return max(schedule.version(shape, action.stage, next_forward, first_batch), emptied)


def add_communication(
    actions: Iterable[Action],
    shape: PipelineShape,
    *,
    ahead: int = 1,
    lean: bool = False,
    endless: bool = False,
) -> Iterator[Action]:
    """Add the receive and the send of each computation to one rank's actions.

    A send directly follows its F, B or I. A receive is posted `ahead` computations before its use
    (W, which needs none, does not count), that is, before the computation `ahead` places earlier
    starts, so the transfer overlaps with it (0: right before its use). More than 1 can deadlock if
    all transfers of a rank on one axis share a queue, as with NCCL: a send then stands behind a
    receive that only the effect of this send can complete. `check` detects this. The same happens
    in a ring if a receive stands before any earlier send, so there none is posted before these.
    `lean`, `endless`: see Receives.
    """
    window: deque[Action] = deque()
    receives = Receives(shape, lean=lean, endless=endless)
    is_ring = shape.is_ring
    sent: dict[tuple[Kind, int], Kind | None] = {}
    for kind in INPUTS:
        for stage in range(shape.num_stages):
            flow = ACTION_SPECS[kind].flow
            sends = shape.carries(flow, stage, flow)
            sent[kind, stage] = ACTION_SPECS[kind].send if sends else None
    # computations in the window, by kind and in total
    computing = dict.fromkeys(INPUTS, 0)
    number = 0

    def leave() -> tuple[Action, ...]:
        nonlocal number
        head = window.popleft()
        if (kind := head.kind) not in computing:
            return (head,)
        computing[kind] -= 1
        number -= 1
        send = sent[kind, head.stage]
        return (head,) if send is None else (head, Action(send, head.stage, head.microbatch))

    for action in actions:
        if action.kind not in computing:
            window.append(action)
            continue
        while is_ring and computing[action.kind]:
            yield from leave()
        receive = ACTION_SPECS[action.kind].receive
        assert receive is not None, "INPUTS receive"
        for stage, microbatch in receives.arriving(action):
            yield Action(receive, stage, microbatch)
        window.append(action)
        computing[action.kind] += 1
        number += 1
        while number > ahead:
            yield from leave()
    while window:
        yield from leave()


def merge_backward(actions: Iterable[Action], shape: PipelineShape) -> Iterator[Action]:
    """Merge each I with the W that follows it into one B, if no other rank waits for I.

    No rank waits for a stage that sends no gradient, such as the first one, or whose gradient goes
    to the same rank. At most receives may be in between. They are posted before the B: after it, a
    distant sender would learn of them late.
    """
    held: list[Action] = []  # an I, and the receives since
    unsent = {stage for stage in range(shape.num_stages) if not shape.carries(-1, stage, -1)}
    for action in actions:
        if not held and action.kind is not Kind.I:
            yield action
            continue
        if held and action.kind in (Kind.RECV_F, Kind.RECV_B):
            held.append(action)
            continue
        if (
            held
            and action.kind is Kind.W
            and (action.stage, action.microbatch) == (held[0].stage, held[0].microbatch)
        ):
            yield from held[1:]
            yield Action(Kind.B, action.stage, action.microbatch, action.version)
            held = []
            continue
        yield from held
        held = [action] if action.kind is Kind.I and action.stage in unsent else []
        if not held:
            yield action
    yield from held


def lower(
    schedule: str | ScheduleOptions | Schedule,
    shape: PipelineShape,
    rank: int,
    first_batch: int = 0,
    num_batches: int | None = None,
    parts: int | Division = 1,
) -> Iterator[Action]:
    """Yield all actions of one rank for batches [first_batch, first_batch + num_batches), lazily.

    The pipeline is drained and all updates are applied at both ends of the range; None means
    without end. The schedule's options say which passes run. `parts`: segments of each stage, or a
    Division.

    Raises: ConfigError, at once, if the schedule cannot run on this shape or with this division.
    """
    schedule = find_schedule(schedule)
    division = _division(parts, shape, rank, updates_wait=schedule.options.host > 0)
    compute = schedule.compute_actions(shape, rank, first_batch, num_batches)
    split = schedule.options.split or schedule.options.zero_bubble
    if split:
        compute = split_backward(compute)
    if delay := schedule.weight_delay(shape, rank):
        compute = delay_weight_gradients(
            compute, delay, shape.num_microbatches * shape.virtual_stages
        )
    actions = add_updates(compute, schedule, shape, first_batch)
    apart = schedule.warmup(shape, 0) - schedule.warmup(shape, shape.num_ranks - 1)
    actions = add_communication(
        actions,
        shape,
        ahead=schedule.receive_ahead,
        lean=bool(schedule.order) or apart < shape.num_ranks,
        endless=not schedule.flush,
    )
    if split:
        actions = merge_backward(actions, shape)
    in_flight = schedule.max_live_activations(shape, rank)
    actions = add_offload(actions, num_away(schedule, shape, rank), in_flight)
    return actions if division == WHOLE else divide(actions, division)


def _division(
    parts: int | Division, shape: PipelineShape, rank: int, *, updates_wait: bool = False
) -> Division:
    division = Division(parts) if isinstance(parts, int) else parts
    return division if division == WHOLE else division.on(shape, rank, updates_wait=updates_wait)


def make_plan(
    schedule: str | ScheduleOptions | Schedule,
    shape: PipelineShape,
    first_batch: int = 0,
    num_batches: int = 1,
    parts: int | Division = 1,
) -> dict[int, tuple[Action, ...]]:
    """Return the lists of all ranks, for check, simulate and draw."""
    return {
        rank: tuple(lower(schedule, shape, rank, first_batch, num_batches, parts))
        for rank in range(shape.num_ranks)
    }


def forward_actions(
    shape: PipelineShape,
    rank: int,
    num_microbatches: int,
    *,
    version: int = NO_VERSION,
    parts: int | Division = 1,
) -> Iterator[Action]:
    """Yield a rank's forwards of an evaluation, with `version`. Raises: ConfigError, at once."""
    division = _division(parts, shape, rank)
    order = forward_order(shape, rank, num_microbatches)
    forwards = (Action(Kind.F, stage, k, version) for stage, k in order)
    actions = add_communication(forwards, shape)
    return actions if division == WHOLE else divide(actions, division)
