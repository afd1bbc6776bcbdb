"""Files that a run writes beside its checkpoints: metrics, pictures, notes. A full disk does not
end training.

    append    adds a record to a file that grows    waits in memory, in order, until it can be written
    put       writes a file as a whole              is written again from the start

A record is written whole or not at all: the part that had room is cut off before it is tried again.
Memory is bounded: of each file only its newest records wait, and only the newest files. Resume
needs none of them.
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
"""How long a run waits at its end for room."""
_LONGEST_LINE = 1 << 20
MOST_RECORDS = 1 << 16
MOST_FEW_RECORDS = 1 << 12
MOST_FILES = 64
"""How many records of a file wait at most, how many of one that is dropped first, and how many
whole files."""

Write = Callable[[Path], Any]
"""Writes a file under the name that it is given, or none."""


class Journal:
    """A file that only grows, and the records that wait to be written into it.

    end: the file is cut off there; None: after its last whole line. most: the oldest records above
    it are dropped.
    """

    def __init__(self, path: Path, end: int | None = None, most: int = MOST_RECORDS):
        self.waiting: deque[bytes] = deque(maxlen=most)
        self.dropped = 0
        self._path = path
        self._end = end
        self._file: FileIO | None = None

    @property
    def is_written(self) -> bool:
        """Whether nothing waits, and nothing is to be cut off."""
        return not self.waiting and (self._file is not None or self._end is None)

    def append(self, record: bytes) -> None:
        self.dropped += len(self.waiting) == self.waiting.maxlen
        self.waiting.append(record)

    def write(self) -> None:
        """Writes all that waits. Raises: OSError; the records that were written wait no more
        then."""
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
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(
                OSError
            ):  # an error of the last write, which has been raised before
                file.close()

    def _open(self) -> FileIO:
        """The file, at its end. Raises: OSError."""
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
    """The place where the last whole line of a file ends."""
    since = max(size - _LONGEST_LINE, 0)
    file.seek(since)
    return since + file.read(size - since).rfind(b"\n") + 1


class Records:
    """The files of a folder that this process alone writes. No method raises OSError.

    say: told once when writing fails, and once when it works again. writes: False on a rank that
    keeps no files.
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
        """Lets a file grow from now on; `end` and `most` as in Journal. Its records that waited are
        forgotten."""
        path = self.folder / name
        if path in self._journals:
            self._journals[path].close()
        self._journals[path] = Journal(path, end, most)
        self.retry()

    def append(self, name: str, record: bytes) -> None:
        """Adds to a file that has begun."""
        if self.writes:
            self._journals[self.folder / name].append(record)
            self.retry()

    def waiting(self, name: str) -> list[bytes]:
        """The records that are not yet in a file that has begun."""
        return list(self._journals[self.folder / name].waiting)

    def put(self, name: str, write: Write) -> None:
        """Writes a file beside its place and renames it; where `write` makes none, there is
        none."""
        if not self.writes:
            return
        self._files.pop(self.folder / name, None)
        self._files[self.folder / name] = write
        self.retry()
        if len(self._files) > MOST_FILES:
            del self._files[next(iter(self._files))]
            self._dropped_files += 1

    def retry(self) -> None:
        """Writes what waits; after a failure not sooner than a second later."""
        if self._failing is None or time.monotonic() >= self._retry_at:
            self._try()

    def finish(self) -> None:
        """Waits some seconds for what cannot be written."""
        end = time.monotonic() + _FINISH_S
        while self._try() and time.monotonic() < end:
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Closes the files, and says which could not be written."""
        if self._try():
            lost = [
                f"{path} ({len(journal.waiting)} records)"
                for path, journal in self._journals.items()
                if journal.waiting
            ] + [str(path) for path in self._files]
            self._say(
                "never written, for want of room: "
                f"{'; '.join(filter(None, (', '.join(lost), self._dropped())))}"
            )
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        self._files.clear()

    def _try(self) -> bool:
        """Writes what waits; whether some of it still does."""
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
                f"{self._failing}: cannot be written ({cause.strerror or cause}); training goes "
                "on, and what is "
                "to be there waits"
            )
        elif self._failing is not None and not failed:
            path = self._failing
            self._failing = None
            self._say(
                f"{path}: can be written again; {self._dropped() or 'all that has waited is there'}"
            )
        return bool(failed)

    def _dropped(self) -> str:
        """Says how much was dropped since writing failed, and counts anew; empty: nothing."""
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
    """Raises: OSError, and nothing has changed then."""
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
