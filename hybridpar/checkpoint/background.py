"""One rank's part of a save, in a background thread: copy, write, leave a note; the first rank
then publishes the checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hybridpar.checkpoint import handover
from hybridpar.errors import NotFiniteError
from hybridpar.flight import Flight

_NICE = 10
_FULL = (errno.ENOSPC, errno.EDQUOT)

Write = Callable[[dict[str, Tensor]], handover.Written]
Check = Callable[[handover.Written], None]


@dataclass(frozen=True)
class Note:
    """Report the progress of a save in a flight record.

    Args:
        limit_s: Seconds after which an unchanged report counts as a hang.
    """

    flight: Flight
    step: int
    limit_s: float

    def doing(self, what: str) -> None:
        self.flight.phase(f"{what} the checkpoint of step {self.step}", self.limit_s)

    def end(self) -> None:
        self.flight.phase("idle")


class Task(threading.Thread):
    """A save that runs beside training. It uses no collectives; its time goes into copying memory,
    checksums and writing, which release Python's lock.

    `copied` is set when training may change its state. Set `given_up` when another rank has failed.
    `error` is the reason for a failure, `folder` the published checkpoint (on the rank that
    publishes).
    """

    def __init__(
        self,
        aside: Path,
        publish: Callable[[threading.Event], Path] | None,
        note: Note,
        *,
        gives_way: bool,
    ):
        super().__init__(name="checkpoint", daemon=True)
        self.aside = aside
        self._publish = publish
        self._note = note
        self._gives_way = gives_way
        self.copied, self.given_up = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.folder: Path | None = None
        self._take: Callable[[], dict[str, Tensor]] | None = None
        self._write: Write | None = None
        self._check: Check | None = None

    def writes(
        self, take: Callable[[], dict[str, Tensor]], write: Write, check: Check | None = None
    ) -> None:
        """Set what the thread does: call `take` for the data, `write` it, and `check` what was
        written."""
        self._take = take
        self._write = write
        self._check = check

    def run(self) -> None:
        try:
            self._work()
        except handover.GivenUp:
            pass
        except Exception as error:
            self.error = error
        finally:
            self._note.end()
            self.copied.set()

    def _work(self) -> None:
        if self._take is not None and self._write is not None:
            self._note.doing("copying")
            tensors = self._take()
            self.copied.set()
            if self._gives_way:
                _give_way()
            self._note.doing("writing")
            written = self._write(tensors)
            if self._check is not None:
                self._note.doing("checking")
                self._check(written)
            handover.leave(self.aside, written)
        if self._publish is not None:
            self._note.doing("publishing")
            self.folder = self._publish(self.given_up)

    def failure(self, who: str, num_bytes: int) -> str:
        """Return why rank `who` failed to save, or "" if it has not failed. `num_bytes` is the
        size of the whole checkpoint."""
        return "" if self.error is None else explain(self.error, who, num_bytes)

    @property
    def not_finite(self) -> str:
        """Return which tensor has NaN or infinite values, or "" if none was found."""
        return str(self.error) if isinstance(self.error, NotFiniteError) else ""


def explain(error: Exception, who: str, num_bytes: int) -> str:
    """Return why a checkpoint of `num_bytes` bytes could not be written by `who`."""
    why = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
    room = ""
    if isinstance(error, OSError) and error.errno in _FULL:
        room = (
            f"; it takes {num_bytes / 1e9:.3g} GB, beside those that are kept until it is there: "
            "make room, or set "
            "checkpoint.keep = 1"
        )
    return f"{who} cannot write the checkpoint: {why}{room}"


def _give_way() -> None:
    """Lower this thread's priority, so that it uses only time that other threads leave. (Only
    Linux has priorities of threads.)"""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
