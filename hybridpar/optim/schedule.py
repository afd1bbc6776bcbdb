"""Learning-rate schedules as pure functions of the number of updates made."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, pi, sin, sqrt

from hybridpar.config import OptimConfig

# progress from 0 to 1 through the decay -> the share of (lr - min_lr) that is left
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + cos(pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: 1 - sqrt(progress),
}
WSD_SHARE = 0.2
"""Part of a run over which wsd decays where optim.decay_steps is 0. Source: arXiv 2405.18392, section 3."""


def learning_rate(step: int, settings: OptimConfig, num_steps: int, delay: float = 0.0) -> float:
    """The learning rate of update `step`, which counts from 0, where gradients are `delay` updates old.

    A batch whose update is skipped is no update, so the rate waits for it. The rate rises linearly over `warmup_steps`
    updates (the first takes lr / warmup_steps, the last lr), then decays from lr to min_lr, reached at update
    `decay_steps` (0: `num_steps`, so the last update of a run is above min_lr by one update of the decay, and by one
    for each that was skipped), and stays there. 'constant' stays at lr. 'wsd' (warmup, stable, decay) stays at lr but
    for the last `decay_steps` of `num_steps` updates (0: WSD_SHARE of them): more steps change no rate before these.
    With staleness 'lr_rescale' the rate is multiplied by `delay_factor`.
    Source: wsd: MiniCPM, arXiv 2404.06395, section 4; its 1 - sqrt: Haegele et al., arXiv 2405.18392, section 3.
    """
    return _undelayed(step, settings, num_steps) * delay_factor(step, settings, num_steps, delay)


def delay_factor(step: int, settings: OptimConfig, num_steps: int, delay: float) -> float:
    """Factor of the learning rate with staleness 'lr_rescale': s at first, geometrically back to 1.

    s ** (1 - min(step / K, 1)), with K = staleness_steps (0: a tenth of `num_steps`) and s = sin(pi / (4 delay + 2)),
    0.5 for a delay of 1. Gradient descent on a parabola of curvature c with gradients `delay` steps old is stable up to
    a learning rate of 2 s / c; undelayed, of 2 / c. With any other staleness the factor is 1.
    Source: PipeMare, arXiv 1910.05124, T1 and Lemma 1. Its own rule has 1 / delay for s: nothing for a delay of 1.
    """
    if settings.staleness != "lr_rescale":
        return 1.0
    share = min(step / (settings.staleness_steps or num_steps / 10), 1.0)
    return sin(pi / (4 * delay + 2)) ** (1 - share)


def _undelayed(step: int, settings: OptimConfig, num_steps: int) -> float:
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    start, end = settings.warmup_steps, settings.decay_steps or num_steps
    if settings.decay == "wsd":
        start, end = max(start, num_steps - (settings.decay_steps or ceil(WSD_SHARE * num_steps))), num_steps
    progress = min(max((step - start) / (end - start), 0.0), 1.0) if end > start else 1.0
    return settings.min_lr + (settings.lr - settings.min_lr) * DECAYS[settings.decay](progress)
