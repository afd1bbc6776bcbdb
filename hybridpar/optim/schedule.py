"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from hybridpar.config import OptimConfig
from hybridpar.errors import config_error

# progress from 0 to 1 through the decay -> the share of (lr - min_lr) that is left
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + cos(pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def learning_rate(step: int, settings: OptimConfig, num_steps: int) -> float:
    """The learning rate of update `step`, which counts from 0.

    Rises linearly over `warmup_steps` updates (the first takes lr / warmup_steps, the last lr), then decays from lr to
    min_lr, reached at update `decay_steps` (0: `num_steps`, so the last update of the run is just above min_lr), and
    stays there. 'constant' stays at lr.
    Raises: ConfigError if `settings.decay` names no schedule.
    """
    if settings.decay not in DECAYS:
        raise config_error("optim.decay", settings.decay, f"must be one of {', '.join(DECAYS)}", "cosine")
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    length = (settings.decay_steps or num_steps) - settings.warmup_steps
    progress = min((step - settings.warmup_steps) / length, 1.0) if length > 0 else 1.0
    return settings.min_lr + (settings.lr - settings.min_lr) * DECAYS[settings.decay](progress)
