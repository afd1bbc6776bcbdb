"""Status that sites exchange with the weights of each outer step, their only communication.

All sites take a message at the same weight version, so a stop request, or a step that must end the
run, ends all of them at the same batch.
"""

from __future__ import annotations

from math import isfinite

from hybridpar.state.reduction.outer import OuterStep
from hybridpar.train.batches.step_result import SiteStatus, StepResult


class SiteExchange:
    """Exchange this site's status since its last message with the other sites."""

    def __init__(self, outer: OuterStep):
        self._outer = outer
        self._loss = 0.0
        self._steps = 0
        self._skipped = 0

    def _begin(self) -> None:
        self._loss = 0.0
        self._steps = 0
        self._skipped = 0

    def before_update(self, result: StepResult, ending: bool) -> None:
        """Add a step to the status and pass it on. ending: this site asks to end training."""
        self._skipped += result.skipped
        if result.num_targets and isfinite(result.loss):
            self._loss = self._loss + result.loss
            self._steps = self._steps + 1
        self._outer.tell((float(ending), self._loss, float(self._steps), float(self._skipped)))

    def after_update(self, version: int) -> SiteStatus | None:
        """Return the status that arrived with the update that made `version`, if any did."""
        if self._outer.timeline.leaving(version) is not None:
            self._begin()
        heard = self._outer.take_heard()
        if heard is None:
            return None
        ending, losses, steps, skipped = heard.T.tolist()
        means = [loss / number for loss, number in zip(losses, steps, strict=True) if number]
        loss = sum(means) / len(means) if means else None
        return SiteStatus(any(ending), loss, int(sum(skipped)))
