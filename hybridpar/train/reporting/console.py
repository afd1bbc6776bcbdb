"""Standard streams of a training process whose reader may go: a killed `tee`, a closed terminal, a
full disk.

Imports no torch, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream that drops what cannot be written. lost: why, the first time; empty: nothing
    was dropped."""

    def __init__(self, stream: TextIO | None):
        """Wraps a stream, or None where its descriptor was closed before Python started."""
        self._stream = stream
        self.lost = "" if stream is not None else "it was closed from the start"

    def write(self, text: str) -> int:
        """Takes all of the text, also what is dropped."""
        if self._stream is not None:
            with self._dropping():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._dropping():
                self._stream.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def release(self) -> None:
        """Leads to /dev/null what cannot be written: Python flushes the stream when it ends, which
        would fail then."""
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: of a closed file
            self.lost = (
                self.lost or (error.strerror if isinstance(error, OSError) else None) or str(error)
            )
        except RuntimeError:  # a signal's handler prints while the stream is being written
            pass


@contextlib.contextmanager
def lasting_console() -> Iterator[None]:
    """Makes stdout and stderr drop what cannot be written, so that printing never raises."""
    before = sys.stdout, sys.stderr
    lasting = [LastingStream(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lasting)
    try:
        yield
    finally:
        for stream in lasting:
            stream.release()
        sys.stdout, sys.stderr = before


def lost_console() -> str:
    """The reason why stderr is not written any more; empty where it is."""
    return getattr(sys.stderr, "lost", "")


def hold_descriptors() -> None:
    """Opens /dev/null in the place of standard streams that are closed.

    Else the next file or connection gets the number of stderr, and with it the messages of C++
    code.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
