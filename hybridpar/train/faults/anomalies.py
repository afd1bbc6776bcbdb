"""Detect anomalies in a step's numbers, on all ranks alike because all have the same sums.

    NORM      reduces losses and norms       UPDATE    detect: normal, or an anomaly
                                                 skip      W(t+1) = W(t), training continues
                                                 roll_back, stop   the same, and batches in the
                                                                   pipeline are the last ones

A detector keeps recent losses and norms. They are part of a checkpoint, so that a resumed run
decides like an uninterrupted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from hybridpar.config import Config

NON_FINITE = "non_finite"
LOSS_SPIKE = "loss_spike"
NORM_SPIKE = "norm_spike"
DIVERGENCE = "divergence"
STATE = "non_finite_state"
"""Weights or other state that would be saved are not finite."""
_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to the median distance from its median."""
_LEAST_DEVIATION = 1e-3
"""Lower limit of the deviation, relative to the median, so that nearly constant losses do not spike
in their last digits."""


@dataclass(frozen=True)
class Anomaly:
    """An abnormal step: kind, description, and policy ("skip", "roll_back" or "stop")."""

    kind: str
    what: str
    policy: str


class AnomalyDetector:
    """Decides for each step, in order, whether it is an anomaly: none is, and nothing is kept."""

    def detect(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None:
        """Return the anomaly of a step, or None. cured: a lower loss scale will cure it."""
        return None

    def state(self) -> dict[str, list[float]]:
        """Return the values that a checkpoint keeps."""
        return {}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore `state()`."""


class RunningAnomalyDetector(AnomalyDetector):
    """Detects the anomalies that `config.anomalies` describes, compared with recent steps."""

    def __init__(self, config: Config):
        settings = self.settings = config.anomalies
        self._on_non_finite = settings.on_non_finite
        if self._on_non_finite == "auto":
            self._on_non_finite = "skip" if config.norms_first else "stop"
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._anomalies: list[int] = []

    def detect(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None:
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
        """Return `found`, with the policy "stop" after too many anomalies."""
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
        recent = {"losses": list(self._losses), "norms": list(self._norms)}
        return {name: values for name, values in recent.items() if values}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore `state()`, but not the count of anomalies: repeated rollbacks must end."""
        for kept, name, wanted in (
            (self._losses, "losses", self.settings.loss_spike),
            (self._norms, "norms", self.settings.norm_spike),
        ):
            kept.clear()
            kept.extend(state.get(name, ()) if wanted else ())


class RecordedAnomalies(AnomalyDetector):
    """Replays the anomalies of an earlier run, so that the same updates are skipped."""

    def __init__(self, skipped_steps: Sequence[int]):
        self._skipped = frozenset(skipped_steps)

    def detect(self, step: int, loss: float, norm: float, *, cured: bool) -> Anomaly | None:
        """Return an anomaly for a step that the earlier run skipped."""
        return Anomaly("", "skipped then", "skip") if step in self._skipped else None


def _spike(name: str, value: float, recent: Sequence[float], limit: float, window: int) -> str:
    """Describe a value far above the recent ones; empty if it is not, or if too few are known."""
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
        f"median of the last {len(recent)} (limit {limit:g})"
    )
