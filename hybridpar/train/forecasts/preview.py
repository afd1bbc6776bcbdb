"""Schedules simulated before anything runs, with costs that are counted or those of a run; and why
a run differs.

plan.svg is drawn before anything was measured. At the end of a run what was counted is replaced by
what was measured, one kind of cost after the other; each time the simulated step shows what that
kind does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
"""Keys that bear on the costs of a schedule's steps, by section; (): all of it."""
_SAME = 0.1
"""Share of the counted step time, or of all time that a rank is idle, up to which a difference is
not reported."""
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
    """A simulated schedule; times in units of the forward of one micro-batch on the costliest rank,
    or in seconds.

    step_time: from one batch to the next in the steady state. bubble: share of that time in which a
    rank is idle, for each rank. peak_activations, peak_versions: the most micro-batches in flight
    and weight versions on each rank.
    """

    timeline: Timeline
    step_time: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_versions: tuple[int, ...]


def stage_costs(job: JobPlan) -> Costs:
    """Forward operations of each stage over those of the costliest rank; backward twice that, and
    recomputation."""
    flops = forward_flops_per_token(job.config.model)
    if not any(flops):  # of operators that are not counted alone
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
    """Simulates `num_batches` batches to draw, and enough to know the steady state. Raises:
    ConfigError.

    costs: measured ones; left out: `stage_costs`. early_switch = "auto" is what they imply.
    """
    sizes = job.shape
    costs = costs or stage_costs(job)
    ordering = job.options
    if job.config.pipeline.early_switch == "auto":
        ordering = replace(ordering, early_switch=smallest_early_switch(costs, sizes, ordering))
    steady = predict_timeline(ordering, sizes, costs)
    m = sizes.num_microbatches
    drains = make_schedule(ordering).flush
    live = [
        peak_live(_first_batch(actions) if drains else actions, m)
        for _, actions in sorted(steady.plan.items())
    ]
    is_drawn = len(steady.batch_starts(m)) == num_batches
    return Preview(
        steady if is_drawn else predict_timeline(ordering, sizes, costs, num_batches),
        *steady.steady_step(m),
        tuple(one.activations for one in live),
        tuple(one.versions for one in live),
    )


def _first_batch(actions: Sequence[Action]) -> Sequence[Action]:
    """Those up to the first update, which others repeat where the pipeline drains before it."""
    return actions[
        : next((i for i, action in enumerate(actions, 1) if action.kind is Kind.UPDATE), None)
    ]


def costs_of_run(folder: Path, config: Config) -> RunCosts:
    """The costs that the run in `folder` measured, if they hold for `config` too.

    Raises: ConfigError if it has none, or if `config` differs in what they depend on; DataError if
        they are damaged.
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
    """A line that says how a step differs from the counted one, and by which costs; nothing where
    it does not."""
    costs = _counted(job, run)
    measured = run.measured
    counted, counted_idle = step, idle = _steady_step(run, costs)
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
    return predict_timeline(run.ordering, run.sizes, costs).steady_step(run.sizes.num_microbatches)


def _counted(job: JobPlan, run: RunCosts) -> Costs:
    """The costs that plan.svg is drawn from, in seconds: as many for forward and backward of all
    stages as measured."""
    counted = stage_costs(job)
    measured = run.measured.costs
    stages = run.sizes.num_stages
    took, units = (
        sum(map(sum, (expand(c.forward, stages), expand(c.backward, stages))))
        for c in (measured, counted)
    )
    forward, backward = (
        [took / units * x for x in expand(c, stages)] for c in (counted.forward, counted.backward)
    )
    return Costs(forward, backward)
