"""What a run keeps of itself in its folder besides checkpoints: metrics, TensorBoard, notes, pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridpar.train import folder as run_folder
from hybridpar.train.board import TensorBoard
from hybridpar.train.console import lost_console
from hybridpar.train.metrics import MetricsLog
from hybridpar.train.progress import Reporter
from hybridpar.train.records import Records, Write


class RunLog:
    """The files of a run, none of which it needs to go on. `writes`: whether this rank does; else nothing is written.
    """

    def __init__(self, folder: Path, resumed_step: int, reporter: Reporter, *, writes: bool):
        self._folder, self._reporter, self._writes = folder, reporter, writes
        self._step, self._is_silent = resumed_step, False
        self._records = Records(self.note)
        if writes:
            self._records.begin(folder / run_folder.NOTES)
            self._metrics = MetricsLog(self._records, folder / run_folder.METRICS, resumed_step)
            self._board = TensorBoard(self._records, folder / "tensorboard", resumed_step)

    def write(self, row: dict[str, Any], besides: Mapping[str, Any] | None = None) -> None:
        """A row of numbers. `besides`: for the metrics alone."""
        if not self._writes:
            return
        self._step = row["step"]
        self._metrics.write(row | dict(besides or {}))
        self._board.write(row)
        if not self._is_silent and (why := lost_console()):
            self._is_silent = True
            self.note(f"stderr is lost ({why}); training goes on in silence")

    def cut_back(self, step: int) -> None:
        """Forgets the metrics of what came after a step that training goes on after."""
        if self._writes:
            self._metrics.cut_back(step)

    def note(self, text: str) -> None:
        """Says something, and keeps it."""
        self._reporter.say(text)
        if self._writes:
            note = {"time": time.time(), "step": self._step, "note": text}
            self._records.append(self._folder / run_folder.NOTES, f"{json.dumps(note)}\n".encode())

    def put(self, name: str, write: Write) -> None:
        """A file of the folder, as a whole."""
        if self._writes:
            self._records.put(self._folder / name, write)

    def draw(self, name: str, draw: Callable[[], str]) -> None:
        """A picture."""
        self.put(name, lambda path: path.write_text(draw(), encoding="utf-8"))

    def finish(self) -> None:
        """Waits some seconds for what cannot be written."""
        self._records.finish()

    def close(self) -> None:
        """Closes the files, and says which could not be written."""
        self._records.close()
