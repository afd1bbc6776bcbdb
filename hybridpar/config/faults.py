"""The sections [faults] and [anomalies]: what happens where a rank fails or a step goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.typed import Count, NotNegative, Positive, Within


@dataclass(frozen=True)
class FaultsConfig:
    """Recovery of a job started by `train --ranks N` after one of its ranks fails."""

    restarts: Count = 3
    """Restarts from the last good checkpoint without a newer one; 0: none."""
    timeout_s: Positive = 60.0
    """Time after which a rank that neither goes on nor waits for another counts as hanging, and a
    link that all wait for as lost. For steps and evaluations; at least a few times the longest
    action."""
    start_timeout_s: Positive = 600.0
    """The same during set-up, loading and the first step, which may compile, between two stretches
    of steps, and at the end."""
    save_timeout_s: Positive = 1800.0
    """The same while a checkpoint is saved, also beside training; writing counts as going on."""
    min_ranks: Count = 0
    """Fewest ranks to go on with if one does not come back, with fewer replicas or sites and more
    micro-batches for each of them; 0: as many as before."""
    patience_s: Annotated[float, Within(0, 1e8)] = 0.0
    """Longest outage of a link that is waited for, if that is more than train.timeout_s (with
    `train --ranks N` also more than timeout_s); 0: these count. A rank that ends is noticed at
    once, and one that hangs after timeout_s; on systems other than Linux torchrun notices a rank
    that hangs after patience_s."""


@dataclass(frozen=True)
class AnomaliesConfig:
    """Anomalies of a step, and what all ranks do about one together.

    skip: the update is not made. roll_back: the newest checkpoint is loaded, and training goes on
    behind the offending batch as if the batches since that checkpoint had not been in the data;
    after diverging replicas, on the same ones. stop: the run ends with an error.
    """

    on_non_finite: Literal["auto", "skip", "roll_back", "stop"] = "auto"
    """A loss or gradient norm that is not finite. auto: skip; stop where updates do not wait for
    the norm (pipedream without clipping). An fp16 overflow that a smaller loss scale may cure is
    none: it is skipped, as ever. Weights or optimizer state that are not finite are found by the
    next save, which saves nothing: roll_back goes back from there, once for each checkpoint; with
    any other setting the run stops."""
    loss_spike: NotNegative = 0.0
    """Standard deviations above the median of the last losses at which a loss is a spike; 0: not
    looked for. The deviation is robust: 1.48 times the median distance from the median."""
    on_loss_spike: Literal["skip", "roll_back", "stop"] = "skip"
    """What to do about a loss that is a spike."""
    norm_spike: NotNegative = 0.0
    """The same for the gradient norm, before clipping."""
    on_norm_spike: Literal["skip", "roll_back", "stop"] = "skip"
    """What to do about a gradient norm that is a spike."""
    window: Annotated[int, Within(1, 10**6)] = 64
    """Number of last losses and norms that a step is compared with, anomalies left out."""
    audit_interval: Count = 0
    """Steps between audits that replicas hold the same weights, bit for bit, also before each
    checkpoint; 0: none. The pipeline drains for them."""
    on_divergence: Literal["roll_back", "stop"] = "stop"
    """What to do about replicas that differ."""
    limit: Count = 10
    """Number of anomalies within `window` steps that ends the run, whatever is done about each; 0:
    no limit."""

    @property
    def rolls_back(self) -> bool:
        """Whether anything here may go back to a checkpoint."""
        return "roll_back" in (
            self.on_non_finite,
            self.loss_spike and self.on_loss_spike,
            self.norm_spike and self.on_norm_spike,
            self.audit_interval and self.on_divergence,
        )
