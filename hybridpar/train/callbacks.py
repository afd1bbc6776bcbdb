"""Functions of the program that training calls after each step, evaluation and save."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.errors import first_line
from hybridpar.train.batches.step_result import StepResult
from hybridpar.train.stop import STOP, StopFlag

_MOST_FRAMES = 4
"""Number of lines of the program that an error's text shows."""


def _ignore(*news: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called on all ranks at the same step, so that they may use collectives.

    A function that returns STOP on any rank ends training on all, at the same step. A function that
    raises does so too; its error is raised after the run has saved.

    Attributes:
        on_step: Called after each optimizer step that counts, with its result.
        on_evaluation: Called with the step and the losses and metrics by name, which are means over
            all labels of the validation samples. If validation sets have names, the dict is by set
            and then by name.
        on_save: Called with the folder of a complete checkpoint.
        stop: Requests a stop from elsewhere in the program.
    """

    on_step: Callable[[StepResult], Any] = _ignore
    on_evaluation: Callable[[int, dict[str, Any]], Any] = _ignore
    on_save: Callable[[Path], Any] = _ignore
    stop: StopFlag = field(default_factory=StopFlag)


SILENT = Callbacks()


class CallbackRunner:
    """Call the functions on one rank, and record what they ask for.

    Args:
        ask_to_stop: Called when this rank wants to stop.

    Attributes:
        error: Text of the first error that a function raised; empty if none did. No function is
            called afterwards.
        cause: The exception.
    """

    def __init__(self, callbacks: Callbacks, ask_to_stop: Callable[[], None]):
        self._callbacks = callbacks
        self._ask_to_stop = ask_to_stop
        self._returned_stop = False
        self.error = ""
        self.cause: BaseException | None = None

    @property
    def wants_stop(self) -> bool:
        """Return whether the program has asked this rank to stop, or has failed."""
        return self._returned_stop or bool(self.error) or self._callbacks.stop.is_set

    def on_step(self, result: StepResult) -> None:
        self._call("on_step", f"step {result.step}", self._callbacks.on_step, result)

    def on_evaluation(self, step: int, numbers: Any) -> None:
        self._call("on_evaluation", f"step {step}", self._callbacks.on_evaluation, step, numbers)

    def on_save(self, folder: Path) -> None:
        self._call("on_save", folder.name, self._callbacks.on_save, folder)

    def _call(self, name: str, where: str, function: Callable[..., Any], *news: Any) -> None:
        if not self.error:
            try:
                self._returned_stop |= function(*news) is STOP
            except (Exception, SystemExit) as error:
                self.error = _describe(error, name, where)
                self.cause = error
        if self.wants_stop:
            self._ask_to_stop()


def _describe(error: BaseException, name: str, where: str) -> str:
    """Return the function, the step, the error, and the program's lines that led to it."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)
    ]
    lines = "".join(traceback.format_list(frames[-_MOST_FRAMES:])).rstrip()
    said = first_line(error)
    kind = type(error).__name__
    what = kind if said == kind else f"{kind}: {said}"
    return f"the callback {name} raised {what} ({where}); the run has saved and ended" + (
        f"\n{lines}" if lines else ""
    )


def _is_ours(path: str) -> bool:
    root = Path(__file__).parents[1]
    return path in (__file__, str(root / "trainer.py"))
