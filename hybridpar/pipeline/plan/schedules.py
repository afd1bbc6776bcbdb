"""Pipeline schedules: the order in which a stage computes, and the weights it computes with.

All of them are one pattern, `warmup` forwards ahead, then forward and backward by turns, then the
remaining backwards, and differ in how far they run ahead and in whether they drain between batches.
Three stages, three micro-batches in a batch; a backward takes two forwards; * is the update of the
weights:

    naive: warmup 0, drains (one batch)
    stage 0  F0                   B0--- F1                   B1--- F2                   B2---*
    stage 1     F0          B0---          F1          B1---          F2          B2---      *
    stage 2        F0 B0---                   F1 B1---                   F2 B2---            *

    gpipe: warmup m, drains (two batches)
    stage 0  F0 F1 F2                   B0--- B1--- B2---*F3 F4 F5                   B3--- B4--- B5---*
    stage 1     F0 F1 F2          B0--- B1--- B2---      *   F3 F4 F5          B3--- B4--- B5---      *
    stage 2        F0 F1 F2 B0--- B1--- B2---            *      F3 F4 F5 B3--- B4--- B5---            *

    1f1b: warmup p-1-r, drains (two batches)
    stage 0  F0 F1 F2             B0---    B1---    B2---*F3 F4 F5             B3---    B4---    B5---*
    stage 1     F0 F1       B0--- F2 B1---    B2---      *   F3 F4       B3--- F5 B4---    B5---      *
    stage 2        F0 B0--- F1 B1--- F2 B2---            *      F3 B3--- F4 B4--- F5 B5---            *

    2bw: warmup p-1-r, drains at the end only (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2--- F5 B3---*F6 B4--- F7 B5--- F8 B6---*   B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4---*F6 B5--- F7 B6--- F8 B7---*   B8---      *
    stage 2        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*           *

    pipedream: as 2bw, but a stage updates at once and goes on with what it has (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2---*F5 B3--- F6 B4--- F7 B5---*F8 B6---    B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2---*F4 B3--- F5 B4--- F6 B5---*F7 B6--- F8 B7---    B8---*
    stage 2        F0 B0--- F1 B1--- F2 B2---*F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*

    2bw, early_switch 0: only what is in flight at an update uses older weights, on all stages alike
    (three batches)
    stage 0  F0 F1 F2             B0--- F3 B1--- F4 B2---*F5 B3--- F6 B4--- F7 B5---*F8 B6---    B7---    B8---*
    stage 1     F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---*F5 B4--- F6 B5--- F7 B6---*F8 B7---    B8---      *
    stage 2        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---*F5 B5--- F6 B6--- F7 B7---*F8 B8---            *

    2bw, two stages, where a transfer takes as long as a forward: warm-up for depth (two batches)
    stage 0  F0 F1             B0--- F2 B1--- F3       B2--- F4 B3--- F5       B4---*   B5---*
    stage 1        F0 B0--- F1 B1---       F2 B2--- F3 B3---       F4 B4--- F5 B5---*        *

    ... and for latency: warmup 2(p-1-r) (three batches)
    stage 0  F0 F1 F2          B0--- F3 B1--- F4 B2--- F5 B3---*F6 B4--- F7 B5--- F8 B6---*   B7---    B8---*
    stage 1        F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*F6 B6--- F7 B7--- F8 B8---*        *

r is the stage, p = num_stages, m = num_microbatches (of one batch in one pipeline), k a
micro-batch, t a batch. Where a rank holds several chunks of the model, what it does has another
order: interleaved.py, vee.py. One's own is in the configuration: order.py; fill.py makes such
orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hybridpar.config import PipelineConfig
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.pipeline.plan import interleaved, vee
from hybridpar.pipeline.plan import order as own_order
from hybridpar.pipeline.plan.interleaved import SizeOf
from hybridpar.pipeline.plan.schedule import Schedule as Schedule
from hybridpar.pipeline.plan.sizes import Sizes as Sizes


def _synchronous_version(
    schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int
) -> int:
    """Batch t uses W(t)."""
    return microbatch // sizes.num_microbatches


def _double_buffered_version(
    schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int
) -> int:
    """Batch t uses W(t-1), batches up to sync_steps W(t): on every stage, whenever the pipeline was
    drained.

    With early_switch L the first p-1+L micro-batches do, which is at least what is in flight at an
    update; the others of batch t use W(t).
    """
    batch, index = divmod(microbatch, sizes.num_microbatches)
    stale = schedule.early_switch is None or index < sizes.num_stages - 1 + schedule.early_switch
    return batch - 1 if stale and batch > schedule.sync_steps else batch


def _latest_version(
    schedule: Schedule, sizes: Sizes, stage: int, microbatch: int, first_batch: int
) -> int:
    """Each stage uses the latest weights it has: k - (p-1-r) backwards are behind it when it starts
    micro-batch k."""
    return max((microbatch - _depth_below(sizes, stage)) // sizes.num_microbatches, first_batch)


def _depth_below(sizes: Sizes, stage: int) -> int:
    """p-1-r: how many stages follow this one, which is what 1F1B runs ahead."""
    return sizes.num_stages - 1 - stage


def _stashed_versions(sizes: Sizes, stage: int) -> int:
    """p-r micro-batches are in flight, and m in a row share a version."""
    return -(-_depth_below(sizes, stage) // sizes.num_microbatches) + 1


def _constant(value: int) -> SizeOf:
    return lambda sizes, stage: value


def _synchronous(name: str, source: str, warmup: SizeOf, *options: str) -> Schedule:
    return Schedule(
        name, source, True, warmup, _synchronous_version, _constant(1), options=frozenset(options)
    )


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _synchronous("naive", "one micro-batch in the whole pipeline at a time", _constant(0)),
        _synchronous(
            "gpipe",
            "GPipe, arXiv 1811.06965, figure 2",
            lambda sizes, stage: sizes.num_microbatches,
        ),
        _synchronous(
            "1f1b",
            "PipeDream-Flush, arXiv 2006.09503, section 3.2",
            interleaved.runs_ahead(1),
            "warmup",
            "zero_bubble",
            "placement",
        ),
        _synchronous(
            "interleaved",
            "interleaved 1F1B, arXiv 2104.04473, section 2.2",
            interleaved.runs_ahead(2),
            "chunks",
            "zero_bubble",
        ),
        Schedule(
            "2bw",
            "PipeDream-2BW, arXiv 2006.09503, section 3.1",
            False,
            interleaved.runs_ahead(1),
            _double_buffered_version,
            _constant(2),
            num_gradient_buffers=2,
            needs_full_pipeline=True,
            options=frozenset({"warmup", "early_switch", "sync_steps", "placement", "chunks"}),
        ),
        Schedule(
            "pipedream",
            "PipeDream with weight stashing, arXiv 1806.03377",
            False,
            _depth_below,
            _latest_version,
            _stashed_versions,
            options=frozenset({"sync_steps"}),
            # Receives posted early may stand before a send that another stage needs for its update,
            # which this one waits for: check finds that deadlock where an axis has one
            # communicator.
            receive_ahead=0,
        ),
    )
}

OWN = _synchronous("own", "pipeline.order", _constant(0), "order", "chunks", "placement")
"""Ones of the user's, which an order makes (`make_schedule`)."""
WARMUPS = {"depth": 1, "latency": 2, "bandwidth": 3}
"""By name k, where stage r runs k(p-1-r) forwards ahead. 3 keeps a link busy all the time: no more
is worth while."""


def make_schedule(
    name: str,
    *,
    warmup: str = "depth",
    early_switch: int | None = None,
    gradient_buffers: int = 0,
    sync_steps: int = 0,
    chunks: int = 0,
    zero_bubble: bool = False,
    placement: str = "loop",
    activations: str = "full",
    order: Sequence[str] = (),
) -> Schedule:
    """The schedule of that name with its options: the keys of the configuration's section
    `pipeline`. (How many chunks a rank holds is then one of the sizes.)

    Raises: ConfigError with every option that it does not know or that has no such value.
    """
    schedule = find_schedule(name)
    factor = WARMUPS.get(warmup, 0)
    most = schedule.num_gradient_buffers
    # With fewer than it can use all stages stop at the same backward. What a longer warm-up has in
    # flight cannot pass those that have stopped where the transfers of a rank on an axis queue:
    # check finds deadlocks from 4 stages on. Nor can what the next batch has in flight where a rank
    # holds several stages.
    buffers = (0, most) if factor > 1 or chunks > 1 else range(most + 1)
    # nor can it pass a drain, or what goes round, where it is long
    warmups = [name for name, k in WARMUPS.items() if k < 3 or not (schedule.flush or chunks > 1)]
    options = {  # value, the one that changes nothing, whether it is allowed, the rule
        "warmup": (
            warmup,
            "depth",
            warmup in warmups,
            f"must be {' or '.join(warmups)} with schedule {name}",
        ),
        "early_switch": (early_switch, None, (early_switch or 0) >= 0, "must be off or at least 0"),
        "gradient_buffers": (
            gradient_buffers,
            gradient_buffers,
            gradient_buffers in buffers,
            f"must be {' or '.join(map(str, buffers))} with schedule {name} and pipeline.warmup = "
            f"{warmup!r}",
        ),
        "sync_steps": (sync_steps, 0, sync_steps >= 0, "must not be negative"),
        "zero_bubble": (
            zero_bubble,
            False,
            not zero_bubble or placement != "v",
            "is what the order of a V does of itself",
        ),
        "placement": (placement, "loop", True, ""),
        "activations": (
            activations,
            activations,
            placement != "v" or schedule.flush or activations in vee.ENDLESS,
            f"must be {' or '.join(vee.ENDLESS)} with schedule {name}, which never drains",
        ),
        "order": (
            tuple(order),
            (),
            bool(order) == (name == "own"),
            "must name what each rank computes with schedule own",
        ),
        "chunks": (
            chunks,
            0,
            chunks != 1 and (placement == "loop" or chunks % 2 == 0),
            "must be at least 2, or 0 for the default, and even with pipeline.placement = v",
        ),
    }
    problems = []
    for option, (value, default, allowed, rule) in options.items():
        known = schedule.options | ({"chunks"} if placement == "v" and schedule.flush else set())
        if value != default and option not in known:
            knowing = [
                other.name for other in (*SCHEDULES.values(), OWN) if option in other.options
            ]
            allowed = False
            rule = f"schedule {name} has no such option, only {' and '.join(knowing)}"
        if not allowed:
            works = {
                "warmup": "depth",
                "early_switch": "off",
                "zero_bubble": "false",
                "placement": "loop",
                "activations": "half",
                "order": own_order.EXAMPLE if name == "own" else "[]",
            }.get(option, "0")
            problems.append(Problem(f"pipeline.{option}", value, rule, works))
    if problems:
        raise ConfigError(*problems)
    if order:
        steps = tuple(own_order.parse_order(line, rank) for rank, line in enumerate(order))
        return replace(
            schedule, order=steps, warmup=lambda sizes, rank: own_order.runs_ahead(steps[rank])
        )
    ahead = interleaved.runs_ahead(factor) if factor > 1 else schedule.warmup
    if (
        zero_bubble and "chunks" in schedule.options
    ):  # where a backward to the input comes back in half of the time
        ahead = interleaved.runs_ahead(1)
    if placement == "v":
        buffered = replace(
            schedule, num_gradient_buffers=gradient_buffers or most, sync_steps=sync_steps
        )
        return _on_v(buffered, activations, chunks, warmup=warmup, early_switch=early_switch)
    return replace(
        schedule,
        warmup=ahead,
        zero_bubble=zero_bubble,
        # Transfers that take nobody's time may last (k-1)/2 forwards and backwards: receives are
        # posted early enough, with word of them on its way before (of latencies alone, up to two
        # forwards). With the longer warm-up that cannot deadlock on any transport, if no stage
        # waits for a drain; earlier ones could.
        receive_ahead=factor if factor > 1 and not schedule.flush else schedule.receive_ahead,
        early_switch=early_switch,
        num_gradient_buffers=gradient_buffers or most,
        sync_steps=sync_steps,
    )


def _on_v(
    schedule: Schedule, activations: str, chunks: int, *, warmup: str, early_switch: int | None
) -> Schedule:
    """The schedule on a V. Raises: ConfigError with every option that has no meaning there."""
    rule = "is the order of a V's own: pipeline.placement = v has no such option"
    problems = [
        Problem(f"pipeline.{name}", value, rule, off)
        for name, value, off in (
            ("warmup", warmup, "depth"),
            ("early_switch", "off" if early_switch is None else early_switch, "off"),
        )
        if value != off
    ]
    if activations in vee.ENDLESS and chunks > 2:
        problems.append(
            Problem(
                "pipeline.chunks", chunks, f"is 2 with pipeline.activations = {activations}", "0"
            )
        )
    if not schedule.flush and schedule.num_gradient_buffers == 1:
        problems.append(
            Problem(
                "pipeline.gradient_buffers",
                1,
                "must be 2 with pipeline.placement = v, where the next "
                "batch reaches a rank's second chunk before this one has left its first",
                "0",
            )
        )
    if problems:
        raise ConfigError(*problems)
    ahead = schedule.warmup if schedule.flush else partial(vee.warmup, activations=activations)
    return replace(schedule, activations=activations, warmup=ahead)


def schedule_of(pipeline: PipelineConfig) -> Schedule:
    """The schedule of a configuration; early_switch = "auto" counts as "off" until it is measured.

    Raises: ConfigError.
    """
    early_switch = pipeline.early_switch
    return make_schedule(
        pipeline.schedule,
        warmup=pipeline.warmup,
        early_switch=early_switch if isinstance(early_switch, int) else None,
        gradient_buffers=pipeline.gradient_buffers,
        sync_steps=pipeline.sync_steps,
        chunks=pipeline.chunks,
        zero_bubble=pipeline.zero_bubble,
        placement=pipeline.placement,
        activations=pipeline.activations,
        order=pipeline.order,
    )


def drained(schedule: Schedule) -> Schedule:
    """The schedule of the first sync_steps batches."""
    return replace(SCHEDULES["1f1b"], activations=schedule.activations, options=schedule.options)


def find_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of that name; a Schedule is returned as it is, and "auto" counts as 1f1b until
    it is found.

    Raises: ConfigError if there is none.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule == OWN.name:
        return OWN
    schedule = "1f1b" if schedule == "auto" else schedule
    if schedule not in SCHEDULES:
        raise config_error(
            "pipeline.schedule", schedule, f"must be one of {', '.join(SCHEDULES)}", "1f1b"
        )
    return SCHEDULES[schedule]
