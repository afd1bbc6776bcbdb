"""Find a faster split into stages than the run's, from the measured costs of its steps.

    measured     forward and backward of each stage, update of each rank
    estimated    forward and backward of each block: blocks with equal operations take equal time,
                 and where the stages do not determine a block's time, its counted operations do;
                 its share of the update, by its parameters

The better split has the cheapest possible costliest stage. Both splits are simulated with the run's
schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import _get_default_store

from hybridpar.comm.objects import from_bytes, to_bytes
from hybridpar.config import Config
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.balance import balanced_split
from hybridpar.models.cost import block_flops, block_placements, forward_flops_per_token
from hybridpar.schedules.simulate.costs import expand
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.reporting.costs_file import RunCosts, run_costs
from hybridpar.train.reporting.trace import RankEvents, Recorder, events_of

_IDLE = 0.2
"""Share of the time that a stage may idle without advice."""
_WORTH = 1.05
"""Speedup that a better split must reach."""
_UNEXPLAINED = 0.1
"""Relative error that the sum of its blocks' times may have for a stage."""
_OWN_TIME = 0.1
_OWN_TIME_ALONE = 0.01
"""Weights of the time that a kind of block takes besides its operations, and of a kind without
operations, relative to an equal error of a stage's time."""
_NANOSECONDS = 1e9
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Blocks:
    """Estimated seconds of each block: forward and backward of a micro-batch, update of a batch."""

    forward: _Array
    backward: _Array
    update: _Array


def better_split(job: JobPlan, run: RunCosts) -> str:
    """Return a line with the idle stage and the better split; empty if no split is better."""
    shape = run.shape
    idle = max(run.measured.idle)
    if (
        shape.num_stages != shape.num_ranks
        or shape.num_ranks < 2
        or idle <= _IDLE
        or job.config.memory.is_limited
    ):
        return ""
    split = job.split
    blocks = _estimate(job, run)
    works = shape.num_microbatches * (blocks.forward + blocks.backward) + blocks.update
    best = balanced_split(tuple(round(_NANOSECONDS * work) for work in works), shape.num_ranks)
    if not _explain(blocks, run, split):
        return ""
    before = _step_time(run, blocks, [len(stage) for stage in split])
    after = _step_time(run, blocks, best)
    if before < _WORTH * after:
        return ""
    faster = 100 * (before / after - 1)
    return (
        f"stage {run.measured.idle.index(idle)} idles {100 * idle:.0f} % of the time; "
        "pipeline.split = "
        f"{list(best)} instead of {[len(s) for s in split]} would be {faster:.0f} % faster, "
        "estimated from these "
        "steps"
    )


class EarlyAdvice:
    """Gives the advice of `better_split` during training, before the pipeline drains.

    Ranks of a pipeline put their events into the job's store, where the first rank finds them at
    one of its next steps, so that nobody waits. There is no early advice for several hosts, whose
    clocks differ, or for sites, which train apart.
    """

    def __init__(self, job: JobPlan, grid: ProcessGrid):
        self._job = job
        self._is_first = grid.rank == 0
        self._grid = grid
        self._takes_part = all(index == 0 for axis, index in grid.place.items() if axis != "pp")
        self._key = ""

    def has_ended(self, recorder: Recorder, say: Callable[[str], None]) -> bool:
        """Give the advice if it is ready; return whether there is no need to call this again.

        Call it after every step while there is a recorder.
        """
        if not self._takes_part or self._grid.site.size > 1:
            return True
        if recorder.is_active or not recorder.events:
            return False
        try:
            return self._exchange(recorder, say)
        except (RuntimeError, ValueError):
            return True  # without a store the advice comes when the pipeline drains

    def _exchange(self, recorder: Recorder, say: Callable[[str], None]) -> bool:
        store = _get_default_store()
        if not self._key:
            self._key = f"hybridpar/events/{recorder.events[0].action.microbatch}"
            store.set(
                f"{self._key}/{self._grid.pp.rank}",
                to_bytes(events_of(recorder, self._grid)).decode("ascii"),
            )
        keys = [f"{self._key}/{rank}" for rank in range(self._grid.pp.size)]
        if not self._is_first:
            return True
        if not store.check(keys):
            return False
        ranks: list[RankEvents] = [from_bytes(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        costs = None
        if len({rank.host.name for rank in ranks}) == 1:
            costs = run_costs(self._job, ranks)
        if costs is not None and (advice := better_split(self._job, costs)):
            say(advice)
        return True


def _explain(blocks: _Blocks, run: RunCosts, split: Sequence[range]) -> bool:
    """Return whether the blocks' times add up to the measured times of the stages."""
    costs = run.measured.costs
    computed = blocks.forward + blocks.backward
    measured = zip(
        *(expand(cost, len(split)) for cost in (costs.forward, costs.backward)), strict=True
    )
    return all(
        abs(computed[stage.start : stage.stop].sum() / (sum(seconds) or 1.0) - 1) < _UNEXPLAINED
        for stage, seconds in zip(split, measured, strict=True)
    )


def _estimate(job: JobPlan, run: RunCosts) -> _Blocks:
    config = job.config
    model = config.model
    split = job.split
    costs = run.measured.costs
    shape = run.shape
    recomputed: set[int] = set()
    for stage, again in zip(split, job.recomputed, strict=True):
        recomputed |= set(stage if again.whole else again.blocks)
    flops = _flops(config)
    parameters = _parameters(config)
    # the end blocks also embed samples and compute losses
    ends = {0: "first", model.num_blocks - 1: "last"}
    kinds = [
        (flops[number], ends.get(number, ""), parameters[number], number in recomputed)
        for number in range(model.num_blocks)
    ]
    forward, backward = (
        _by_kind(kinds, split, expand(cost, shape.num_stages))
        for cost in (costs.forward, costs.backward)
    )
    update = np.zeros(model.num_blocks)
    for stage, seconds in zip(split, expand(costs.update, shape.num_ranks), strict=True):
        total = sum(parameters[number] for number in stage) or 1
        for number in stage:
            update[number] = seconds * parameters[number] / total
    return _Blocks(forward, backward, update)


def _flops(config: Config) -> list[int]:
    if config.model.cost_model is not None:
        return list(forward_flops_per_token(config.model))
    return [block.forward for block in block_flops(config.model)]


def _parameters(config: Config) -> list[int]:
    return [
        sum(prod(place.shape) for place in placements if place.trainable)
        for placements in block_placements(config.model, config.optim.groups)
    ]


def _by_kind(
    kinds: Sequence[tuple[int, str, int, bool]], split: Sequence[range], measured: Sequence[float]
) -> _Array:
    """Return the time of each block, such that the sums are closest to the measured stages.

    Blocks of a kind take equal time: operations at a common rate, plus a constant of the kind,
    which is kept small (least squares). The constant of a kind without operations, such as an
    embedding, may be large.
    """
    names = sorted(set(kinds))
    times = np.array(measured, float)
    mean = times.mean() or 1.0
    counts = np.array(
        [[Counter(kinds[number] for number in stage)[name] for name in names] for stage in split],
        float,
    )
    flops = np.array([name[0] for name in names], float)
    flops /= (counts @ flops).mean() or 1.0
    weights = np.diag([_OWN_TIME if name[0] else _OWN_TIME_ALONE for name in names])
    rows = np.vstack(
        [
            np.column_stack([counts @ flops, counts]),
            np.column_stack([np.zeros(len(names)), weights]),
        ]
    )
    rate, *own = np.linalg.lstsq(
        rows, np.concatenate([times / mean, np.zeros(len(names))]), rcond=None
    )[0]
    found = mean * np.maximum(rate * flops + own, 0.0)
    of_kind = dict(zip(names, found.tolist(), strict=True))
    return np.array([of_kind[kind] for kind in kinds])


def _step_time(run: RunCosts, blocks: _Blocks, split: Sequence[int]) -> float:
    """Return the simulated seconds of a step with a split."""
    ends = np.cumsum(split)
    stages = [slice(end - size, end) for end, size in zip(ends, split, strict=True)]
    forward, backward, update = (
        [float(of_block[stage].sum()) for stage in stages]
        for of_block in (blocks.forward, blocks.backward, blocks.update)
    )
    measured = run.measured.costs
    inputs = measured.backward_input
    if inputs is not None:
        share = sum(expand(inputs, len(split))) / (
            sum(expand(measured.backward, len(split))) or 1.0
        )
        inputs = [share * seconds for seconds in backward]
    costs = replace(
        measured, forward=forward, backward=backward, update=update, backward_input=inputs
    )
    return predict_timeline(run.schedule_options, run.shape, costs).step_time(
        run.shape.num_microbatches
    )
