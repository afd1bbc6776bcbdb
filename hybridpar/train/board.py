"""Scalars for TensorBoard, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from hybridpar.train.records import Records


class TensorBoard:
    """A file of events in `folder`, with a record for each row of numbers.

    tensorboard's own writer has a thread, which ends with the first error of the disk: here it only makes the bytes.
    """

    def __init__(self, records: Records, folder: Path, resumed_step: int):
        self._records = records
        self._path: Path | None = None
        if importlib.util.find_spec("tensorboard") is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._path = folder / name
        records.begin(self._path, 0)
        self._add(Event(file_version="brain.Event:2"))
        if resumed_step:  # what other files have from there on is shown no more
            self._add(Event(step=resumed_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, row: dict[str, Any]) -> None:
        """The floating point numbers of a row of metrics.jsonl."""
        if self._path is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [(name, value) for name, value in row.items() if isinstance(value, float)]
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values])
        self._add(Event(step=row["step"], summary=summary))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None
        event.wall_time = time.time()
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._records.append(self._path, record.getvalue())
