"""Requests to stop: by a signal (train.stop_signals), or by the program that trains.

The first signal is noted, a later one ends the process at once.
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
"""Signals so close are one request: a batch system ends launcher and ranks, and the launcher the
ranks again."""
ERROR_TIME_S = 15.0
"""How long it may take to report an error: a save under way has ten seconds to end, and the
launcher two to see."""


class _Stop:
    """The only object of its kind."""

    def __repr__(self) -> str:
        return "hybridpar.STOP"


STOP = _Stop()
"""What a callback returns to end training: all ranks stop at the same step, and save."""


class StopFlag:
    """Whether a program has asked its own run to stop. Processes that are forked from this one
    share it."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)

    def set(self) -> None:
        """Ask for a stop."""
        self._shared[0] = 1

    def clear(self) -> None:
        """Forget a request."""
        self._shared[0] = 0

    @property
    def is_set(self) -> bool:
        return self._shared[0] != 0


@dataclass(frozen=True)
class StopReason:
    """The reason for which a run stops early, as ranks agree on it: the largest code counts.

    code: 0: none; 1: the program has asked for it; n + 1: signal n has come to a rank.
    """

    code: int = 0

    @staticmethod
    def of(signal_number: int, *, by_program: bool) -> StopReason:
        """The reason that one rank has. signal_number: 0 if no signal has come."""
        return StopReason(signal_number + 1 if signal_number else int(by_program))

    @property
    def signal(self) -> int:
        """The number of the signal; 0 for another reason."""
        return max(self.code - 1, 0)

    @property
    def is_by_program(self) -> bool:
        return self.code == 1

    def __bool__(self) -> bool:
        return self.code > 0


@dataclass
class StopRequest:
    """The signal that came, by its number (0: none)."""

    number: int = 0


def numbers_of(names: Sequence[str]) -> list[signal.Signals]:
    """The signals of train.stop_signals, without HUP where it is ignored: nohup has started this
    job to outlive it."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return [
        number
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def end_with(supervisor: int) -> None:
    """Has Linux send SIGTERM to this process once the one that has started it is gone, which may
    have been killed.

    supervisor: the number of that process. Where it is gone already this one ends here.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGTERM)


def end_at_interrupt() -> None:
    """Has SIGINT end this process like SIGTERM, until `noting_signals`.

    Python's KeyboardInterrupt would leave a rank that connects to others in the middle of C++ code,
    which then aborts or cannot be interrupted.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def noting_signals(
    names: Sequence[str], on_first: Callable[[int], None], alone: bool = False
) -> Iterator[StopRequest]:
    """Notes a first signal of these names and calls `on_first` with its number, while entered.

    A signal that comes more than SAME_REQUEST_S later ends the process. A launcher that has seen
    one rank die ends the others, which are then about to report what they waited for and may be
    closing a checkpoint. So where an error leaves this block, one signal in the next ERROR_TIME_S
    is ignored; those that follow act as before the block. alone: there are no others.
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
            request.number, noted_at = number, time.monotonic()
            on_first(number)
        elif time.monotonic() - noted_at > SAME_REQUEST_S:
            os._exit(128 + number)

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python handles signals nowhere else
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
