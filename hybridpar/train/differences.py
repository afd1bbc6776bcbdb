"""Why a run's steps are not what plan.svg shows, which is drawn before anything was measured.

What was counted is replaced by what was measured, one kind of cost after the other; each time the simulated step shows
what that kind does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpar.config import Config
from hybridpar.pipeline.plan.costs import Costs, expand
from hybridpar.train.costs import RunCosts, in_ms, percent
from hybridpar.train.preview import stage_costs

SAME = 0.1
"""Of the counted step time, or of all time that a rank is idle: a difference of so much is no news."""
_WORTH_SAYING = 0.02
_KINDS = (
    ("forward and backward take other times than counted", ("forward", "backward", "backward_input", "variation")),
    ("updates and communication calls", ("update", "calls")),
    ("transfers and reductions",
     ("transfer", "latency", "reduce", "norm", "gather", "tied", "blocking_norm", "serial_links")),
    ("cores are shared", ("cores", "transfer_work")),
)


@dataclass(frozen=True)
class _Steady:
    """A step in the steady state: its seconds, and the idle share of each rank."""

    step: float
    idle: tuple[float, ...]


def differences(config: Config, run: RunCosts) -> list[str]:
    """A line that says how a step differs from the counted one, and by which costs; nothing where it does not."""
    costs, measured = _counted(config, run), run.measured
    counted = before = _steady(run, costs)
    apart = max(abs(a - b) for a, b in zip(measured.idle, counted.idle, strict=True))
    if abs(measured.step_time / counted.step - 1) <= SAME and apart <= SAME:
        return []
    reasons = []
    for what, names in _KINDS:
        costs = replace(costs, **{name: getattr(measured.costs, name) for name in names})
        after = _steady(run, costs)
        points = [a - b for a, b in zip(after.idle, before.idle, strict=True)]
        effect = max(abs(after.step - before.step) / counted.step, *map(abs, points))
        if effect > _WORTH_SAYING:
            reasons.append((effect, f"{what} ({1e3 * (after.step - before.step):+.3g} ms, idle {_points(points)})"))
        before = after
    rest = measured.step_time - before.step
    if abs(rest) > SAME * counted.step:
        reasons.append((0.0, f"other programs, or what no cost explains ({1e3 * rest:+.3g} ms)"))
    why = "; ".join(text for _, text in sorted(reasons, reverse=True))
    return [f"executed.svg and plan.svg differ: a step took {in_ms(measured.step_time)}, "
            f"{in_ms(counted.step)} by counted operations; idle {percent(measured.idle)}, "
            f"{percent(counted.idle)} as counted. " + (f"Why: {why}" if why else "The measured costs do not say why")]


def _counted(config: Config, run: RunCosts) -> Costs:
    """The costs that plan.svg is drawn from, in seconds: as many for forward and backward of all stages as measured."""
    counted, measured, stages = stage_costs(config), run.measured.costs, run.sizes.num_stages
    took, units = (sum(map(sum, (expand(c.forward, stages), expand(c.backward, stages)))) for c in (measured, counted))
    forward, backward = ([took / units * x for x in expand(c, stages)] for c in (counted.forward, counted.backward))
    return Costs(forward, backward)


def _steady(run: RunCosts, costs: Costs) -> _Steady:
    timeline = run.ordering.timeline(run.sizes, costs)
    since, until, batches = timeline.steady(run.sizes.num_microbatches)
    return _Steady((until - since) / batches,
                   tuple(timeline.idle_share(rank, since, until) for rank in range(run.sizes.num_ranks)))


def _points(changes: Sequence[float]) -> str:
    return ", ".join(f"{100 * change:+.0f}" for change in changes) + " points"
