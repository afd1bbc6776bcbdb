"""Signals as a wish to stop (train.stop_signals): the first is noted, a later one ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

SAME_WISH_S = 1.0
"""A batch system ends the launcher and the ranks, and the launcher the ranks again: signals so close are one wish."""
LAST_WORDS_S = 15.0
"""How long an error may take to be said: a save under way has ten seconds to end, and the launcher two to see."""


@dataclass
class StopWish:
    """`number` of the signal that came (0: none)."""

    number: int = 0


def numbers_of(names: Sequence[str]) -> list[signal.Signals]:
    """The signals of train.stop_signals, without HUP where it is ignored: nohup has started this job to outlive it."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return [number for number in numbers
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def noting_signals(names: Sequence[str], on_first: Callable[[int], None]) -> Iterator[StopWish]:
    """While entered, a first signal of these names is noted and `on_first` called with its number; one that comes more
    than SAME_WISH_S later ends the process.

    A launcher that has seen one rank die ends the others, which are then about to say what they waited for and may be
    closing a checkpoint. So where an error leaves this block, one signal in the next LAST_WORDS_S is let pass; whatever
    comes later, or after it, acts as before.
    """
    wish, failed_at, noted_at = StopWish(), 0.0, 0.0
    before: list[tuple[signal.Signals, Any]] = []

    def restore() -> None:
        for number, handler in before:
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal noted_at
        if failed_at:
            restore()
            if time.monotonic() - failed_at > LAST_WORDS_S:
                os.kill(os.getpid(), number)
        elif not wish.number:
            wish.number, noted_at = number, time.monotonic()
            on_first(number)
        elif time.monotonic() - noted_at > SAME_WISH_S:
            os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        yield wish
        return
    before = [(number, signal.signal(number, handle)) for number in numbers_of(names)]
    try:
        yield wish
    except Exception:
        failed_at = time.monotonic()
        raise
    finally:
        if not failed_at or wish.number:
            restore()
