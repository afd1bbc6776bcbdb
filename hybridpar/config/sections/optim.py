"""The [optim] section: optimizer, learning rates, parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.typed import Count, NotNegative, Positive, Within


@dataclass(frozen=True)
class ParameterGroup:
    """An entry of optim.groups: settings for the parameters whose global names match its
    pattern."""

    pattern: str
    """Pattern of global names, such as "blocks.0.*" or "*.bias": * matches any characters (dots
    too), ? one character, [ab] one of these."""
    lr: NotNegative = 1.0
    """Factor of the learning rate."""
    weight_decay: NotNegative = 1.0
    """Factor of the weight decay, which never applies to biases and norms."""
    frozen: bool = False
    """Whether the parameters keep their values."""


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd", "lamb", "muon", "own"] = "adamw"
    """Optimizer. own: the custom rule that `spec` names."""
    spec: str = ""
    """own: the class of the rule, as "module:class", a subclass of hybridpar.UpdateRule."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Updates over which the learning rate rises to lr. Schedules count updates: a step whose
    update is skipped (fp16 overflow, anomaly) does not advance the warm-up or the decay."""
    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning-rate decay. wsd (warmup-stable-decay): constant until the last
    steps, so a run can be extended (train.num_steps) from before these."""
    restarts: Count = 0
    """cosine: times that the rate returns to lr and decays again; the cycles between warm-up and
    the end of the decay are equally long."""
    decay_steps: Count = 0
    """Update at which min_lr is reached; 0: train.num_steps. With wsd: number of updates of the
    final decay; 0: a fifth of train.num_steps."""
    lr_points: Annotated[tuple[tuple[int, float], ...], Within(0)] = ()
    """Learning rate by update, instead of the five settings above: [[0, 0.0], [100, 1e-3],
    [1000, 1e-4]]. Linear between two points, constant before the first and after the last. The
    first update is number 0."""
    groups: tuple[ParameterGroup, ...] = ()
    """[[optim.groups]]: parameters with a different learning rate or weight decay, or frozen.
    Each entry has a `pattern` of global names, the factors `lr` and `weight_decay` (1.0), and
    `frozen` (false). The first pattern that matches a parameter counts."""
    weight_decay: NotNegative = 0.01
    """Weight decay, except for biases and norms. Decoupled; with sgd it is added to the
    gradient."""
    betas: Annotated[tuple[float, float], Within(0, below=1)] = (0.9, 0.999)
    """Decay rates of the averages of gradients and squared gradients: adamw, lamb, and the
    parameters that muon updates by adamw."""
    eps: Positive = 1e-8
    """Added to the denominator: adamw, lamb, and the parameters that muon updates by adamw."""
    momentum: NotNegative = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Use Nesterov momentum, with sgd and muon."""
    staleness: Literal["none", "extrapolation", "prediction", "nesterov", "lr_rescale"] = "none"
    """Correction for gradients that are a step old (schedules 2bw and pipedream)."""
    staleness_steps: Count = 0
    """lr_rescale: steps over which the learning rate returns to its full value. 0: a tenth of
    train.num_steps."""
    clip_grad: NotNegative = 1.0
    """Largest global gradient norm. 0: no clipping."""
    loss_scale: Positive = 65536.0
    """fp16 only: initial dynamic loss scale."""

    @property
    def highest_lr(self) -> float:
        """The highest rate of the schedule."""
        return max((rate for _, rate in self.lr_points), default=self.lr)
