"""The sections [faults] and [anomalies]: what happens where a rank fails or a step goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.typed import Count, NotNegative, Positive, Within


@dataclass(frozen=True)
class FaultsConfig:
    """Recovery of a job started by `train --ranks N` after one of its ranks fails."""

    restarts: Count = 3
    """Number of restarts from the last good checkpoint before a newer one must appear. 0: never
    restart."""
    timeout_s: Positive = 60.0
    """Seconds after which a rank that makes no progress and waits for no other rank counts as
    hung, and a link that all ranks wait for as lost. Applies to steps and evaluations; set it to
    at least a few times the longest action."""
    start_timeout_s: Positive = 600.0
    """Like timeout_s, during set-up, loading, the first step (which may compile), between
    stretches of steps, and at the end."""
    save_timeout_s: Positive = 1800.0
    """Like timeout_s, while a checkpoint is saved, also in the background. Writing counts as
    progress."""
    min_ranks: Count = 0
    """Fewest ranks to continue with if a rank does not come back; the job then has fewer
    replicas or sites, with more micro-batches each. 0: continue only with all ranks."""
    patience_s: Annotated[float, Within(0, 1e8)] = 0.0
    """Longest outage of a link to wait for, in seconds, if longer than train.timeout_s (and,
    with `train --ranks N`, than timeout_s). 0: those limits apply. A rank that ends is still
    noticed at once, and a hung rank after timeout_s; under torchrun on systems other than Linux,
    a hung rank is noticed after patience_s."""


@dataclass(frozen=True)
class AnomaliesConfig:
    """The section [anomalies]: the common reaction of all ranks to an anomaly in a step.

    skip: leave out the update. roll_back: load the newest checkpoint and continue after the
    offending batch, as if the batches since that checkpoint had not been in the data; if replicas
    differ, repeat the same batches. stop: end the run with an error.
    """

    on_non_finite: Literal["auto", "skip", "roll_back", "stop"] = "auto"
    """A loss or gradient norm that is NaN or infinite. auto: skip, or stop if updates do not
    wait for the norm (pipedream without clipping). An fp16 overflow that a smaller loss scale
    may cure is no anomaly: its update is always skipped. The next save finds weights or
    optimizer state with NaN and saves nothing; roll_back then returns to the last checkpoint,
    once for each checkpoint, and any other setting stops the run."""
    loss_spike: NotNegative = 0.0
    """Standard deviations above the median of recent losses at which a loss counts as a spike.
    0: do not look for spikes. The deviation is robust: 1.48 times the median distance from the
    median."""
    on_loss_spike: Literal["skip", "roll_back", "stop"] = "skip"
    """Reaction to a loss spike."""
    norm_spike: NotNegative = 0.0
    """Like loss_spike, for the gradient norm before clipping."""
    on_norm_spike: Literal["skip", "roll_back", "stop"] = "skip"
    """Reaction to a spike of the gradient norm."""
    window: Annotated[int, Within(1, 10**6)] = 64
    """Number of recent losses and norms that a step is compared with, without anomalies."""
    audit_interval: Count = 0
    """Steps between audits that all replicas hold the same weights, bit for bit; also before
    each checkpoint. 0: none. Each audit drains the pipeline."""
    on_divergence: Literal["roll_back", "stop"] = "stop"
    """Reaction to replicas that differ."""
    limit: Count = 10
    """Number of anomalies within `window` steps that ends the run, whatever is done about each.
    0: no limit."""

    @property
    def rolls_back(self) -> bool:
        """Whether anything here may go back to a checkpoint."""
        return "roll_back" in (
            self.on_non_finite,
            self.loss_spike and self.on_loss_spike,
            self.norm_spike and self.on_norm_spike,
            self.audit_interval and self.on_divergence,
        )
