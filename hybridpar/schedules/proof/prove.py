"""Run `check` at the start of a run, on its plan or a smaller one that stands for it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import CheckReport, PlanError, check
from hybridpar.schedules.schedule_table import (
    PipelineShape,
    Schedule,
    ScheduleOptions,
    drained,
    make_schedule,
)
from hybridpar.schedules.simulate.send_window import min_send_window

_MOST = 6000
"""Micro-batches, counted on each stage, that are proven in less than half a second."""
_PARTS = 2
"""Parts of a stage that stand for any number: where the host makes the weights, each waits for its
own."""
_RANKS = 12
_CHUNKS = 3
_STEADY = 8
"""The largest plan that stands for those with more: ranks, chunks, pairs in each steady stretch."""


def prove(schedule: Schedule, shape: PipelineShape) -> list[CheckReport]:
    """Prove the plans of a run: of its synchronous steps, if any, and of the schedule.

    Raises: PlanError; ConfigError if the schedule cannot run on this shape.
    """
    first = schedule.options.sync_steps
    parts = [(drained(schedule), 0)] * (first > 0) + [(schedule, first)]
    return [_prove(*enough(part, shape), start) for part, start in parts]


def send_window(schedule: Schedule, shape: PipelineShape) -> int:
    """Return the number of sends of a rank that may be unfinished in a run.

    The executor waits for its oldest send when it has more, and the memory prediction counts as
    many.

    Raises: PlanError if the plan cannot run with any number.
    """
    if not schedule.outruns_sends(shape):
        return min_send_window(shape.num_ranks)
    return _widest(schedule.options, shape)


@lru_cache(maxsize=64)
def _widest(options: ScheduleOptions, shape: PipelineShape) -> int:
    return max(report.send_window for report in prove(make_schedule(options), shape))


def _prove(schedule: Schedule, shape: PipelineShape, start: int) -> CheckReport:
    num_batches = _num_batches(schedule, shape)
    parts = _PARTS if schedule.options.host else 1
    plan = make_plan(schedule, shape, start, num_batches, parts)
    report = check(plan, shape, schedule, range(start, start + num_batches))
    allowed = min_send_window(shape.num_ranks)
    if report.send_window > allowed and not schedule.outruns_sends(shape):
        reason = (
            f"deadlock: the plan needs {report.send_window} unfinished sends on a rank, and "
            f"schedule {schedule.name} allows {allowed}"
        )
        raise PlanError(reason, plan, [])
    return report


def _num_batches(schedule: Schedule, shape: PipelineShape) -> int:
    """Return the batches after which a plan repeats itself: 2 if it drains; otherwise until the
    first batch has left the pipeline, with the weights and gradients that it started with.
    """
    return 2 if schedule.flush else 3 + -(-shape.num_stages // shape.num_microbatches)


def enough(schedule: Schedule, shape: PipelineShape) -> tuple[Schedule, PipelineShape]:
    """Return the schedule and shape themselves, or smaller ones that stand for them.

    A rank's list is a warm-up, steady stretches of pairs (forward, backward) in which nothing else
    changes, and the ends of a batch. A pair leaves every link and every count as it found them, so
    a plan is right for any length of a stretch if it is right for a length in which all ranks are
    in the stretch together. The list of a rank depends on its distance to the last one, and only
    the warm-up grows with it; of three virtual stages the middle one stands for any in between.
    """
    p = shape.num_ranks
    m = shape.num_microbatches
    if (
        not schedule.repeats(shape)
        or p * shape.virtual_stages * m * _num_batches(schedule, shape) <= _MOST
    ):
        return schedule, shape
    if shape.is_v:  # a micro-batch leaves when the (3p/2 + 1)th comes at the latest
        return schedule, replace(shape, num_microbatches=min(m, 2 * p + _STEADY))
    few = PipelineShape(min(p, _RANKS), m, min(shape.virtual_stages, _CHUNKS))
    few = replace(few, num_frozen=min(shape.num_frozen, few.num_stages - 1))
    ranks = few.num_ranks
    steady = few.num_ranks + _STEADY
    ahead = schedule.warmup(few, 0) if schedule.needs_full_pipeline else 0
    needed = schedule.warmup(shape, 0) if schedule.needs_full_pipeline else 0
    early_switch = schedule.options.early_switch
    if early_switch is not None:  # two stretches: on the older weights, and on the newer
        older = early_switch - (needed - (p - 1))
        newer = m - (p - 1) - early_switch
        switch = ahead - (ranks - 1) + min(older, steady)
        return schedule.with_options(early_switch=switch), replace(
            few, num_microbatches=switch + ranks - 1 + min(newer, steady)
        )
    # the pipeline is never full, or has one round
    if (m < p and not needed) or (few.virtual_stages > 1 and m < 2 * p):
        return schedule, replace(few, num_microbatches=max(min(m, 2), m * ranks // p))
    if few.virtual_stages > 1:  # two rounds, a larger and a smaller one if there are both
        rounds, rest = divmod(m, p)
        larger = min(-(-rest // rounds), ranks)
        return schedule, replace(
            few, num_microbatches=min(m, 2 * (ranks + larger) - (rest % rounds > 0))
        )
    return schedule, replace(few, num_microbatches=ahead + min(m - needed, ranks + steady))
