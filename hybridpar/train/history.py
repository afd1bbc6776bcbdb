"""The history of a run: its losses and evaluations by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hybridpar.train.metrics import stream_metrics

_NUMBER = int | float


@dataclass(frozen=True)
class History:
    """What metrics.jsonl has of the whole run, also of steps before the run was resumed.

    Attributes:
        losses: The training loss by step; a step in every train.log_interval.
        validation: The numbers of each evaluation by step, each by its name in metrics.jsonl ("val_loss", ..).
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> History:
        """Read a metrics.jsonl; without the file the history is empty."""
        history = History()
        for row in stream_metrics(path):
            step = row["step"]
            if isinstance(loss := row.get("loss"), _NUMBER):
                history.losses[step] = float(loss)
                continue
            numbers = {name: float(value) for name, value in row.items()
                       if name.startswith("val") and isinstance(value, _NUMBER)}
            if numbers:
                history.validation.setdefault(step, {}).update(numbers)
        return history
