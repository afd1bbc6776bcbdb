"""Simulate schedules with estimated or measured costs, and explain how a run differs.

plan.svg is drawn from counted operations before anything was measured. At the end of a run, counted
costs are replaced by measured ones, one kind of cost after the other; the simulated step then shows
the effect of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

from hybridpar.config import Config, read_run_config, to_mapping
from hybridpar.errors import config_error
from hybridpar.job import JobPlan
from hybridpar.models.cost import forward_flops_per_token
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.proof.liveness import peak_live
from hybridpar.schedules.schedule_table import make_schedule
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.predict import predict_timeline, smallest_early_switch
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.train.folder import CONFIG, COSTS
from hybridpar.train.reporting.costs_file import RunCosts, in_ms, percent, read_costs

_MATTERS: dict[str, tuple[str, ...]] = {
    "model": (),
    "parallel": (),
    "kernels": (),
    "pipeline": ("split", "recompute"),
    "optim": ("name", "groups"),
    "train": ("micro_batch_size", "dtype", "threads", "device"),
}
"""Keys that affect the costs of a schedule's actions, by section; (): the whole section."""
_SAME = 0.1
"""Differences up to this share are not reported: of the counted step time, or of idle time."""
_WORTH_SAYING = 0.02
_KINDS = (
    (
        "forward and backward take other times than counted",
        ("forward", "backward", "backward_input", "variation"),
    ),
    ("updates and communication calls", ("update", "calls")),
    (
        "transfers and reductions",
        (
            "transfer",
            "latency",
            "reduce",
            "norm",
            "gather",
            "tied",
            "blocking_norm",
            "serial_links",
        ),
    ),
    ("cores are shared", ("cores", "transfer_work")),
)


@dataclass(frozen=True)
class Preview:
    """A simulated schedule.

    Times are in units of one micro-batch's forward on the costliest rank, or in seconds.

    Attributes:
        timeline: The simulated actions of the batches to draw.
        simulate_more: Simulates the same batches and further ones; None if the pipeline drains.
        step_time: Time from one batch to the next in the steady state.
        bubble: Idle share of that time, by rank.
        peak_activations: Most micro-batches in flight, by rank.
        peak_versions: Weight versions that each rank keeps. Between drains the plan of 2bw's last
            stage uses one; its first batch after a drain uses the older one of two.
    """

    timeline: Timeline
    simulate_more: Callable[[], Timeline] | None
    step_time: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_versions: tuple[int, ...]

    def drawn(self) -> Timeline:
        """Return the timeline for pictures. If the pipeline never drains, later batches are under
        way when the last batch ends, and are cut off there.
        """
        if self.simulate_more is None:
            return self.timeline
        return self.simulate_more().cut_at(self.timeline.makespan)


def stage_costs(job: JobPlan) -> Costs:
    """Return estimated costs: forward FLOPs of each stage relative to the costliest rank.

    Backward takes twice as much, plus recomputation.
    """
    flops = forward_flops_per_token(job.config.model, job.config.data.document_length)
    if not any(flops):  # a custom model, whose operators cannot be counted
        flops = (1,) * len(flops)
    forward = [sum(flops[b] for b in blocks) for blocks in job.split]
    backward = [
        2 * f + sum(flops[b] for b in stage.blocks)
        for f, stage in zip(forward, job.recomputed, strict=True)
    ]
    shape = job.shape
    largest = max(
        sum(forward[stage] for stage in shape.stages_of(rank)) for rank in range(shape.num_ranks)
    )
    return Costs([f / largest for f in forward], [b / largest for b in backward])


def preview(job: JobPlan, num_batches: int, costs: Costs | None = None) -> Preview:
    """Simulate the batches to draw, and enough batches to reach the steady state.

    Args:
        job: The job.
        num_batches: Number of batches to draw.
        costs: Measured costs; default: `stage_costs`. They determine early_switch = "auto".

    Raises:
        ConfigError: The schedule does not fit the job.
    """
    shape = job.shape
    costs = costs or stage_costs(job)
    schedule_options = job.options
    if job.config.pipeline.early_switch == "auto":
        schedule_options = replace(
            schedule_options, early_switch=smallest_early_switch(costs, shape, schedule_options)
        )
    steady = predict_timeline(schedule_options, shape, costs)
    m = shape.num_microbatches
    schedule = make_schedule(schedule_options)
    drains = schedule.flush
    live = [
        peak_live(_first_batch(actions) if drains else actions, m)
        for _, actions in sorted(steady.plan.items())
    ]
    timeline = steady
    if len(steady.batch_starts(m)) != num_batches:
        timeline = predict_timeline(schedule_options, shape, costs, num_batches)
    behind = 1 + ceil(2 * shape.num_stages / m)  # batches that keep all ranks busy until the end
    simulate_more = partial(predict_timeline, schedule_options, shape, costs, num_batches + behind)
    return Preview(
        timeline,
        None if drains else simulate_more,
        *steady.steady_step(m),
        tuple(one.activations for one in live),
        tuple(schedule.max_live_versions(shape, rank) for rank in sorted(steady.plan)),
    )


def _first_batch(actions: Sequence[Action]) -> Sequence[Action]:
    """Return the actions up to the first update; a draining pipeline repeats them."""
    return actions[
        : next((i for i, action in enumerate(actions, 1) if action.kind is Kind.UPDATE), None)
    ]


def costs_of_run(folder: Path, config: Config) -> RunCosts:
    """Return the costs that the run in `folder` measured, if they apply to `config`.

    Raises:
        ConfigError: The run has no costs, or `config` differs in settings that they depend on.
        DataError: The file is damaged.
    """
    run = read_costs(folder / COSTS)
    measured_by = read_run_config(folder / CONFIG)
    chunks = measured_by.pipeline.num_virtual_stages
    if config.pipeline.num_virtual_stages != chunks:
        rule = f"does not match {folder}, which was measured with {chunks} stages per rank"
        works = (
            f"{chunks}, with pipeline.schedule = {measured_by.pipeline.schedule}"
            if chunks > 1
            else "1f1b"
        )
        raise config_error(
            "pipeline.virtual_stages", config.pipeline.num_virtual_stages, rule, works
        )
    before = to_mapping(measured_by)
    now = to_mapping(config)
    for section, keys in _MATTERS.items():
        for key in keys or now[section]:
            if (value := now[section][key]) != (measured := before[section].get(key)):
                rule = f"does not match {folder}, which was measured with {measured!r}"
                raise config_error(f"{section}.{key}", value, rule, str(measured))
    return run


def differences(job: JobPlan, run: RunCosts) -> list[str]:
    """Explain in a line how a measured step differs from the counted one; empty if it does not."""
    costs = _counted(job, run)
    measured = run.measured
    step, idle = _steady_step(run, costs)
    counted = step
    counted_idle = idle
    apart = max(abs(a - b) for a, b in zip(measured.idle, counted_idle, strict=True))
    if abs(measured.step_time / counted - 1) <= _SAME and apart <= _SAME:
        return []
    reasons = []
    for what, names in _KINDS:
        costs = replace(costs, **{name: getattr(measured.costs, name) for name in names})
        before = step
        idle_before = idle
        step, idle = _steady_step(run, costs)
        points = [a - b for a, b in zip(idle, idle_before, strict=True)]
        effect = max(abs(step - before) / counted, *map(abs, points))
        if effect > _WORTH_SAYING:
            shifts = ", ".join(f"{100 * change:+.0f}" for change in points)
            reasons.append(
                (effect, f"{what} ({1e3 * (step - before):+.3g} ms, idle {shifts} points)")
            )
    rest = measured.step_time - step
    if abs(rest) > _SAME * counted:
        reasons.append((0.0, f"other programs, or what no cost explains ({1e3 * rest:+.3g} ms)"))
    why = "; ".join(text for _, text in sorted(reasons, reverse=True))
    return [
        f"executed.svg and plan.svg differ: a step took {in_ms(measured.step_time)}, "
        f"{in_ms(counted)} by counted operations; idle {percent(measured.idle)}, "
        f"{percent(counted_idle)} as counted. "
        + (f"Why: {why}" if why else "The measured costs do not say why")
    ]


def _steady_step(run: RunCosts, costs: Costs) -> tuple[float, tuple[float, ...]]:
    return predict_timeline(run.schedule_options, run.shape, costs).steady_step(
        run.shape.num_microbatches
    )


def _counted(job: JobPlan, run: RunCosts) -> Costs:
    """Return the costs of plan.svg in seconds, scaled to the measured total of all stages."""
    counted = stage_costs(job)
    measured = run.measured.costs
    stages = run.shape.num_stages
    took, units = (
        sum(map(sum, (expand(c.forward, stages), expand(c.backward, stages))))
        for c in (measured, counted)
    )
    forward, backward = (
        [took / units * x for x in expand(c, stages)] for c in (counted.forward, counted.backward)
    )
    return Costs(forward, backward)
