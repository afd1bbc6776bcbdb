"""The outcome of an optimizer step, and what came from other sites with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridpar.train.faults.anomalies import Anomaly


@dataclass(frozen=True)
class SiteNews:
    """What all sites have told. ending: whether any wishes to end. loss: mean over sites and over
    their steps since the message before. skipped: steps that sites have left out since then."""

    ending: bool
    loss: float | None
    skipped: int

    def notes(self) -> dict[str, float]:
        """Values for metrics.jsonl."""
        return {} if self.loss is None else {"sites_loss": self.loss, "sites_skipped": self.skipped}


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, equal on all ranks of a site. `grad_norm` is before clipping.

    `skipped`: its update was not made. `stage_norms`: of the gradients of each stage, tied ones
    with the first. `news`: of the other sites, where any came with this step; losses are those of
    this site. `num_targets`: labels that count in the batch, over all replicas and sites; where
    there are none, the losses that divide by them are 0. `metrics`: those of the model, means like
    the losses.
    """

    step: int
    losses: dict[str, float]
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    stage_norms: tuple[float, ...] = ()
    anomaly: Anomaly | None = None
    news: SiteNews | None = None
    num_targets: int = 1
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses.values())
