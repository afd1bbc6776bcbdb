"""Functions of a program that training calls as it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.train.policy import StepResult


def _ignore(*news: Any) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called on all ranks, at the same step: they may use collectives. What they raise ends the run.

    on_step: after each optimizer step that counts, with its numbers. on_evaluation: with the step and the partial
    losses, means over all labels of the held-out samples. on_save: with the folder of a checkpoint that is complete.
    """

    on_step: Callable[[StepResult], None] = _ignore
    on_evaluation: Callable[[int, dict[str, float]], None] = _ignore
    on_save: Callable[[Path], None] = _ignore


SILENT = Callbacks()
