"""What a run writes beside its checkpoints: metrics, pictures, notes. A disk that is full for a while ends nothing.

    append    a record of a file that grows      waits in memory, in order, until it can be written
    put       a file as a whole                  is written again from the start

A record is there whole or not at all: the part that had room is cut off before it is tried again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

_AGAIN_S = 1.0
_LAST_S = 10.0
"""How long a run waits at its end for room."""
_LONGEST_LINE = 1 << 20

Write = Callable[[Path], Any]
"""Writes a file under the name that it is given, or none."""


class Journal:
    """A file that only grows, and what waits to be written into it. `end`: what is behind is cut off; None: what
    follows the last line that is whole."""

    def __init__(self, path: Path, end: int | None = None):
        self.waiting: deque[bytes] = deque()
        self._path, self._end = path, end
        self._file: FileIO | None = None

    @property
    def is_written(self) -> bool:
        """Whether nothing waits, and nothing is to be cut off."""
        return not self.waiting and (self._file is not None or self._end is None)

    def write(self) -> None:
        """Writes all that waits. Raises: OSError; what could be written waits no more then."""
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
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what it says now, it has said before
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
    """Where the last line of a file that is whole ends."""
    since = max(size - _LONGEST_LINE, 0)
    file.seek(since)
    return since + file.read(size - since).rfind(b"\n") + 1


class Records:
    """The files of one process, which no other one writes. `say`: told once that there is trouble, and once of its end.

    No method raises OSError.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._journals: dict[Path, Journal] = {}
        self._files: dict[Path, Write] = {}
        self._trouble: Path | None = None
        self._again = 0.0

    def begin(self, path: Path, end: int | None = None) -> None:
        """`path` grows from now on; `end` as in Journal. What waited for it waits no more."""
        if path in self._journals:
            self._journals[path].close()
        self._journals[path] = Journal(path, end)
        self.retry()

    def append(self, path: Path, record: bytes) -> None:
        """Adds to a file that has begun."""
        self._journals[path].waiting.append(record)
        self.retry()

    def waiting(self, path: Path) -> list[bytes]:
        """What is not yet in a file that has begun."""
        return list(self._journals[path].waiting)

    def put(self, path: Path, write: Write) -> None:
        """Writes a file beside its place and renames it; where `write` makes none, there is none."""
        self._files[path] = write
        self.retry()

    def retry(self) -> None:
        """Writes what waits; where that fails, not sooner than a second later again."""
        if self._trouble is None or time.monotonic() >= self._again:
            self._try()

    def finish(self) -> None:
        """Waits some seconds for what cannot be written."""
        end = time.monotonic() + _LAST_S
        while self._try() and time.monotonic() < end:
            time.sleep(_AGAIN_S)

    def close(self) -> None:
        """Closes the files, and says which could not be written."""
        if self._try():
            lost = [f"{path} ({len(journal.waiting)} records)" for path, journal in self._journals.items()
                    if journal.waiting] + [str(path) for path in self._files]
            self._say(f"never written, for want of room: {', '.join(lost)}")
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        self._files.clear()

    def _try(self) -> bool:
        """Writes what waits; whether some of it still does."""
        failed: dict[Path, OSError] = {}
        for path, journal in list(self._journals.items()):
            if not journal.is_written:
                with _noting(failed, path):
                    journal.write()
        for path, write in list(self._files.items()):
            with _noting(failed, path):
                _replace(path, write)
                del self._files[path]
        self._again = time.monotonic() + _AGAIN_S
        if failed and self._trouble is None:
            self._trouble, error = next(iter(failed.items()))
            self._say(f"{self._trouble}: cannot be written ({error.strerror or error}); training goes on, and what is "
                      "to be there waits")
        elif self._trouble is not None and not failed:
            path, self._trouble = self._trouble, None
            self._say(f"{path}: can be written again; all that has waited is there")
        return bool(failed)


@contextlib.contextmanager
def _noting(failed: dict[Path, OSError], path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failed[path] = error


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
