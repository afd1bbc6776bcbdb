"""Standard streams that survive the loss of their reader: a killed `tee`, a closed terminal.

torch is not imported, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


def say(text: str) -> None:
    """Print a line of this command to stderr."""
    print(f"hybridpar: {text}", file=sys.stderr, flush=True)


class LastingStream:
    """A text stream that drops text which cannot be written; `lost` is the first reason."""

    def __init__(self, stream: TextIO | None):
        """Wrap a stream; None if its descriptor was closed before Python started."""
        self._stream = stream
        self.lost = "" if stream is not None else "it was closed from the start"

    def write(self, text: str) -> int:
        """Write the text or drop it, and return its length."""
        if self._stream is not None:
            with self._dropping():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or ignore that it fails."""
        if self._stream is not None:
            with self._dropping():
                self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def release(self) -> None:
        """Redirect an unwritable stream to /dev/null, because Python flushes it at exit."""
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
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            reason = error.strerror if isinstance(error, OSError) else None
            self.lost = self.lost or reason or str(error)
        except RuntimeError:  # a signal's handler prints while the stream is being written
            pass


@contextlib.contextmanager
def lasting_console() -> Iterator[None]:
    """Make stdout and stderr drop what cannot be written, so that printing never raises."""
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
    """Return why stderr is not written any more; empty if it is."""
    return getattr(sys.stderr, "lost", "")


def hold_descriptors() -> None:
    """Open /dev/null in place of standard streams that are closed.

    Otherwise the next file or connection would get the number of stderr, and receive the messages
    of C++ code.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
