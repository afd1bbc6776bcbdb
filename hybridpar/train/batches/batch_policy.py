"""Decide about each batch: weight versions, loss scale, learning rate, clip or skip.

All ranks decide alike, because they decide from the same all-reduced numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES
from hybridpar.optim.loss_scale import MIN_SCALE, LossScaler
from hybridpar.optim.norm import clip_scale
from hybridpar.optim.schedule import learning_rate
from hybridpar.schedules.action import Action
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.faults.anomalies import AnomalyDetector, RunningAnomalyDetector


class BatchPolicy:
    """Decide about each batch of a run.

    Args:
        detector: Detects anomalies. Default: the configured detector.
        original: The job whose schedule says which weight versions a batch uses; a reference run
            follows the run that it checks. Default: `job`.

    Attributes:
        first: The batch before which the pipeline was last drained.
    """

    def __init__(
        self,
        job: JobPlan,
        detector: AnomalyDetector | None = None,
        *,
        original: JobPlan | None = None,
    ):
        config = job.config
        self.config = config
        self.detector = detector or RunningAnomalyDetector(config)
        self.original = original or job
        self.schedule = self.original.schedule
        self.shape = self.original.shape
        self.scaler = LossScaler.for_dtype(DTYPES[config.train.dtype], config.optim.loss_scale)
        self.first = 0
        self._loss_names = config.model.losses
        self._metric_names = config.model.metric_names
        self._scales = {0: self.scaler.scale}
        """Loss scale by weight version: a loss is scaled as when its weights were made."""
        self._num_skipped = 0
        """Batches without an update: skipped ones, and after a rollback those between the
        checkpoint and the batch that training resumes with."""

    def num_versions(self, rank: int) -> int:
        """Return the number of weight versions that a pipeline rank keeps at once."""
        return self.original.num_versions(rank)

    def start_at(self, batch: int) -> None:
        """Start training from a drained pipeline with this batch."""
        self.first = batch

    def versions_of(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return the weight version of each stage and micro-batch of a batch."""
        return self.schedule.versions_of(self.shape, batch, self.first)

    def versions_in(self, action: Action) -> tuple[int, ...]:
        """Return the weight versions that the micro-batch of a forward or backward uses."""
        return (action.version,)

    def loss_gradient(self, action: Action) -> float:
        """Return the gradient that a backward starts from: the loss scale of its batch."""
        return self.loss_scale(action.microbatch // self.shape.num_microbatches)

    def loss_scale(self, batch: int) -> float:
        """Return the loss scale of a batch, set when the weights of its loss were made."""
        if batch < self.schedule.options.sync_steps:
            return self._scales[batch]
        last = self.shape.num_stages - 1
        first = max(self.first, self.schedule.options.sync_steps)
        return self._scales[
            self.schedule.version(self.shape, last, batch * self.shape.num_microbatches, first)
        ]

    def learning_rate(self, batch: int) -> float:
        """Return the learning rate of a batch, the same for all stages.

        The rate is corrected for the delay of stage 0, whose gradients are the oldest. One rate,
        because tied embeddings on different stages must receive the same update.

        The rate schedule counts updates, so that a skipped batch uses up no warm-up. If batches
        can be skipped, call `updated` for all batches before this one first.
        """
        delay = 0.0
        if batch >= self.schedule.options.sync_steps:
            delay = self.schedule.mean_delay(self.shape, 0)
        return learning_rate(
            batch - self._num_skipped, self.config.optim, self.config.train.num_steps, delay
        )

    def result(
        self, batch: int, squares: Sequence[float], numbers: Sequence[float], num_targets: int
    ) -> StepResult:
        """Return the outcome of a batch; call it once for each batch, in order.

        Anomaly detection skips a batch without labels unless its numbers are not finite: its loss
        of 0 would distort the statistics that other batches are compared with.

        Args:
            squares: Squared gradient norm of each pipeline rank, scaled by the loss scale.
            numbers: Partial losses, then metrics.
            num_targets: Number of labels in the batch that count.
        """
        scale = self.loss_scale(batch)
        norm = math.sqrt(sum(squares)) / scale
        count = len(self._loss_names)
        named = dict(zip(self._loss_names, numbers[:count], strict=True))
        metrics = dict(zip(self._metric_names, numbers[count:], strict=True))
        # an overflow is no anomaly while a lower loss scale can still cure it
        cured = self.scaler.dynamic and scale > MIN_SCALE and not math.isfinite(norm)
        loss = sum(named.values())
        anomaly = None
        if num_targets or not (math.isfinite(loss) and math.isfinite(norm)):
            anomaly = self.detector.detect(batch + 1, loss, norm, cured=cured)
        skipped = self.config.norms_first and (anomaly is not None or not math.isfinite(norm))
        norms = tuple(math.sqrt(square) / scale for square in squares)
        return StepResult(
            batch + 1,
            named,
            norm,
            self.learning_rate(batch),
            scale,
            skipped,
            norms,
            anomaly,
            num_targets=num_targets,
            metrics=metrics,
        )

    def factor(self, batch: int, result: StepResult | None) -> float | None:
        """Return the factor that unscales and clips the gradients, or None to skip the update.

        Args:
            result: The batch's result. None: not known yet, so gradients are not clipped.
        """
        if result is None:
            return 1.0 / self.loss_scale(batch)
        if result.skipped:
            return None
        return clip_scale(result.grad_norm, self.config.optim.clip_grad) / self.loss_scale(batch)

    def predicts(self, batch: int) -> bool:
        """Return whether weight prediction, if configured, predicts from this batch's weights."""
        return batch >= self.schedule.options.sync_steps

    def updated(self, batch: int, result: StepResult | None) -> None:
        """Adapt the loss scale after the update of a batch, skipped or not."""
        found_inf = result is not None and not math.isfinite(result.grad_norm)
        self._num_skipped += result is not None and result.skipped
        self.scaler.update(found_inf=found_inf, scale=self.loss_scale(batch))
        self._scales[batch + 1] = self.scaler.scale
        self._scales.pop(batch - self.shape.num_stages - 1, None)

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps, as plain JSON."""
        return {
            "loss_scaler": self.scaler.state(),
            "loss_scales": {str(v): s for v, s in self._scales.items()},
            "recent": self.detector.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`; `state` also has the counts of batches and updates so far."""
        self._num_skipped = state["batches_done"] - state["num_updates"]
        self.scaler.load_state(state["loss_scaler"])
        self._scales = {int(v): s for v, s in state["loss_scales"].items()}
        self.detector.load_state(state.get("recent", {}))
