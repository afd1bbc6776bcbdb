"""The history of a run as its metrics.jsonl has it."""

from __future__ import annotations

import math
from pathlib import Path

from hybridpar.train.reporting.history import History


def test_numbers_that_are_not_finite_stay_in_the_history(tmp_path: Path) -> None:
    """A run that has diverged has a loss for each step all the same."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "val_loss": 2.5, "val_losses": {"mlm": 2.0, "nsp": 0.5}, "val_f1": null}\n'
        '{"step": 1, "loss": 2.0, "acc": null}\n{"step": 2, "loss": null}\n{"step": 2, "val_loss": '
        "null}\n"
    )
    history = History.read(path)
    assert history.losses[1] == 2.0
    assert math.isnan(history.losses[2])
    assert list(history.losses) == [1, 2]
    assert history.validation[0]["val_loss"] == 2.5
    assert list(history.validation[0]) == ["val_loss", "val_f1"]
    assert math.isnan(history.validation[2]["val_loss"])
