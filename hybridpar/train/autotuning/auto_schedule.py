"""pipeline.schedule = "auto": the fastest schedule among those that train identically.

    shapes   one stage on each rank | two, there and back | two, three, four in a loop    a few batches of each
    orders   1f1b, zero bubbles,    | ZB-V, V-Half, V-Min | interleaved, zero bubbles     simulated with their costs
             longer warm-up         |                     |
    filled   each order also with W's in the gaps that the costs leave (schedules/orders/fill.py),
             as a custom order: no rank keeps more bytes than the fullest rank does without

Among the schedules predicted to fit into memory, the simplest wins whose step is at most 1 % longer
than the shortest; the list is sorted from simple to complex. Units: seconds, bytes.
"""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch

from hybridpar.comm import gather_objects
from hybridpar.config import FOUND, Config, PipelineConfig
from hybridpar.errors import HybridparError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
from hybridpar.prediction.layers import Footprints
from hybridpar.prediction.limit import limit_here
from hybridpar.prediction.predict import Tracer, kept_by_stage
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE
from hybridpar.schedules.orders.custom_order import format_order
from hybridpar.schedules.orders.fill import Room, fill
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.proof.check import PlanError
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.faults.errors import SetupError
from hybridpar.validate import problems

Measure = Callable[[Config], Costs]
"""Measures a configuration's action costs with a few batches. Collectives: on all ranks of the
grid."""
_T = TypeVar("_T")
_WORTH = 1.01
_CHUNKS = (2, 3, 4)
_MOST_FILLED = 512
"""Most micro-batches of a batch, times stages per rank, for which orders are filled: such an order
is one line that lists them all."""
_BUBBLE = {"zero_bubble": True, "split_backward": True}


@dataclass(frozen=True)
class Found:
    """Settings of a schedule, and its simulated step time."""

    pipeline: PipelineConfig
    step_time: float


def find_schedule_for(
    config: Config, grid: ProcessGrid, device: torch.device, measure: Measure
) -> tuple[Found, Found]:
    """Return the schedule for "auto", and 1f1b to compare it with.

    Collectives: on all ranks of the grid. Raises: SetupError on all of them.
    """
    found: list[Found] = []
    trace = Footprints()
    for shape in shapes(config):
        split = replace(shape[0], pipeline=replace(shape[0].pipeline, split_backward=True))
        trial = next((one for one in (split, shape[0]) if not problems(one, grid.world.size)), None)
        if trial is None:
            continue
        costs = gather_objects(measure(trial), grid.world)[0]
        found += of_first_rank(partial(_simulated_here, shape, costs, device, trace), grid.world)
    names = gather_objects(platform.node(), grid.world)
    limit = min(gather_objects(limit_here(device.type, names.count(platform.node())), grid.world))
    return of_first_rank(partial(choose, config, found, limit, device, trace), grid.world), found[0]


def of_first_rank(call: Callable[[], _T], world: Axis) -> _T:
    """Call `call` on the first rank only, and return its result on all ranks.

    Collectives: one all-gather. Raises: SetupError on all ranks, with the text of the error there.
    """
    result: tuple[_T | None, str] = None, ""
    if world.is_first:
        try:
            result = call(), ""
        except HybridparError as error:
            result = None, str(error)
        except Exception as error:
            result = None, "rank 0 failed:\n" + "".join(traceback.format_exception(error)).rstrip()
    found, text = gather_objects(result, world)[0]
    if text:
        raise SetupError(text)
    return cast(_T, found)


def shapes(config: Config) -> Iterator[list[Config]]:
    """Yield groups of configurations; all in a group have the same stages and action costs."""
    defaults: dict[str, Any] = {
        f.name: f.default for f in fields(PipelineConfig) if f.name in FOUND
    }
    bare = replace(config.pipeline, schedule="1f1b", **defaults)

    def made(*options: Mapping[str, Any]) -> list[Config]:
        return [replace(config, pipeline=replace(bare, **one)) for one in options]  # type: ignore[arg-type]

    yield made({}, _BUBBLE, _BUBBLE | {"warmup": "latency"})
    if config.compression.both_ways != ("none", "none"):
        return  # with other stage boundaries, compression would change the training
    if 2 * config.parallel.pp <= config.model.num_blocks:
        there_and_back = {"stage_layout": "v", "split_backward": True}
        yield made(*(there_and_back | {"activations": kept} for kept in ("full", "half", "min")))
    for chunks in _CHUNKS:
        if chunks * config.parallel.pp <= config.model.num_blocks:
            looped = {"schedule": "interleaved", "virtual_stages": chunks}
            yield made(looped, looped | _BUBBLE)


def _simulated_here(
    shape: list[Config], costs: Costs, device: torch.device, trace: Tracer
) -> list[Found]:
    return simulated(shape, costs, kept_by_stage(JobPlan(shape[0]), device, trace))


def simulated(shape: list[Config], costs: Costs, kept: Sequence[float]) -> list[Found]:
    """Return the schedules of a group and their filled orders, with simulated step times.

    kept: bytes that a micro-batch keeps, by stage.
    """
    found = []
    for config in shape:
        if problems(config, config.parallel.num_ranks):
            continue
        job = JobPlan(config)
        found.append(_simulated(job, costs))
        num_filled = job.shape.num_microbatches * job.shape.virtual_stages
        if config.pipeline.split_backward and num_filled <= _MOST_FILLED:
            pipeline = filled(job, costs, kept)
            found.append(_simulated(JobPlan(replace(config, pipeline=pipeline)), costs))
    return found


def _simulated(job: JobPlan, costs: Costs) -> Found:
    timeline = predict_timeline(job.options, job.shape, costs)
    return Found(job.config.pipeline, timeline.step_time(job.shape.num_microbatches))


def filled(job: JobPlan, costs: Costs, kept: Sequence[float]) -> PipelineConfig:
    """Return a draining schedule's order with W's moved into the gaps, as a custom order.

    No rank keeps more bytes than the fullest rank of the original order.

    kept: bytes that a micro-batch keeps, by stage.
    """
    shape = job.shape
    ranks = range(shape.num_ranks)
    orders = [
        [
            (a.kind, a.stage, a.microbatch)
            for a in lower(job.schedule, shape, rank, 0, 1)
            if a.kind in COMPUTE
        ]
        for rank in ranks
    ]
    most = max(
        max(accumulate(ACTION_SPECS[kind].holds * kept[stage] for kind, stage, _ in order))
        for order in orders
    )
    room = Room(kept, (most,) * shape.num_ranks)
    steps = fill(orders, shape, costs, room, swaps=not shape.is_ring)
    return replace(
        job.config.pipeline,
        schedule="own",
        zero_bubble=False,
        warmup="depth",
        activations="full",
        virtual_stages=shape.virtual_stages if shape.is_ring or shape.virtual_stages > 2 else 0,
        order=tuple(format_order(line, shape, rank) for rank, line in enumerate(steps)),
    )


def choose(
    config: Config, found: list[Found], limit: float, device: torch.device, trace: Tracer
) -> Found:
    """Return the simplest schedule within 1 % of the fastest that is proven and fits into memory.

    1f1b is returned if none does.
    """

    @cache
    def can_run(one: Found) -> bool:
        made = JobPlan(replace(config, pipeline=one.pipeline))
        try:
            made.prove()
        except PlanError:
            return False
        return max(stage.needed for stage in predict(made, device=device, trace=trace)) <= limit

    best = next(filter(can_run, sorted(found, key=lambda one: one.step_time)), None)
    if best is None:
        return found[0]
    return next(one for one in found if one.step_time <= _WORTH * best.step_time and can_run(one))
