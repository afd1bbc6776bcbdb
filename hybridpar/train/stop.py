"""SIGINT (Ctrl-C) and SIGTERM as a wish to stop: the first is noted, a second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopWish:
    """`number` of the signal that came (0: none)."""

    number: int = 0


@contextlib.contextmanager
def noting_signals(on_first: Callable[[int], None]) -> Iterator[StopWish]:
    """While entered, a first signal is noted and `on_first` called with its number; a second ends the process."""
    wish = StopWish()

    def handle(number: int, frame: FrameType | None) -> None:
        if wish.number:
            os._exit(128 + number)
        wish.number = number
        on_first(number)

    if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        yield wish
        return
    before = [(number, signal.signal(number, handle)) for number in SIGNALS]
    try:
        yield wish
    finally:
        for number, handler in before:
            signal.signal(number, handler)
