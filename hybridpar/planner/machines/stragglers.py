"""Step times on devices of different speed: a distribution, from random slow-downs of each device.

slow-down of a device    1 + x, x exponential with mean `machine.stragglers`
of a rank                the largest among its tp devices, which wait for each other in every layer
of a step                the slow-down of the replica with the slowest rank, since all replicas
                         wait for it at the end

Each draw is simulated with the resulting times of its ranks. Source: shifted exponential times,
arXiv 1512.02673, section III.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.schedules.simulate.costs import Costs, expand
from hybridpar.schedules.simulate.timeline import milliseconds

DRAWS = 40


@dataclass(frozen=True)
class Spread:
    """Step times over all draws, in seconds. `late` is the 95th percentile."""

    median: float
    late: float

    def __str__(self) -> str:
        return (
            f"with stragglers {milliseconds(self.median)} ms in the median, in 95 % within "
            f"{milliseconds(self.late)} ms"
        )


def spread(cost: StepCost, seed: int = 0, draws: int = DRAWS) -> Spread | None:
    """Return the step times with stragglers as the machine describes them, or None if all devices
    are equally fast."""
    if not cost.machine.stragglers:
        return None
    times = [
        cost.simulated(slowed(cost, _drawn(cost, random.Random(seed * draws + i))))
        for i in range(draws)
    ]
    cuts = quantiles(times, n=20, method="inclusive")
    return Spread(cuts[9], cuts[18])


def slowed(cost: StepCost, factors: list[float]) -> Costs:
    """Return the costs with the work of each pipeline rank multiplied by its factor."""
    costs = cost.costs
    sizes = cost.shape

    def of_stages(times: float | Sequence[float]) -> list[float]:
        return [
            time * factors[sizes.rank_of(stage)]
            for stage, time in enumerate(expand(times, sizes.num_stages))
        ]

    return replace(
        costs,
        forward=of_stages(costs.forward),
        backward=of_stages(costs.backward),
        update=[
            time * factor
            for time, factor in zip(expand(costs.update, cost.pp), factors, strict=True)
        ],
        backward_input=None if costs.backward_input is None else of_stages(costs.backward_input),
    )


def _drawn(cost: StepCost, source: random.Random) -> list[float]:
    """Return random slow-downs of the ranks of the replica that the others wait for."""
    rate = 1 / cost.machine.stragglers
    replicas = [
        [1 + max(source.expovariate(rate) for _ in range(cost.tp)) for _ in range(cost.pp)]
        for _ in range(cost.replicas)
    ]
    return max(
        replicas,
        key=lambda factors: max(
            rank.compute * factor for rank, factor in zip(cost.ranks, factors, strict=True)
        ),
    )
