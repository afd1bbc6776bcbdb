"""Record what a rank does and when, action by action: in wall-clock time, and in the rank's own
time.

    wall    |--------- F7 --------|   B3 waits    |------ B3 ------|
    own     |-- F7 --|- no core --|               |----- B3 -------|

A rank's own time stops while it is ready but other work has its core. So it shows what an action
costs, even if ranks share cores.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch

from hybridpar.schedules.action import Action

_SCHEDSTAT = "/proc/thread-self/schedstat"
_STAT = "/proc/stat"


@dataclass(frozen=True, slots=True)
class Event:
    """One executed action. Units: seconds.

    Attributes:
        action: The action.
        start: When it started.
        end: When it ended.
        waits: Intervals in which it waited for other ranks or for state.
        own: The rank's own time in it, without waits.
        gap: The rank's own time since the end of the previous action.
        over: When the work that it had started was first seen to be complete; None: never seen.
        for_state: The first wait was for the rank's state to move.
    """

    action: Action
    start: float
    end: float
    waits: tuple[tuple[float, float], ...] = ()
    own: float = 0.0
    gap: float = 0.0
    over: float | None = None
    for_state: bool = False

    @property
    def ready(self) -> float:
        """Time at which the last wait ended."""
        return self.waits[-1][1] if self.waits else self.start

    @property
    def waited(self) -> float:
        """Seconds of waiting."""
        return sum(until - since for since, until in self.waits)

    @property
    def waited_for_state(self) -> float:
        """Seconds of waiting for the rank's state to move."""
        return self.waits[0][1] - self.waits[0][0] if self.for_state else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds during a recording.

    Attributes:
        seconds: Duration of the recording.
        process: CPU seconds of this process.
        beside: CPU seconds of its threads other than the recording one.
        machine: CPU seconds of all processes of the machine; 0 if unknown.
    """

    seconds: float = 0.0
    process: float = 0.0
    beside: float = 0.0
    machine: float = 0.0


class Clock(Protocol):
    """A clock. `read` converts a result of `now`, then or later, to wall-clock seconds and seconds
    of own time.
    """

    def now(self) -> Any: ...
    def read(self, stamp: Any) -> tuple[float, float]: ...


class HostClock:
    """The clock of the thread that creates it. Each reading takes 3 us.

    Linux reports how long a thread has waited for a core. On other systems own time is the thread's
    CPU time, so every wait looks like a wait for a core. Own time never decreases, although a
    virtual machine may report a longer wait than time has passed.
    """

    def __init__(self) -> None:
        self._last = self._own = 0.0
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            file = io.FileIO(_SCHEDSTAT)
            self._file = file if len(os.pread(file.fileno(), 96, 0).split()) == 3 else None

    def now(self) -> tuple[float, float]:
        if self._file is None:
            return time.perf_counter(), time.thread_time()
        while True:  # until nothing took the core between the readings
            before = self._kept_waiting()
            seconds = time.perf_counter()
            kept = self._kept_waiting()
            if kept == before:
                own = seconds - 1e-9 * int(kept)
                self._own += max(0.0, own - self._last)
                self._last = own
                return seconds, self._own

    def _kept_waiting(self) -> bytes:
        """Return the nanoseconds that the thread has waited for a core, as digits."""
        assert self._file is not None
        return os.pread(self._file.fileno(), 96, 0).split()[1]

    def read(self, stamp: tuple[float, float]) -> tuple[float, float]:
        return stamp


class DeviceClock:
    """The clock of the current CUDA stream: it tells when the stream reached the point of the
    reading.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._first = self.now()
        torch.cuda.synchronize()
        self._seconds = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, stamp: torch.cuda.Event) -> tuple[float, float]:
        stamp.synchronize()
        seconds = self._seconds + 1e-3 * self._first.elapsed_time(stamp)
        return seconds, seconds


def make_clock(device: torch.device) -> Clock:
    """Create the clock for work on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class Recording:
    """Records the actions of one executor."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._actions: list[tuple[Action, Any, Any, list[tuple[Any, Any]], bool]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._for_state = False
        self._start: Any = None  # of the action that began last
        self._watched: list[tuple[Action, Callable[[], bool]]] = []
        self._over: dict[Action, Any] = {}
        self._begun = _usage()

    def begin(self) -> None:
        """Note that an action starts."""
        self._waits = []
        self._for_state = False
        self._start = self._clock.now()
        self._look(self._start)

    def watch(self, action: Action, is_done: Callable[[], bool]) -> None:
        """Note when the work that `action` has started is complete. Checked between actions and at
        the end of waits.
        """
        self._watched.append((action, is_done))

    def wait_for_state(self, wait: Callable[[], None]) -> None:
        """Call `wait`, the first wait of an action, which waits for the rank's state to move."""
        self._for_state = True
        self.wait(wait)

    def wait(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which waits for other ranks or for state."""
        since = self._clock.now()
        wait()
        until = self._clock.now()
        self._waits.append((since, until))
        self._look(until)

    def end(self, action: Action) -> None:
        """Note that the action that started last ends."""
        self._actions.append((action, self._start, self._clock.now(), self._waits, self._for_state))

    def _look(self, now: Any) -> None:
        if self._watched:
            self._over |= {action: now for action, is_done in self._watched if is_done()}
            self._watched = [one for one in self._watched if one[0] not in self._over]

    def usage(self) -> Usage:
        """Return the CPU time since the recording was created."""
        return Usage(
            *(
                max(0.0, now - then)
                for now, then in zip(astuple(_usage()), astuple(self._begun), strict=True)
            )
        )

    def events(self) -> tuple[Event, ...]:
        """Return all recorded actions, in order."""
        read = self._clock.read
        made = []
        before = None
        for action, first, last, stamps, for_state in self._actions:
            (start, own_start), (end, own_end) = read(first), read(last)
            waits = [(read(since), read(until)) for since, until in stamps]
            own = own_end - own_start - sum(until[1] - since[1] for since, until in waits)
            made.append(
                Event(
                    action,
                    start,
                    end,
                    tuple((since[0], until[0]) for since, until in waits),
                    own,
                    0.0 if before is None else own_start - before,
                    read(self._over[action])[0] if action in self._over else None,
                    for_state,
                )
            )
            before = own_end
        return tuple(made)


def _usage() -> Usage:
    """Return the CPU time used so far."""
    thread = time.thread_time()
    process = time.process_time()
    machine = 0.0
    with contextlib.suppress(OSError, ValueError), open(_STAT) as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
        machine = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    # With torch's own threads, which share the work of actions, their CPU time belongs to the
    # actions.
    return Usage(
        time.perf_counter(),
        process,
        process - thread if torch.get_num_threads() == 1 else 0.0,
        machine,
    )
