"""A stand-in for CUDA streams and events, on a modelled clock.

Work on a stream runs as late as it may: when the host or another stream waits for it. So code that
forgets to wait sees memory in the state from before. Each piece of work takes a given time of its
stream; copies take that of a link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor


@dataclass
class Machine:
    """A device, and the link to its host.

    bandwidth: bytes a second of the link. shared: whether both directions share it.
    """

    bandwidth: float
    shared: bool = False
    num_copies: int = 0
    link_free: float = 0.0
    current: threading.local = field(default_factory=threading.local)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.compute = Stream(self)
        """The launch thread's stream."""

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self.current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = before

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
    ) -> None:
        assert non_blocking
        for target, source in zip(targets, sources, strict=True):
            self.current_stream().add(self._copy(target, source))

    def _copy(self, target: Tensor, source: Tensor) -> Callable[[float], float]:
        def run(now: float) -> float:
            self.num_copies += 1
            target.copy_(source)
            start = max(now, self.link_free) if self.shared else now
            self.link_free = start + source.nbytes / self.bandwidth
            return self.link_free

        return run

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what torch.cuda has of this."""
        names = {
            "Stream": lambda device=None: Stream(self),
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "current_stream": self.current_stream,
            "stream": self.stream,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "_foreach_copy_", self.copy)


class Stream:
    def __init__(self, machine: Machine):
        self._machine = machine
        self._work = list[Callable[[float], float]]()
        self._done = 0
        self.now = 0.0

    def add(self, work: Callable[[float], float]) -> int:
        """Queue work that is told when it starts and returns when it ends; returns its place."""
        with self._machine.lock:
            self._work.append(work)
            return len(self._work)

    def compute(self, seconds: float, call: Callable[[], object] = lambda: None) -> None:
        """Queue a kernel that takes so long."""

        def run(now: float) -> float:
            call()
            return now + seconds

        self.add(run)

    def run(self, place: int) -> None:
        """Do the work up to a place."""
        with self._machine.lock:
            while self._done < place:
                work = self._work[self._done]
                self._done += 1
                self.now = work(self.now)

    def wait_event(self, event: Event) -> None:
        self.add(event.reached)

    def synchronize(self) -> None:
        self.run(len(self._work))


class Event:
    def __init__(self, machine: Machine, timed: bool):
        self._machine = machine
        self._timed = timed
        self._place = 0
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._machine.current_stream()
        self._place = self._stream.add(self._pass)

    def _pass(self, now: float) -> float:
        self._at = now
        return now

    def reached(self, now: float) -> float:
        """Return when a stream that waits for it at `now` goes on."""
        self._stream.run(self._place)
        assert self._at is not None
        return max(now, self._at)

    def elapsed_time(self, end: Event) -> float:
        assert self._timed, "CUDA refuses events without timing"
        assert end._timed, "CUDA refuses events without timing"
        assert self._at is not None, "CUDA refuses events that are not reached"
        assert end._at is not None, "CUDA refuses events that are not reached"
        return 1e3 * (end._at - self._at)
