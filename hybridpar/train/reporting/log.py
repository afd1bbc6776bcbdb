"""Files of a run besides checkpoints: metrics, TensorBoard, notes, plots."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from hybridpar.config import Config
from hybridpar.errors import in_a_line
from hybridpar.reading import to_json
from hybridpar.train.folder import METRICS, NOTES
from hybridpar.train.reporting.console import lost_console
from hybridpar.train.reporting.progress import Reporter
from hybridpar.train.reporting.records import MOST_FEW_RECORDS, Records
from hybridpar.train.reporting.run_metrics import end_of, last_step
from hybridpar.train.reporting.trackers import NAMES, Trackers


class RunLog(Records):
    """Writes the files of a run; training never depends on them.

    metrics.jsonl grows by a line per row. On a resume it is first cut back to the resumed step.

    Args:
        config: Configuration of the run, whose trackers receive the rows.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int,
        reporter: Reporter,
        *,
        writes: bool,
        config: Config | None = None,
    ):
        super().__init__(folder, self.note, writes=writes)
        self._reporter = reporter
        self._step = resumed_step
        self._is_silent = False
        if writes:
            self.begin(NOTES)
            reached = last_step(folder / METRICS)
            self.begin(METRICS, end_of(folder / METRICS, resumed_step))
            self._board = TensorBoard(self, "tensorboard", resumed_step, self.note)
            self._trackers = Trackers(config or Config(), self.note, resumed_step, reached)
            self._keep_names()

    def write(self, row: dict[str, Any], besides: Mapping[str, Any] | None = None) -> None:
        """Write a row of numbers; `besides` has further values for metrics.jsonl only."""
        if not self.writes:
            return
        self._step = row["step"]
        self.append(METRICS, f"{to_json(row | dict(besides or {}))}\n".encode())
        self._board.write(row)
        self._trackers.write(row)
        if not self._is_silent and (why := lost_console()):
            self._is_silent = True
            self.note(f"stderr is lost ({why}); training continues in silence")

    def close(self) -> None:
        """Close the files and the trackers."""
        if self.writes:
            self._trackers.close()
        super().close()

    def cut_back(self, step: int) -> None:
        """Remove the metrics of steps after `step`, at which training resumes."""
        if self.writes:
            kept = [line for line in self.waiting(METRICS) if json.loads(line)["step"] <= step]
            self.begin(METRICS, end_of(self.folder / METRICS, step))
            for line in kept:
                self.append(METRICS, line)
            self._board.go_back(step)
            self._trackers.go_back(step)
            self._keep_names()

    def _keep_names(self) -> None:
        """Write trackers.json if the run has ever had a tracker."""
        if self._trackers.ids:
            self.draw(NAMES, self._trackers.names)

    def note(self, text: str) -> None:
        """Show a note, and store it."""
        self._reporter.say(text)
        self.append(
            NOTES,
            f"{json.dumps({'time': time.time(), 'step': self._step, 'note': text})}\n".encode(),
        )

    def put(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file under a temporary name and rename it; report errors but the disk's."""

        def make(path: Path) -> None:
            try:
                write(path)
            except OSError:  # Records retries later
                raise
            except Exception as error:  # a failed plot must not fail the run
                path.unlink(missing_ok=True)
                self._reporter.say(f"no {name}: {in_a_line(error)}; nothing else is missing")

        super().put(name, make)

    def draw(self, name: str, draw: Callable[[], str]) -> None:
        """Write a plot, or another text."""
        self.put(name, lambda path: path.write_text(draw(), encoding="utf-8"))


class TensorBoard:
    """Writes TensorBoard events, one record per row of numbers, if tensorboard is installed.

    tensorboard's writer has a thread that ends with the first disk error, so that only its encoding
    is used here. If tensorboard fails, that is reported once, and nothing more is written.

    Args:
        folder: Folder for the events, in the run folder.
    """

    def __init__(
        self, records: Records, folder: str, resumed_step: int, say: Callable[[str], None]
    ):
        self._records = records
        self._say = say
        self._is_used = importlib.util.find_spec("tensorboard") is not None
        self._file = f"{folder}/events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        if self._is_used:
            records.begin(self._file, 0, MOST_FEW_RECORDS)
        self._add(file_version="brain.Event:2")
        self.go_back(resumed_step)

    def go_back(self, step: int) -> None:
        """Hide earlier records of steps after `step`, in this file and in older ones."""
        first = step + 1 if step else 0  # an evaluation comes before the first step
        self._add(step=first, session_log={"status": "START"})

    def write(self, row: dict[str, Any]) -> None:
        """Add the floating point numbers of a row of metrics.jsonl."""
        values = [
            {"tag": name, "simple_value": value}
            for name, value in row.items()
            if isinstance(value, float)
        ]
        self._add(step=row["step"], summary={"value": values})

    def _add(self, **fields: Any) -> None:
        """Add an event with these fields of tensorboard's protobuf."""
        if not self._is_used:
            return
        try:
            record = _encoded(fields)
        except Exception as error:  # for example an import error, or an unsupported protobuf
            self._is_used = False
            self._say(f"tensorboard: {in_a_line(error)}; training continues without it")
        else:
            self._records.append(self._file, record)


def _encoded(fields: dict[str, Any]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return record.getvalue()
