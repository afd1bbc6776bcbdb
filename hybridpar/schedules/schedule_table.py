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

    pipedream: as 2bw, but a stage updates at once and continues with the weights it has (three batches)
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
micro-batch, t a batch. Where a rank holds several stages of the model, what it does has another
order: interleaved.py, vee.py. One's own is in the configuration: custom_order.py; fill.py makes
such orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from hybridpar.config import Config
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.schedules.orders import custom_order as own_order
from hybridpar.schedules.orders import interleaved, vee
from hybridpar.schedules.orders.interleaved import SizeOf
from hybridpar.schedules.pipeline_shape import PipelineShape as PipelineShape
from hybridpar.schedules.schedule import Schedule as Schedule
from hybridpar.schedules.schedule_options import ScheduleOptions as ScheduleOptions


def _synchronous_version(
    schedule: Schedule, shape: PipelineShape, stage: int, microbatch: int, first_batch: int
) -> int:
    """Return the version if batch t uses W(t)."""
    return microbatch // shape.num_microbatches


def _double_buffered_version(
    schedule: Schedule, shape: PipelineShape, stage: int, microbatch: int, first_batch: int
) -> int:
    """Return the version: batch t uses W(t-1) on every stage, batches up to sync_steps W(t).

    With early_switch L only the first p-1+L micro-batches use W(t-1), which is at least as many as
    are in flight at an update; the others of batch t use W(t).
    """
    batch, index = divmod(microbatch, shape.num_microbatches)
    early_switch = schedule.options.early_switch
    stale = early_switch is None or index < shape.num_stages - 1 + early_switch
    return batch - 1 if stale and batch > schedule.options.sync_steps else batch


def _latest_version(
    schedule: Schedule, shape: PipelineShape, stage: int, microbatch: int, first_batch: int
) -> int:
    """Return the latest version: k - (p-1-r) backwards are done when micro-batch k starts."""
    return max((microbatch - _depth_below(shape, stage)) // shape.num_microbatches, first_batch)


def _depth_below(shape: PipelineShape, stage: int) -> int:
    """Return p-1-r: the number of stages after this one, which is what 1F1B runs ahead."""
    return shape.num_stages - 1 - stage


def _stashed_versions(shape: PipelineShape, stage: int) -> int:
    """Return the live versions: p-r micro-batches are in flight, m in a row share one."""
    return -(-_depth_below(shape, stage) // shape.num_microbatches) + 1


def _constant(value: int) -> SizeOf:
    return lambda shape, stage: value


def _synchronous(name: str, source: str, warmup: SizeOf, *accepts: str) -> Schedule:
    return Schedule(
        ScheduleOptions(name),
        source,
        True,
        warmup,
        _synchronous_version,
        _constant(1),
        accepts=frozenset(accepts),
    )


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _synchronous("naive", "one micro-batch in the whole pipeline at a time", _constant(0)),
        _synchronous(
            "gpipe",
            "GPipe, arXiv 1811.06965, figure 2",
            lambda shape, stage: shape.num_microbatches,
        ),
        _synchronous(
            "1f1b",
            "PipeDream-Flush, arXiv 2006.09503, section 3.2",
            interleaved.runs_ahead(1),
            "warmup",
            "zero_bubble",
            "stage_layout",
        ),
        _synchronous(
            "interleaved",
            "interleaved 1F1B, arXiv 2104.04473, section 2.2",
            interleaved.runs_ahead(2),
            "virtual_stages",
            "zero_bubble",
        ),
        Schedule(
            ScheduleOptions("2bw"),
            "PipeDream-2BW, arXiv 2006.09503, section 3.1",
            False,
            interleaved.runs_ahead(1),
            _double_buffered_version,
            _constant(2),
            num_gradient_buffers=2,
            needs_full_pipeline=True,
            accepts=frozenset(
                {"warmup", "early_switch", "sync_steps", "stage_layout", "virtual_stages"}
            ),
        ),
        Schedule(
            ScheduleOptions("pipedream"),
            "PipeDream with weight stashing, arXiv 1806.03377",
            False,
            _depth_below,
            _latest_version,
            _stashed_versions,
            accepts=frozenset({"sync_steps"}),
            # Receives posted early may stand before a send that another stage needs for its update,
            # which this one waits for: check finds that deadlock where an axis has one
            # communicator.
            receive_ahead=0,
        ),
    )
}

OWN = _synchronous("own", "pipeline.order", _constant(0), "order", "virtual_stages", "stage_layout")
"""Custom schedules, which are defined by an order (`make_schedule`)."""
WARMUPS = {"depth": 1, "latency": 2, "bandwidth": 3}
"""Factors k by name: stage r runs k(p-1-r) forwards ahead. 3 keeps a link busy all the time, so a
larger k gains nothing."""


def make_schedule(options: ScheduleOptions) -> Schedule:
    """Return the schedule with these options. Raises: ConfigError, which lists all problems."""
    schedule = find_schedule(options.schedule)
    options = replace(options, schedule=schedule.name)
    if problems := _problems(schedule, options):
        raise ConfigError(*problems)
    if options.order:
        steps = tuple(own_order.parse_order(line, rank) for rank, line in enumerate(options.order))
        return replace(
            schedule,
            options=options,
            order=steps,
            warmup=lambda shape, rank: own_order.runs_ahead(steps[rank]),
        )
    factor = WARMUPS[options.warmup]
    schedule = replace(
        schedule,
        options=options,
        num_gradient_buffers=options.gradient_buffers or schedule.num_gradient_buffers,
    )
    if options.stage_layout == "v":
        endless = partial(vee.warmup, activations=options.activations)
        return schedule if schedule.flush else replace(schedule, warmup=endless)
    ahead = interleaved.runs_ahead(factor) if factor > 1 else schedule.warmup
    if options.zero_bubble and "virtual_stages" in schedule.accepts:
        # a gradient of the input comes back in half of the time
        ahead = interleaved.runs_ahead(1)
    return replace(
        schedule,
        warmup=ahead,
        # Transfers that cost no time may last (k-1)/2 forwards and backwards: receives are posted
        # early enough that the sender knows before (for latencies alone, up to two forwards). With
        # the longer warm-up that cannot deadlock on any transport, if no stage waits for a drain;
        # earlier ones could.
        receive_ahead=factor if factor > 1 and not schedule.flush else schedule.receive_ahead,
    )


@dataclass(frozen=True)
class _Rule:
    """A rule about an option: its neutral value, whether its value is allowed, the error."""

    default: Any
    allowed: bool
    text: str
    works: str = "0"


def _problems(schedule: Schedule, options: ScheduleOptions) -> list[Problem]:
    """Return what is wrong with the options of a schedule."""
    known = set(schedule.accepts)
    if options.stage_layout == "v" and schedule.flush:
        known.add("virtual_stages")
    problems = []
    for name, rule in _rules(schedule, options).items():
        value = getattr(options, name)
        if value != rule.default and name not in known:
            knowing = [other.name for other in (*SCHEDULES.values(), OWN) if name in other.accepts]
            text = f"not supported with schedule {schedule.name}, only with {' and '.join(knowing)}"
            problems.append(Problem(f"pipeline.{name}", value, text, rule.works))
        elif not rule.allowed:
            problems.append(Problem(f"pipeline.{name}", value, rule.text, rule.works))
    return problems


def _rules(schedule: Schedule, options: ScheduleOptions) -> dict[str, _Rule]:
    """Return the rules about options of `pipeline`, by name."""
    name = schedule.name
    factor = WARMUPS.get(options.warmup, 0)
    is_v = options.stage_layout == "v"
    where = f"schedule {name}" + ' and pipeline.stage_layout = "v"' * is_v
    most = schedule.num_gradient_buffers
    # With fewer buffers than the schedule can use, all stages stop at the same backward.
    # Micro-batches in flight of a longer warm-up cannot pass the stopped ones if the transfers of a
    # rank on an axis queue: check finds deadlocks from 4 stages on. The same holds for the next
    # batch if a rank holds several stages.
    buffers = (0, most) if factor > 1 or is_v or options.virtual_stages > 1 else range(most + 1)
    # a long warm-up cannot pass a drain either, or transfers around a ring; a V fixes it
    longest = 1 if is_v else 2 if schedule.flush or options.virtual_stages > 1 else 3
    warmups = [warmup for warmup, k in WARMUPS.items() if k <= longest]
    most_stages = 2 if is_v and options.activations in vee.ENDLESS and name != "own" else inf
    return {
        "warmup": _Rule(
            "depth",
            options.warmup in warmups,
            f"must be {' or '.join(warmups)} with {where}",
            "depth",
        ),
        "early_switch": _Rule(
            None,
            options.early_switch is None or (options.early_switch >= 0 and not is_v),
            f"must be off{' or at least 0' * (not is_v)} with {where}",
            "off",
        ),
        "gradient_buffers": _Rule(
            options.gradient_buffers,
            options.gradient_buffers in buffers,
            f"must be {' or '.join(map(str, buffers))} with {where} and pipeline.warmup = "
            f"{options.warmup!r}",
        ),
        "sync_steps": _Rule(0, options.sync_steps >= 0, "must not be negative"),
        "zero_bubble": _Rule(
            False,
            not options.zero_bubble or not is_v,
            'not supported with pipeline.stage_layout = "v", whose schedule already fills the bubble',
            "false",
        ),
        "stage_layout": _Rule("loop", True, "", "loop"),
        "activations": _Rule(
            options.activations,
            not is_v or schedule.flush or options.activations in vee.ENDLESS,
            f"must be {' or '.join(vee.ENDLESS)} with schedule {name}, which never drains",
            "half",
        ),
        "order": _Rule(
            (),
            bool(options.order) == (name == "own"),
            "must name what each rank computes with schedule own",
            own_order.EXAMPLE if name == "own" else "[]",
        ),
        "virtual_stages": _Rule(
            0,
            options.virtual_stages != 1
            and (not is_v or options.virtual_stages % 2 == 0)
            and options.virtual_stages <= most_stages,
            'must be at least 2, or 0 for the default, and even with pipeline.stage_layout = "v", '
            f"where pipeline.activations {' and '.join(vee.ENDLESS)} allow 2 alone",
        ),
    }


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of a configuration; "auto" counts as off. Raises: ConfigError."""
    return make_schedule(ScheduleOptions.of(config))


def drained(schedule: Schedule) -> Schedule:
    """Return the schedule of the first sync_steps batches: 1f1b on the same layout."""
    options = replace(
        schedule.options,
        schedule="1f1b",
        warmup="depth",
        early_switch=None,
        gradient_buffers=0,
        zero_bubble=False,
        sync_steps=0,
    )
    return replace(SCHEDULES["1f1b"], options=options, accepts=schedule.accepts)


def find_schedule(schedule: str | ScheduleOptions | Schedule) -> Schedule:
    """Return the schedule of that name ("auto": 1f1b) or options. Raises: ConfigError."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, ScheduleOptions):
        return make_schedule(schedule)
    if schedule == OWN.name:
        return OWN
    schedule = "1f1b" if schedule == "auto" else schedule
    if schedule not in SCHEDULES:
        raise config_error(
            "pipeline.schedule", schedule, f"must be one of {', '.join(SCHEDULES)}", "1f1b"
        )
    return SCHEDULES[schedule]
