"""The history of a run: its losses and evaluations by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hybridpar.config.row_names import VALID
from hybridpar.train.reporting.run_metrics import stream_metrics


@dataclass(frozen=True)
class History:
    """What metrics.jsonl has of the whole run, also of steps before the run was resumed.

    Attributes:
        losses: The training loss by step; a step in every train.log_interval.
        validation: The numbers of each evaluation by step, each by its name in metrics.jsonl
            ("val_loss", ..).

    A number that is not finite is NaN here, as metrics.jsonl has null for it.
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
