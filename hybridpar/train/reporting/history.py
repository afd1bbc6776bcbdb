"""History of a run: losses and evaluations by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hybridpar.config.row_names import VALID
from hybridpar.train.reporting.run_metrics import stream_metrics


@dataclass(frozen=True)
class History:
    """Numbers of a whole run from metrics.jsonl, including steps before the run was resumed.

    A number that is not finite (null in metrics.jsonl) is NaN.

    Attributes:
        losses: Training loss by step, one every train.log_interval steps.
        validation: Numbers of each evaluation by step, then by name ("val_loss", ..).
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> History:
        """Read a metrics.jsonl; without the file the history is empty."""
        history = History()
        for row in stream_metrics(path):
            step = row["step"]
            if "loss" in row:
                history.losses[step] = _number(row["loss"])
                continue
            numbers = {
                name: _number(value)
                for name, value in row.items()
                if name.startswith(VALID) and (value is None or isinstance(value, int | float))
            }
            if numbers:
                history.validation.setdefault(step, {}).update(numbers)
        return history


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
