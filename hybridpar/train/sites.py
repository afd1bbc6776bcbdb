"""What sites tell each other besides weights, with every message of the outer step: nothing else
goes between them while they train.

So a request to stop, or a step that must end the run, is known to all at the version that takes the
message; all end with the same batch.
"""

from __future__ import annotations

from math import isfinite

from hybridpar.state.reduction.outer import OuterStep
from hybridpar.train.batches.step_result import SiteNews, StepResult


class SiteTalk:
    """The notes that go with a site's messages."""

    def __init__(self, outer: OuterStep):
        self._outer = outer
        self._loss = 0.0
        self._steps = 0
        self._skipped = 0

    def _begin(self) -> None:
        self._loss = 0.0
        self._steps = 0
        self._skipped = 0

    def before(self, result: StepResult, ending: bool) -> None:
        """Before an update: its step, and whether this site wishes to end."""
        self._skipped += result.skipped
        if result.num_targets and isfinite(result.loss):
            self._loss = self._loss + result.loss
            self._steps = self._steps + 1
        self._outer.tell((float(ending), self._loss, float(self._steps), float(self._skipped)))

    def after(self, version: int) -> SiteNews | None:
        """After the update that has made a version: what was told with the message that it took."""
        if self._outer.timeline.leaving(version) is not None:
            self._begin()
        heard = self._outer.take_heard()
        if heard is None:
            return None
        ending, losses, steps, skipped = heard.T.tolist()
        means = [loss / number for loss, number in zip(losses, steps, strict=True) if number]
        return SiteNews(any(ending), sum(means) / len(means) if means else None, int(sum(skipped)))
