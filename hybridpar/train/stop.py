"""Signals as a request to stop (train.stop_signals): the first is noted, a later one ends the process at once."""

from __future__ import annotations

import contextlib
import ctypes
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
"""Signals so close are one request: a batch system ends launcher and ranks, and the launcher the ranks again."""
ERROR_TIME_S = 15.0
"""How long it may take to report an error: a save under way has ten seconds to end, and the launcher two to see."""


@dataclass
class StopRequest:
    """The signal that came, by its number (0: none)."""

    number: int = 0


def numbers_of(names: Sequence[str]) -> list[signal.Signals]:
    """The signals of train.stop_signals, without HUP where it is ignored: nohup has started this job to outlive it."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def end_with(supervisor: int) -> None:
    """Has Linux send SIGTERM to this process once the one that has started it is gone, which may have been killed.

    supervisor: the number of that process. Where it is gone already this one ends here.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def noting_signals(names: Sequence[str], on_first: Callable[[int], None],
                   alone: bool = False) -> Iterator[StopRequest]:
    """Notes a first signal of these names and calls `on_first` with its number, while entered.

    A signal that comes more than SAME_REQUEST_S later ends the process. A launcher that has seen one rank die ends the
    others, which are then about to report what they waited for and may be closing a checkpoint. So where an error
    leaves this block, one signal in the next ERROR_TIME_S is ignored; those that follow act as before the block.
    alone: there are no others.
    """
    request, failed_at, noted_at = StopRequest(), 0.0, 0.0
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

    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
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
