"""End a run that does not get better: train.stop_by and train.stop_patience.

The decision is a function of the run's evaluations, which are equal on all ranks, so all ranks
make the same one. A resumed run reads the evaluations before from metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybridpar.config import Config
from hybridpar.config.row_names import valid_name
from hybridpar.train.evaluation import BITS_PER_BYTE, PERPLEXITY


class EarlyStopping:
    """Compares the evaluations of a run.

    Args:
        past: Rows of metrics.jsonl with evaluations, by step.
    """

    def __init__(self, config: Config, past: Mapping[int, Mapping[str, float]]):
        self._patience = config.train.stop_patience
        number, _, valid_set = config.train.stop_by.partition("/")
        self.name = valid_name(number, valid_set)
        falls = number in ("loss", PERPLEXITY, BITS_PER_BYTE)
        self._sign = 1.0 if falls else -1.0
        self._values: dict[int, float] = {}
        for step, row in past.items():
            self.add(step, row)

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Note the evaluation of a step; a number that is not finite is worse than any other."""
        if self._patience and self.name in row:
            value = row[self.name]
            self._values[step] = self._sign * value if math.isfinite(value) else math.inf

    def forget_after(self, step: int) -> None:
        """Forget the evaluations of later steps, as the run goes back to this one."""
        self._values = {at: value for at, value in self._values.items() if at <= step}

    @property
    def best_step(self) -> int:
        """Return the step with the best number so far, the first of equal ones; -1 without any."""
        return min(self._values, key=lambda step: (self._values[step], step), default=-1)

    @property
    def is_over(self) -> bool:
        """Return whether the run has not become better for too long."""
        since = sum(step > self.best_step for step in self._values)
        return 0 < self._patience <= since

    def __str__(self) -> str:
        return (
            f"{self.name} is not better than at step {self.best_step} in {self._patience} "
            "evaluations: the run ends; to continue, raise train.stop_patience"
        )
