"""Pipeline schedules: the order in which a stage computes, and the weights it computes with.

All of them are one pattern, `warmup` forwards ahead, then forward and backward by turns, then the remaining backwards,
and differ in how far they run ahead and in whether they drain between batches. Three stages, three micro-batches in a
batch; a backward takes two forwards; * is the update of the weights:

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

r is the stage, p = num_stages, m = num_microbatches (of one batch in one pipeline), k a micro-batch, t a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from hybridpar.errors import config_error
from hybridpar.pipeline.plan.action import Action, Kind


@dataclass(frozen=True, slots=True)
class Sizes:
    """All that a schedule depends on: stages in the pipeline, and micro-batches in a batch."""

    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise config_error("parallel.pp", self.num_stages, "must be at least 1", "1")
        if self.num_microbatches < 1:
            raise config_error("pipeline.num_microbatches", self.num_microbatches, "must be at least 1", "1")


SizeOf = Callable[[Sizes, int], int]  # (sizes, stage) -> a number
VersionOf = Callable[[Sizes, int, int, int], int]  # (sizes, stage, microbatch, first_batch) -> weight version


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule, as pure functions of sizes.

    `version(sizes, stage, microbatch, first_batch)` is the weight version that `stage` uses for `microbatch`, forward
    and backward, in a range of batches that began at `first_batch` from a drained pipeline; W(t) exists after t
    updates. `warmup(sizes, stage)` is how many forwards run ahead. `norm_delay(sizes, stage)`: how many backwards
    after the last one of batch t NORM(t) is issued. `num_gradient_buffers`: batches whose gradients are alive at once.
    """

    name: str
    source: str
    flush: bool  # drains the pipeline and updates the weights between any two batches
    warmup: SizeOf
    version: VersionOf
    max_live_versions: SizeOf
    norm_delay: SizeOf
    num_gradient_buffers: int = 1
    receive_ahead: int = 1  # post receives this many compute actions before their use (passes.add_communication)
    needs_full_pipeline: bool = False  # m >= p

    def max_live_activations(self, sizes: Sizes, stage: int) -> int:
        """Micro-batches that have run forward and not yet backward on this stage, at most."""
        in_flight = self.warmup(sizes, stage) + 1
        return min(in_flight, sizes.num_microbatches) if self.flush else in_flight

    def check_sizes(self, sizes: Sizes) -> None:
        """Raises: ConfigError if this schedule cannot run on these sizes."""
        p, m = sizes.num_stages, sizes.num_microbatches
        if self.needs_full_pipeline and m < p:
            raise config_error(
                "pipeline.num_microbatches", m, f"schedule {self.name} keeps two weight versions, which takes at least "
                f"as many micro-batches in a batch as there are stages (parallel.pp = {p})", str(p),
            )

    def compute_actions(
        self, sizes: Sizes, stage: int, first_batch: int = 0, num_batches: int | None = None
    ) -> Iterator[Action]:
        """Yields the compute actions of one rank, lazily, for batches [first_batch, first_batch + num_batches).

        The pipeline is drained before the first and after the last of them. None means without end.

        Raises: ConfigError, at once, if this schedule cannot run on these sizes.
        """
        self.check_sizes(sizes)
        assert 0 <= stage < sizes.num_stages, f"stage {stage} of {sizes.num_stages}"
        m, warmup = sizes.num_microbatches, self.warmup(sizes, stage)
        order: Iterator[tuple[Kind, int]]
        if self.flush:
            batches = _count(first_batch, num_batches)
            order = (step for t in batches for step in _one_forward_one_backward(warmup, t * m, m))
        else:
            num_microbatches = None if num_batches is None else num_batches * m
            order = _one_forward_one_backward(warmup, first_batch * m, num_microbatches)
        return (Action(kind, stage, k, self.version(sizes, stage, k, first_batch)) for kind, k in order)


def _count(first: int, num: int | None) -> Iterator[int]:
    return count(first) if num is None else iter(range(first, first + num))


def _one_forward_one_backward(warmup: int, first: int, num: int | None) -> Iterator[tuple[Kind, int]]:
    """`warmup` forwards, then a forward and a backward by turns, then the backwards that are left.

    Micro-batches [first, first + num), or without end.
    """
    forwards, backwards = _count(first, num), _count(first, num)
    for k in islice(forwards, warmup):
        yield Kind.F, k
    for k in forwards:
        yield Kind.F, k
        yield Kind.B, next(backwards)
    for k in backwards:
        yield Kind.B, k


def _synchronous_version(sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Batch t uses W(t)."""
    return microbatch // sizes.num_microbatches


def _double_buffered_version(sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Batch t uses W(t-1), batch 0 W(0): on every stage, whenever the pipeline was drained."""
    return max(microbatch // sizes.num_microbatches - 1, 0)


def _latest_version(sizes: Sizes, stage: int, microbatch: int, first_batch: int) -> int:
    """Each stage uses the latest weights it has: k - (p-1-r) backwards are behind it when it starts micro-batch k."""
    return max((microbatch - _depth_below(sizes, stage)) // sizes.num_microbatches, first_batch)


def _depth_below(sizes: Sizes, stage: int) -> int:
    """p-1-r: how many stages follow this one, which is what 1F1B runs ahead."""
    return sizes.num_stages - 1 - stage


def _stashed_versions(sizes: Sizes, stage: int) -> int:
    """p-r micro-batches are in flight, and m in a row share a version."""
    return -(-_depth_below(sizes, stage) // sizes.num_microbatches) + 1


def _double_buffered_norm_delay(sizes: Sizes, stage: int) -> int:
    """Issues NORM(t) on all stages at about one time, half way between the end of batch t and UPDATE(t) on stage 0.

    Stage 0 ends a batch last, m-p+1 forward-backward pairs before it needs the new weights. Stage r ends it r backwards
    earlier: 2r/3 pairs where a backward takes two forwards. (All r pairs would delay every update at m = p.) Half of
    the slack is left to the reduction before NORM, half to the norm and the update after it.
    """
    return 2 * stage // 3 + (sizes.num_microbatches - sizes.num_stages) // 2


def _constant(value: int) -> SizeOf:
    return lambda sizes, stage: value


def _synchronous(name: str, source: str, warmup: SizeOf) -> Schedule:
    return Schedule(name, source, True, warmup, _synchronous_version, _constant(1), _constant(0))


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        _synchronous("naive", "one micro-batch in the whole pipeline at a time", _constant(0)),
        _synchronous("gpipe", "GPipe, arXiv 1811.06965, figure 2", lambda sizes, stage: sizes.num_microbatches),
        _synchronous("1f1b", "PipeDream-Flush, arXiv 2006.09503, section 3.2", _depth_below),
        Schedule(
            "2bw", "PipeDream-2BW, arXiv 2006.09503, section 3.1", False, _depth_below, _double_buffered_version,
            _constant(2), _double_buffered_norm_delay, num_gradient_buffers=2, needs_full_pipeline=True,
        ),
        Schedule(
            "pipedream", "PipeDream with weight stashing, arXiv 1806.03377", False, _depth_below,
            _latest_version, _stashed_versions, _constant(0),
            # Receives posted early may stand before a send that another stage needs for its update, which this one
            # waits for: check finds that deadlock where an axis has one communicator.
            receive_ahead=0,
        ),
    )
}


def find_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of that name; a Schedule is returned as it is.

    Raises: ConfigError if there is none.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule not in SCHEDULES:
        raise config_error("pipeline.schedule", schedule, f"must be one of {', '.join(SCHEDULES)}", "1f1b")
    return SCHEDULES[schedule]
