"""Anomalies in a step's numbers, found by all ranks alike: they have the same sums from the same
reduction.

    NORM      reduces losses and norms           UPDATE    judge: normal, or an anomaly
                                                 skip      W(t+1) = W(t), training goes on
                                                 roll_back, stop   the same, and the batches under
                                                                   way are the last ones

A judge keeps the last losses and norms. They are part of a checkpoint, so a run that goes on
decides as one that was never interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, Protocol

from hybridpar.config import Config

NON_FINITE = "non_finite"
LOSS_SPIKE = "loss_spike"
NORM_SPIKE = "norm_spike"
DIVERGENCE = "divergence"
STATE = "non_finite_state"
"""Weights, or other state, of a save are not finite."""
_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to the median distance from its median."""
_LEAST_DEVIATION = 1e-3
"""Least deviation as a share of the median: losses that hardly differ have no spikes in their last
digits."""


@dataclass(frozen=True)
class Anomaly:
    """A step that is not as it should be: its kind, a description, and a policy: "skip",
    "roll_back" or "stop"."""

    kind: str
    what: str
    policy: str


class AnomalyDetector(Protocol):
    """Says of each step, in order, whether it is an anomaly. cured: not finite, but the loss scale
    deals with it."""

    def judge(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None: ...
    def state(self) -> dict[str, list[float]]: ...
    def load_state(self, state: Mapping[str, Sequence[float]]) -> None: ...


class RunningAnomalyDetector:
    """The judge that `config.anomalies` describes."""

    def __init__(self, config: Config):
        settings = self.settings = config.anomalies
        automatic = "skip" if config.norms_first else "stop"
        self._on_non_finite = (
            automatic if settings.on_non_finite == "auto" else settings.on_non_finite
        )
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._anomalies: list[int] = []

    def judge(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None:
        if cured:
            return None
        settings = self.settings
        found = None
        if not (isfinite(loss) and isfinite(norm)):
            name, value = ("the gradient norm", norm) if isfinite(loss) else ("the loss", loss)
            found = Anomaly(NON_FINITE, f"{name} is {value}", self._on_non_finite)
        elif text := _spike("the loss", loss, self._losses, settings.loss_spike, settings.window):
            found = Anomaly(LOSS_SPIKE, text, settings.on_loss_spike)
        elif text := _spike(
            "the gradient norm", norm, self._norms, settings.norm_spike, settings.window
        ):
            found = Anomaly(NORM_SPIKE, text, settings.on_norm_spike)
        if found is not None:
            return self._limited(step, found)
        if settings.loss_spike:
            self._losses.append(loss)
        if settings.norm_spike:
            self._norms.append(norm)
        return None

    def _limited(self, step: int, found: Anomaly) -> Anomaly:
        """Returns `found`, with the policy to stop where there have been too many."""
        limit = self.settings.limit
        window = self.settings.window
        self._anomalies = [s for s in self._anomalies if s > step - window] + [step]
        if not limit or len(self._anomalies) < limit:
            return found
        what = (
            f"{found.what}, the {len(self._anomalies)}th anomaly within {window} steps "
            f"(anomalies.limit = {limit})"
        )
        return Anomaly(found.kind, what, "stop")

    def state(self) -> dict[str, list[float]]:
        """The recent values that a checkpoint keeps; empty where no spikes are looked for."""
        recent = {"losses": list(self._losses), "norms": list(self._norms)}
        return {name: values for name, values in recent.items() if values}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores `state()`. The count of anomalies goes on: a run that rolls back again and again
        must end."""
        for kept, name, wanted in (
            (self._losses, "losses", self.settings.loss_spike),
            (self._norms, "norms", self.settings.norm_spike),
        ):
            kept.clear()
            kept.extend(state.get(name, ()) if wanted else ())


class RecordedAnomalies:
    """A judge for running steps again: it skips the updates that the first run skipped, and sees
    nothing else."""

    def __init__(self, skipped_steps: Sequence[int]):
        self._skipped = frozenset(skipped_steps)

    def judge(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None:
        return Anomaly("", "skipped then", "skip") if step in self._skipped else None

    def state(self) -> dict[str, list[float]]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def _spike(name: str, value: float, recent: Sequence[float], limit: float, window: int) -> str:
    """Describes a value far above the recent ones; empty where it is not, or too few are known to
    say."""
    if not limit or len(recent) < window // 2:
        return ""
    middle = median(recent)
    deviation = max(
        _DEVIATION * median(abs(v - middle) for v in recent), _LEAST_DEVIATION * abs(middle)
    )
    if value <= middle + limit * deviation:
        return ""
    far = (value - middle) / deviation if deviation else float("inf")
    return (
        f"{name} is {value:.6g}, {far:.3g} robust standard deviations above {middle:.6g}, the "
        "median of the last "
        f"{len(recent)} (limit {limit:g})"
    )
