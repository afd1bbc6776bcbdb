"""Write files besides checkpoints: metrics, plots, notes. A full disk does not end training.

    append    adds a record to a growing file    waits in memory, in order, until it can be written
    put       writes a whole file                is written again from the start

A record is written in full or not at all: a partial record is cut off before the next try. Memory
is bounded: only the newest records of each file wait, and only the newest files. A resume needs
none of these files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

_RETRY_S = 1.0
_FINISH_S = 10.0
"""Time that a run waits for disk space at its end."""
_LONGEST_LINE = 1 << 20
MOST_RECORDS = 1 << 16
MOST_FEW_RECORDS = 1 << 12
MOST_FILES = 64
"""Most records of a file that wait, most of a file whose records matter less, and most whole
files."""

Write = Callable[[Path], Any]
"""Writes a file to the given path, or decides to write none."""


class Journal:
    """A file that only grows, and the records that wait to be written into it.

    Args:
        end: Size to which the file is cut first. None: the end of its last complete line.
        most: Most waiting records; older ones are dropped.
    """

    def __init__(self, path: Path, end: int | None = None, most: int = MOST_RECORDS):
        self.waiting: deque[bytes] = deque(maxlen=most)
        self.dropped = 0
        self._path = path
        self._end = end
        self._file: FileIO | None = None

    @property
    def is_written(self) -> bool:
        """Whether no record waits, and the file needs no cut."""
        return not self.waiting and (self._file is not None or self._end is None)

    def append(self, record: bytes) -> None:
        """Add a record, and drop the oldest if too many wait."""
        self.dropped += len(self.waiting) == self.waiting.maxlen
        self.waiting.append(record)

    def write(self) -> None:
        """Write all waiting records. Raises: OSError; the rest keeps waiting then."""
        if self._file is None:
            self._file = self._open()
        end = self._file.tell()
        try:
            while self.waiting:
                rest = memoryview(self.waiting[0])
                while rest:
                    rest = rest[self._file.write(rest) or 0 :]
                end += len(self.waiting.popleft())
        except OSError:
            self._end = end
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        file = self._file
        self._file = None
        if file is not None:
            # an error here repeats the error of the last write, which was raised before
            with contextlib.suppress(OSError):
                file.close()

    def _open(self) -> FileIO:
        """Open the file and go to its end. Raises: OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        try:
            size = file.seek(0, os.SEEK_END)
            end = _whole_lines(file, size) if self._end is None else min(self._end, size)
            file.truncate(end)
            file.seek(end)
        except OSError:
            file.close()
            raise
        return file


def _whole_lines(file: FileIO, size: int) -> int:
    """Return the end of the last complete line of a file."""
    since = max(size - _LONGEST_LINE, 0)
    file.seek(since)
    return since + file.read(size - since).rfind(b"\n") + 1


class Records:
    """The files of a folder that only this process writes. No method raises OSError.

    Args:
        say: Called when writing fails, and when it works again.
        writes: Whether this rank writes files.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, writes: bool = True):
        self.folder = folder
        self.writes = writes
        self._say = say
        self._journals: dict[Path, Journal] = {}
        self._files: dict[Path, Write] = {}
        self._dropped_files = 0
        self._failing: Path | None = None
        self._retry_at = 0.0

    def begin(self, name: str, end: int | None = None, most: int = MOST_RECORDS) -> None:
        """Start or restart a growing file, without its waiting records; see `Journal`."""
        path = self.folder / name
        if path in self._journals:
            self._journals[path].close()
        self._journals[path] = Journal(path, end, most)
        self.retry()

    def append(self, name: str, record: bytes) -> None:
        """Add a record to a growing file."""
        if self.writes:
            self._journals[self.folder / name].append(record)
            self.retry()

    def waiting(self, name: str) -> list[bytes]:
        """Return the records that still wait for a growing file."""
        return list(self._journals[self.folder / name].waiting)

    def put(self, name: str, write: Write) -> None:
        """Write a file under a temporary name and rename it, if `write` writes one."""
        if not self.writes:
            return
        self._files.pop(self.folder / name, None)
        self._files[self.folder / name] = write
        self.retry()
        if len(self._files) > MOST_FILES:
            del self._files[next(iter(self._files))]
            self._dropped_files += 1

    def retry(self) -> None:
        """Write waiting records and files; after a failure not within a second."""
        if self._failing is None or time.monotonic() >= self._retry_at:
            self._try()

    def finish(self) -> None:
        """Retry for some seconds, while anything cannot be written."""
        end = time.monotonic() + _FINISH_S
        while self._try() and time.monotonic() < end:
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Close the files, and report which could not be written."""
        if self._try():
            lost = [
                f"{path} ({len(journal.waiting)} records)"
                for path, journal in self._journals.items()
                if journal.waiting
            ] + [str(path) for path in self._files]
            said = "; ".join(filter(None, (", ".join(lost), self._dropped())))
            self._say(f"never written, for want of room: {said}")
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        self._files.clear()

    def _try(self) -> bool:
        """Write waiting records and files; return whether any still wait."""
        failed: dict[Path, OSError] = {}
        for path, journal in list(self._journals.items()):
            try:
                if not journal.is_written:
                    journal.write()
            except OSError as error:
                failed[path] = error
        for path, write in list(self._files.items()):
            try:
                _replace(path, write)
                del self._files[path]
            except OSError as error:
                failed[path] = error
        self._retry_at = time.monotonic() + _RETRY_S
        if failed and self._failing is None:
            self._failing, cause = next(iter(failed.items()))
            self._say(
                f"{self._failing}: cannot be written ({cause.strerror or cause}); training "
                "continues, and what is to be there waits"
            )
        elif self._failing is not None and not failed:
            path = self._failing
            self._failing = None
            self._say(
                f"{path}: can be written again; {self._dropped() or 'all that has waited is there'}"
            )
        return bool(failed)

    def _dropped(self) -> str:
        """Return what was dropped since writing failed, as text, and reset the counts."""
        dropped = [
            f"{journal.dropped} records of {path.name}"
            for path, journal in self._journals.items()
            if journal.dropped
        ] + [f"{self._dropped_files} whole files"] * bool(self._dropped_files)
        self._dropped_files = 0
        for journal in self._journals.values():
            journal.dropped = 0
        return f"the oldest were dropped, too many waited: {', '.join(dropped)}" if dropped else ""


def _replace(path: Path, write: Write) -> None:
    """Replace a file atomically. Raises: OSError, with the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".part.{path.name}")
    try:
        write(aside)
        if aside.exists():
            os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
