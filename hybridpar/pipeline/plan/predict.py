"""What a schedule would take with given costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hybridpar.config import Config
from hybridpar.errors import ConfigError
from hybridpar.pipeline.plan.action import Plan
from hybridpar.pipeline.plan.costs import Costs
from hybridpar.pipeline.plan.passes import make_plan
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, make_schedule
from hybridpar.pipeline.plan.simulate import simulate
from hybridpar.pipeline.plan.timeline import Timeline

_STEADY_BATCHES = 8
_KEPT = 8
"""Plans; one of 32 stages and 100 micro-batches takes 20 MB."""
_WORTH = 1.01
"""What a smaller early switch may cost of the step time."""


@dataclass(frozen=True)
class Ordering:
    """What decides the order of actions, but for the sizes: a schedule, its options, and passes over it.

    clip: there is a NORM. gather: replicas share the update. Both as in `passes.add_updates`. split: backwards are I
    and W.
    """

    schedule: str
    warmup: str = "depth"
    early_switch: int | None = None
    gradient_buffers: int = 0
    clip: bool = True
    gather: bool = False
    split: bool = False

    @staticmethod
    def of(config: Config) -> Ordering:
        """Of a run with this configuration; early_switch = "auto" counts as off."""
        pipeline = config.pipeline
        # without clipping, pipedream's stages do not wait for each other's norm; all others report it
        clip = pipeline.schedule != "pipedream" or config.optim.clip_grad > 0 or config.train.dtype == "fp16"
        early_switch = pipeline.early_switch if isinstance(pipeline.early_switch, int) else None
        return Ordering(
            pipeline.schedule, pipeline.warmup, early_switch, pipeline.gradient_buffers, clip,
            gather=config.parallel.zero > 0, split=pipeline.split_backward)

    def make(self) -> Schedule:
        """Raises: ConfigError."""
        return make_schedule(
            self.schedule, warmup=self.warmup, early_switch=self.early_switch, gradient_buffers=self.gradient_buffers)

    def timeline(self, sizes: Sizes, costs: Costs, num_batches: int = 0) -> Timeline:
        """Simulates so many batches (0: enough for a steady state, in which all that varies has its turn).

        Raises: ConfigError.
        """
        varying = max((len(row) for rows in costs.variation.values() for row in rows), default=0)
        enough = _STEADY_BATCHES + 4 * -(-sizes.num_ranks // sizes.num_microbatches)
        enough += -(-2 * varying // sizes.num_microbatches)
        return simulate(_plan(self, sizes, num_batches or enough), costs)


@lru_cache(maxsize=_KEPT)
def _plan(ordering: Ordering, sizes: Sizes, num_batches: int) -> Plan:
    """A planner asks for the same one with other costs; making it takes as long as simulating it."""
    return make_plan(
        ordering.make(), sizes, 0, num_batches, clip=ordering.clip, gather=ordering.gather, split=ordering.split)


def smallest_early_switch(
    costs: Costs, sizes: Sizes, *, warmup: str = "depth", gradient_buffers: int = 0, clip: bool = True,
    gather: bool = False,
) -> int:
    """The smallest L of 2bw's early switch that costs no time: its simulated step takes within 1 % of the paper's rule.

    Raises: ConfigError where 2bw cannot run on these sizes.
    """
    rule = Ordering("2bw", warmup, None, gradient_buffers, clip, gather)
    m = sizes.num_microbatches
    paper = rule.timeline(sizes, costs).step_time(m)
    for switch in range(m):
        early = replace(rule, early_switch=switch)
        try:
            early.make().check_sizes(sizes)
        except ConfigError:
            continue
        if early.timeline(sizes, costs).step_time(m) <= _WORTH * paper:
            return switch
    raise AssertionError("the paper's rule is one of them")
