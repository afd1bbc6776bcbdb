"""The outcome of an optimizer step, and what other sites reported with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridpar.train.batches.expert_loads import Loads
from hybridpar.train.faults.anomalies import Anomaly


@dataclass(frozen=True)
class SiteStatus:
    """Status of all sites, exchanged with an outer step.

    Attributes:
        ending: Whether any site asks to end training.
        loss: Mean loss over sites and over their steps since the previous exchange.
        skipped: Number of steps that sites skipped since then.
    """

    ending: bool
    loss: float | None
    skipped: int

    def notes(self) -> dict[str, float]:
        """Return the values for metrics.jsonl."""
        if self.loss is None:
            return {}
        return {"sites_loss": self.loss, "sites_skipped": self.skipped}


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, equal on all ranks of a site.

    Attributes:
        losses: Partial losses of this site by name; their sum is the loss.
        grad_norm: Gradient norm before clipping.
        skipped: Whether the update was skipped.
        stage_norms: Gradient norm of each pipeline rank; tied weights count once, with the first.
        anomaly: The anomaly found in this step, if any.
        site_status: Status of the other sites, if this step received any.
        num_targets: Labels that count in the batch, over all replicas and sites. If 0, the losses
            that divide by it are 0.
        metrics: Metrics of the model by name, means like the losses.
        loads: Tokens of this site that each expert got.
    """

    step: int
    losses: dict[str, float]
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    stage_norms: tuple[float, ...] = ()
    anomaly: Anomaly | None = None
    site_status: SiteStatus | None = None
    num_targets: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    loads: Loads = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses.values())
