"""Requests to stop: by a signal (train.stop_signals), or by the program that trains.

The first signal is recorded; a later one ends the process at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1
SAME_REQUEST_S = 1.0
"""Signals within this time count as one request: a batch system signals launcher and ranks, and the
launcher signals the ranks again."""
ERROR_TIME_S = 15.0
"""Time to report an error: a save in progress has ten seconds to end, and the launcher two to
notice."""


class _Stop:
    """Class of the singleton STOP."""

    def __repr__(self) -> str:
        return "hybridpar.STOP"


STOP = _Stop()
"""Return value of a callback that ends training: all ranks stop at the same step, and save."""


class StopFlag:
    """A program's request to stop its own run, shared with the processes forked from this one."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)

    def set(self) -> None:
        """Request a stop."""
        self._shared[0] = 1

    def clear(self) -> None:
        """Withdraw the request."""
        self._shared[0] = 0

    @property
    def is_set(self) -> bool:
        """Return whether a stop is requested."""
        return self._shared[0] != 0


@dataclass(frozen=True)
class StopReason:
    """The reason why a run stops early. Ranks agree on the largest code.

    Attributes:
        code: 0: none; 1: the program asked; n + 1: a rank received signal n.
    """

    code: int = 0

    @staticmethod
    def of(signal_number: int, *, by_program: bool) -> StopReason:
        """Return one rank's reason. signal_number: 0 if no signal came."""
        return StopReason(signal_number + 1 if signal_number else int(by_program))

    @property
    def signal(self) -> int:
        """Return the number of the signal; 0 for any other reason."""
        return max(self.code - 1, 0)

    @property
    def is_by_program(self) -> bool:
        """Return whether the program asked to stop."""
        return self.code == 1

    def __bool__(self) -> bool:
        return self.code > 0


@dataclass
class StopRequest:
    """The signal that came, by number; 0 if none."""

    number: int = 0


def numbers_of(names: Sequence[str]) -> list[signal.Signals]:
    """Return the signals of train.stop_signals, without a HUP that nohup ignores."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return [
        number
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def end_with(supervisor: int) -> None:
    """Make Linux send SIGTERM to this process when its supervisor, by process id, ends."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGTERM)


def end_at_interrupt() -> None:
    """Let SIGINT end this process like SIGTERM, until `noting_signals`.

    KeyboardInterrupt would leave a rank that connects to others in the middle of C++ code, which
    then aborts or cannot be interrupted.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def signals_as_before() -> Iterator[dict[int, Any]]:
    """Restore the handlers of all signals on exit.

    Yields:
        The handlers by signal; none in other threads than the main one, where Python handles no
        signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield before
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def noting_signals(
    names: Sequence[str], on_first: Callable[[int], None], alone: bool = False
) -> Iterator[StopRequest]:
    """Record the first of these signals and call `on_first` with its number, while entered.

    A signal more than SAME_REQUEST_S after the first ends the process.

    A launcher that sees one rank die ends the others, which may still be reporting whom they waited
    for, or closing a checkpoint. So if an error leaves this block, one signal in the next
    ERROR_TIME_S is ignored; later ones act as before the block.

    Args:
        names: Signal names of train.stop_signals.
        on_first: Called with the number of the first signal.
        alone: Whether this is the job's only rank, so that no launcher signals it after an error.

    Yields:
        The request, whose number is 0 until a signal comes.
    """
    request = StopRequest()
    failed_at = 0.0
    noted_at = 0.0
    before: list[tuple[signal.Signals, Any]] = []

    def restore() -> None:
        for number, handler in before:
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal noted_at
        if failed_at:
            restore()
            if time.monotonic() - failed_at > ERROR_TIME_S:
                os.kill(os.getpid(), number)
        elif not request.number:
            request.number = number
            noted_at = time.monotonic()
            on_first(number)
        elif time.monotonic() - noted_at > SAME_REQUEST_S:
            os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        # Python handles signals only in the main thread
        yield request
        return
    before = [(number, signal.signal(number, handle)) for number in numbers_of(names)]
    try:
        yield request
    except Exception:
        failed_at = 0.0 if alone else time.monotonic()
        raise
    finally:
        if not failed_at or request.number:
            restore()
