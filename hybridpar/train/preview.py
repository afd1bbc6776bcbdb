"""What a schedule will look like, before anything runs: simulated with costs that are counted, or those of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybridpar.config import Config, load_toml, to_mapping
from hybridpar.errors import config_error
from hybridpar.models.build import recomputed_blocks
from hybridpar.models.cost import forward_flops_per_token, stage_split
from hybridpar.pipeline.plan.costs import Costs
from hybridpar.pipeline.plan.predict import Ordering, smallest_early_switch
from hybridpar.pipeline.plan.schedules import Sizes
from hybridpar.pipeline.plan.timeline import Timeline
from hybridpar.train.costs import RunCosts, read_costs
from hybridpar.train.folder import CONFIG, COSTS

_MATTERS: dict[str, tuple[str, ...]] = {
    "model": (), "parallel": (), "kernels": (), "pipeline": ("split", "recompute"), "optim": ("name",),
    "train": ("micro_batch_size", "dtype", "threads", "device"),
}
"""Keys that bear on what the steps of a schedule cost, by section; (): all of it."""


@dataclass(frozen=True)
class Preview:
    """A simulated schedule; times in units of the forward of one micro-batch on the costliest rank, or in seconds.

    `step_time`: from one batch to the next in the steady state. `bubble`: share of that time in which a rank is idle,
    for each rank; `peak_activations`, `peak_versions`: the most micro-batches in flight and weight versions on it.
    """

    timeline: Timeline
    step_time: float
    bubble: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_versions: tuple[int, ...]


def stage_costs(config: Config) -> Costs:
    """Forward operations of each stage over those of the costliest rank; backward twice that, and recomputation."""
    flops = forward_flops_per_token(config.model)
    pp, chunks = config.parallel.pp, config.pipeline.num_chunks
    stages = stage_split(config.model, pp, config.pipeline.split, chunks)
    again = recomputed_blocks(config.pipeline.recompute, config.model, stages)
    forward = [sum(flops[b] for b in blocks) for blocks in stages]
    backward = [2 * f + sum(flops[b] for b in stage.blocks) for f, stage in zip(forward, again, strict=True)]
    largest = max(sum(forward[rank::pp]) for rank in range(pp))
    return Costs([f / largest for f in forward], [b / largest for b in backward])


def preview(config: Config, num_batches: int, costs: Costs | None = None) -> Preview:
    """Simulates `num_batches` batches to draw, and enough to know the steady state. Raises: ConfigError.

    costs: measured ones; left out: `stage_costs`. early_switch = "auto" is what they imply.
    """
    sizes = Sizes.of(config)
    costs = costs or stage_costs(config)
    ordering = Ordering.of(config)
    if config.pipeline.early_switch == "auto":
        switch = smallest_early_switch(
            costs, sizes, warmup=ordering.warmup, gradient_buffers=ordering.gradient_buffers, gather=ordering.gather)
        ordering = replace(ordering, early_switch=switch)
    steady, ranks = ordering.timeline(sizes, costs), range(sizes.num_ranks)
    since, until, batches = steady.steady(sizes.num_microbatches)
    live = [steady.peak_live(rank, sizes.num_microbatches) for rank in ranks]
    return Preview(
        ordering.timeline(sizes, costs, num_batches), (until - since) / batches,
        tuple(steady.idle_share(rank, since, until) for rank in ranks),
        tuple(one.activations for one in live), tuple(one.versions for one in live))


def costs_of_run(folder: Path, config: Config) -> RunCosts:
    """The costs that the run in `folder` measured, if they hold for `config` too.

    Raises: ConfigError if it has none, or if `config` differs in what they depend on; DataError if they are damaged.
    """
    run, measured_by = read_costs(folder / COSTS), load_toml(folder / CONFIG)
    chunks = measured_by.pipeline.num_chunks
    if config.pipeline.num_chunks != chunks:
        rule = f"{folder} has measured {chunks} on each rank: the costs of stages are those of their blocks"
        works = f"{chunks}, with pipeline.schedule = {measured_by.pipeline.schedule}" if chunks > 1 else "1f1b"
        raise config_error("pipeline.chunks", config.pipeline.num_chunks, rule, works)
    before, now = to_mapping(measured_by), to_mapping(config)
    for section, keys in _MATTERS.items():
        for key in keys or now[section]:
            if (value := now[section][key]) != (measured := before[section].get(key)):
                rule = f"what {folder} has measured is with {measured!r}"
                raise config_error(f"{section}.{key}", value, rule, str(measured))
    return run
