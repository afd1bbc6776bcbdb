"""What is to happen where a rank fails or a step goes wrong: the sections [faults] and [anomalies]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FaultsConfig:
    """What becomes of a job whose ranks `train --ranks N` has started, where one of them fails."""

    restarts: int = 3
    """How often it starts again from the last good checkpoint before a newer one is there; 0: never."""
    timeout_s: float = 60.0
    """A rank hangs that for so long neither goes on nor waits for another; a link is lost where for so long all wait.
    In steps and evaluations: at least a few times the longest action."""
    start_timeout_s: float = 600.0
    """The same where more is done at a time: during set-up, loading and the first step, which may compile, between two
    stretches of steps, and at the end."""
    save_timeout_s: float = 1800.0
    """The same while a checkpoint is saved, also beside training: a rank hangs that for so long has written nothing."""
    min_ranks: int = 0
    """Fewest ranks to go on with where one does not come back: there are fewer replicas then, and more micro-batches
    for each of them; 0: as many as before."""


@dataclass(frozen=True)
class AnomaliesConfig:
    """What counts as an anomaly of a step, and what all ranks then do together.

    skip: the update is not made. roll_back: the newest checkpoint is loaded, and training goes on behind the offending
    batch as if the batches since that checkpoint had not been in the data; after diverging replicas, on the same ones.
    stop: the run ends with an error.
    """

    on_non_finite: Literal["auto", "skip", "roll_back", "stop"] = "auto"
    """A loss or gradient norm that is not finite. auto: skip; stop where updates do not wait for the norm (pipedream
    without clipping). An fp16 overflow that a smaller loss scale may cure is none: it is skipped, as ever."""
    loss_spike: float = 0.0
    """A loss so many standard deviations above the median of the last ones; 0: not looked for. The deviation is a
    robust one, 1.48 times the median distance from the median."""
    on_loss_spike: Literal["skip", "roll_back", "stop"] = "skip"
    norm_spike: float = 0.0
    """The same of the gradient norm, before clipping."""
    on_norm_spike: Literal["skip", "roll_back", "stop"] = "skip"
    window: int = 64
    """How many of the last steps' losses and norms those are; anomalies are not among them."""
    audit_interval: int = 0
    """Steps between audits that replicas hold the same weights, bit for bit, also before each checkpoint; 0: none. The
    pipeline drains for them."""
    on_divergence: Literal["roll_back", "stop"] = "stop"
    """Replicas that differ."""
    limit: int = 10
    """So many anomalies within `window` steps end the run, whatever is to be done about each; 0: any number may be."""

    @property
    def rolls_back(self) -> bool:
        """Whether anything here may go back to a checkpoint."""
        return "roll_back" in (
            self.on_non_finite, self.loss_spike and self.on_loss_spike, self.norm_spike and self.on_norm_spike,
            self.audit_interval and self.on_divergence)
