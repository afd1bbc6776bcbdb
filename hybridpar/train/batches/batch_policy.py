"""Decisions on each batch: versions of the weights, loss scale, learning rate, clipping, and
whether to make the step.

All ranks decide alike: they have the same numbers, from the same reductions.
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
    """The decisions of a run.

    `judge`: says which steps are anomalies (None: the one that the configuration describes).
    `original`: the job whose schedule says which weight versions count (None: this job).
    `first`: the batch before which the pipeline was last drained.
    """

    def __init__(
        self,
        job: JobPlan,
        judge: AnomalyDetector | None = None,
        *,
        original: JobPlan | None = None,
    ):
        config = job.config
        self.config = config
        self.judge = judge or RunningAnomalyDetector(config)
        self.original = original or job
        self.schedule = self.original.schedule
        self.sizes = self.original.shape
        self.scaler = LossScaler.for_dtype(DTYPES[config.train.dtype], config.optim.loss_scale)
        self.first = 0
        self._loss_names = config.model.losses
        self._metric_names = config.model.metric_names
        self._scales = {
            0: self.scaler.scale
        }  # the loss scale that came with each version of the weights
        self._num_skipped = 0
        """Number of batches so far that made no update: skipped ones, and those between a
        checkpoint that was rolled back to and the batch that training resumed with."""

    def num_versions(self, rank: int) -> int:
        """Number of weight versions alive at once on a rank of the pipeline."""
        return self.original.num_versions(rank)

    def start_at(self, batch: int) -> None:
        """Start a stretch of training with a batch, before which the pipeline is drained."""
        self.first = batch

    def versions_of(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Weight version per stage and micro-batch of a batch of the stretch that is being
        trained."""
        return self.schedule.versions_of(self.sizes, batch, self.first)

    def versions_in(self, action: Action) -> tuple[int, ...]:
        """Weight versions that the micro-batch of a forward or backward runs on."""
        return (action.version,)

    def loss_gradient(self, action: Action) -> float:
        """The gradient that a backward starts from: the loss scale of its batch."""
        return self.loss_scale(action.microbatch // self.sizes.num_microbatches)

    def loss_scale(self, batch: int) -> float:
        """The loss scale that came with the version that the loss of a batch is computed on."""
        if batch < self.schedule.options.sync_steps:
            return self._scales[batch]
        last = self.sizes.num_stages - 1
        first = max(self.first, self.schedule.options.sync_steps)
        return self._scales[
            self.schedule.version(self.sizes, last, batch * self.sizes.num_microbatches, first)
        ]

    def learning_rate(self, batch: int) -> float:
        """Return one rate for all stages, by the oldest gradients, those of stage 0: tied weights
        must move as one.

        The schedule counts updates, as the optimizer does, so a skipped batch uses up none of its
        warm-up. If batches can be skipped, call `updated` for all batches before this one first.
        """
        delay = (
            self.schedule.mean_delay(self.sizes, 0)
            if batch >= self.schedule.options.sync_steps
            else 0.0
        )
        return learning_rate(
            batch - self._num_skipped, self.config.optim, self.config.train.num_steps, delay
        )

    def result(
        self, batch: int, squares: Sequence[float], numbers: Sequence[float], num_targets: int
    ) -> StepResult:
        """The outcome of a batch; call it for each, in order.

        `squares`: squared gradient norm of each rank of the pipeline, scaled as the loss.
        `numbers`: partial losses, then metrics. `num_targets`: labels that count. A batch without
        any is no measure for others: it is judged only if its loss or norm is not finite.
        """
        scale = self.loss_scale(batch)
        norm = math.sqrt(sum(squares)) / scale
        count = len(self._loss_names)
        named = dict(zip(self._loss_names, numbers[:count], strict=True))
        metrics = dict(zip(self._metric_names, numbers[count:], strict=True))
        cured = self.scaler.dynamic and scale > MIN_SCALE and not math.isfinite(norm)
        loss = sum(named.values())
        anomaly = None
        if num_targets or not (math.isfinite(loss) and math.isfinite(norm)):
            anomaly = self.judge.judge(batch + 1, loss, norm, cured=cured)
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
        """The factor of the gradients; None: the step is not made. `result` None: not known, no
        clipping."""
        if result is None:
            return 1.0 / self.loss_scale(batch)
        if result.skipped:
            return None
        return clip_scale(result.grad_norm, self.config.optim.clip_grad) / self.loss_scale(batch)

    def predicts(self, batch: int) -> bool:
        """Whether the weights that a batch makes are predicted, where weights are at all."""
        return batch >= self.schedule.options.sync_steps

    def updated(self, batch: int, result: StepResult | None) -> None:
        """After the update of a batch, made or not."""
        found_inf = result is not None and not math.isfinite(result.grad_norm)
        self._num_skipped += result is not None and result.skipped
        self.scaler.update(found_inf=found_inf, scale=self.loss_scale(batch))
        self._scales[batch + 1] = self.scaler.scale
        self._scales.pop(batch - self.sizes.num_stages - 1, None)

    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps; plain JSON."""
        return {
            "loss_scaler": self.scaler.state(),
            "loss_scales": {str(v): s for v, s in self._scales.items()},
            "recent": self.judge.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state()`; `state` also has the numbers of batches and of updates until then."""
        self._num_skipped = state["batches_done"] - state["num_updates"]
        self.scaler.load_state(state["loss_scaler"])
        self._scales = {int(v): s for v, s in state["loss_scales"].items()}
        self.judge.load_state(state.get("recent", {}))
