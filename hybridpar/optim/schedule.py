"""Learning-rate schedules as pure functions of the number of updates made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import ceil, cos, inf, isfinite, pi, sin, sqrt
from operator import itemgetter

from hybridpar.config import OptimConfig
from hybridpar.errors import config_error

Points = tuple[tuple[int, float], ...]
"""Updates, counted from 0, and their learning rates."""

# progress from 0 to 1 through the decay -> the share of (lr - min_lr) that is left
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + cos(pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: 1 - sqrt(progress),
}
PRECISION = 1e-6
"""Share of the highest learning rate by which a table may differ from the function that it
stands for."""
WSD_SHARE = 0.2
"""Part of a run over which wsd decays if optim.decay_steps is 0. Source: arXiv 2405.18392,
section 3."""


def learning_rate(step: int, settings: OptimConfig, num_steps: int, delay: float = 0.0) -> float:
    """Return the learning rate of update `step`, counted from 0.

    A batch whose update is skipped is no update, so the rate waits for it. The rate rises linearly
    over `warmup_steps` updates (the first takes lr / warmup_steps, the last lr), then decays from
    lr to min_lr, reached at update `decay_steps` (0: `num_steps`, so the last update of a run is
    above min_lr by one update of the decay, and by one for each that was skipped), and stays there.

        cosine        with `restarts` decays so many times more, each time from lr
        constant      stays at lr
        wsd           (warmup, stable, decay) stays at lr except for the last `decay_steps` of
                      `num_steps` updates (0: WSD_SHARE of them): more steps change no rate before
                          these
        lr_points     replace all of this: the rate is linear between the points of the table

    With staleness 'lr_rescale' the rate is multiplied by `delay_factor`.

    Args:
        delay: Age of the gradients, in updates.

    Source: restarts: SGDR, arXiv 1608.03983, with cycles of one length. wsd: MiniCPM, arXiv
    2404.06395, section 4; its 1 - sqrt: Haegele et al., arXiv 2405.18392, section 3.
    """
    return _undelayed(step, settings, num_steps) * delay_factor(step, settings, num_steps, delay)


def delay_factor(step: int, settings: OptimConfig, num_steps: int, delay: float) -> float:
    """Return the factor of the learning rate with staleness 'lr_rescale': s at first, later 1.

    It rises geometrically: s ** (1 - min(step / K, 1)), with K = staleness_steps (0: a tenth of
    `num_steps`) and s = sin(pi / (4 delay + 2)), 0.5 for a delay of 1. Gradient descent on a
    parabola
    of curvature c with gradients `delay` steps old is stable up to a learning rate of 2 s / c;
    undelayed, of 2 / c. With any other staleness the factor is 1.
    Source: PipeMare, arXiv 1910.05124, T1 and Lemma 1. Its own rule has 1 / delay for s, which does
    nothing for a delay of 1.
    """
    if settings.staleness != "lr_rescale":
        return 1.0
    share = min(step / (settings.staleness_steps or num_steps / 10), 1.0)
    return sin(pi / (4 * delay + 2)) ** (1 - share)


def _undelayed(step: int, settings: OptimConfig, num_steps: int) -> float:
    if settings.lr_points:
        return _between(settings.lr_points, step)
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    start = settings.warmup_steps
    end = settings.decay_steps or num_steps
    if settings.decay == "wsd":
        start = max(start, num_steps - (settings.decay_steps or ceil(WSD_SHARE * num_steps)))
        end = num_steps
    progress = min(max((step - start) / (end - start), 0.0), 1.0) if end > start else 1.0
    if settings.restarts and progress < 1:  # in whole numbers, so that cycles begin at lr
        progress = (step - start) * (settings.restarts + 1) % (end - start) / (end - start)
    return settings.min_lr + (settings.lr - settings.min_lr) * DECAYS[settings.decay](progress)


def _between(points: Points, step: int) -> float:
    """Return the rate of a table at `step`: linear between two points, exact at each, constant
    outside."""
    after = bisect_right(points, step, key=itemgetter(0))
    if after in (0, len(points)):
        return points[max(after - 1, 0)][1]
    (start, low), (end, high) = points[after - 1 : after + 1]
    return low + (high - low) * (step - start) / (end - start)


def describe_points(points: Points) -> str:
    """Describe a table of learning rates in a line: its first, highest and last rate."""
    highest = max(points, key=itemgetter(1))
    shown = dict.fromkeys((points[0], highest, points[-1]))
    return f"learning rate of optim.lr_points ({len(points)}): " + ", ".join(
        f"{rate:.4g} at update {step}" for step, rate in sorted(shown)
    )


def tabulate(schedule: Callable[[int], float], num_steps: int) -> Points:
    """Return a learning-rate schedule as points for optim.lr_points, the fewest of a greedy search.

    Between the points the table differs from it by at most PRECISION of its highest rate.

    Args:
        schedule: Returns the rate of update `step`, counted from 0.

    Raises:
        ConfigError: It returns anything but finite numbers >= 0, or another number when it is
            called a second time.
    """
    rates = [_checked(schedule, step) for step in range(max(num_steps, 1))]
    room = PRECISION * max(rates)
    points = [(0, rates[0])]
    # the slopes with which a line from the last point passes all rates since then
    start = 0
    low = -inf
    high = inf
    for step in range(1, len(rates)):
        slope = (rates[step] - rates[start]) / (step - start)
        if not low <= slope <= high:
            start = step - 1
            points.append((start, rates[start]))
            low = -inf
            high = inf
            slope = rates[step] - rates[start]
        margin = room / (step - start)
        low = max(low, slope - margin)
        high = min(high, slope + margin)
    last = (len(rates) - 1, rates[-1])
    return tuple(points if points[-1] == last else [*points, last])


def _checked(schedule: Callable[[int], float], step: int) -> float:
    """Return the rate of a user's schedule. Raises: ConfigError."""
    rate = schedule(step)
    again = schedule(step)
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = -1.0
    if not (isfinite(number) and number >= 0):
        rule = (
            f"must return a finite number that is not negative; for step {step} it returned "
            f"{rate!r}"
        )
        raise config_error("lr_schedule", schedule, rule, "lambda step: 1e-3 * 0.99**step")
    if again != rate:
        rule = (
            f"must return the same number each time for the same step; for step {step} it "
            f"returned {rate!r}, then {again!r}"
        )
        raise config_error("lr_schedule", schedule, rule, "lambda step: 1e-3 * 0.99**step")
    return number
