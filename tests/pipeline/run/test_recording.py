"""What a recording makes of the looks at its clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hybridpar.pipeline.plan.action import Action, Kind
from hybridpar.pipeline.run.recording import Event, HostClock, Recording

FORWARD, SEND, REDUCE = Action(Kind.F, 0, 1, 0), Action(Kind.SEND_F, 0, 1), Action(Kind.REDUCE, 0, 0)


class Script:
    """A clock that says what it is told to: seconds on the wall, and own."""

    def __init__(self, *stamps: tuple[float, float]):
        self._stamps: Iterator[tuple[float, float]] = iter(stamps)

    def now(self) -> tuple[float, float]:
        return next(self._stamps)

    def read(self, stamp: tuple[float, float]) -> tuple[float, float]:
        return stamp


def test_own_time_leaves_out_waits_and_what_came_before_is_a_gap() -> None:
    recording = Recording(Script((0, 0), (1, 1), (4, 3.5), (6, 4.5), (7, 5), (8, 6)))
    recording.begin()
    recording.wait(lambda: None)  # from 1 to 4
    recording.end(FORWARD)  # 2 more on the wall, 1 of its own
    recording.begin()  # 1 after, half of it without a core
    recording.end(SEND)
    assert recording.events() == (Event(FORWARD, 0, 6, ((1, 4),), own=2, gap=0), Event(SEND, 7, 8, (), own=1, gap=0.5))
    first = recording.events()[0]
    assert (first.ready, first.waited) == (4, 3)


def test_what_an_action_starts_is_over_when_it_is_first_seen_to_be() -> None:
    done: list[bool] = []
    recording = Recording(Script(*((t, t) for t in range(10))))
    recording.begin()
    recording.watch(REDUCE, lambda: bool(done))
    recording.end(REDUCE)  # at 1
    recording.begin()
    recording.end(FORWARD)  # 2 to 3
    recording.begin()  # at 4
    recording.wait(lambda: done.append(True))  # 5 to 6
    recording.end(SEND)
    assert [e.over for e in recording.events()] == [6, None, None]


def test_a_wait_in_an_action_under_way_when_recording_begins_is_not_recorded() -> None:
    recording = Recording(Script(*((t, t) for t in range(10))))
    recording.wait(lambda: None)
    recording.begin()
    recording.end(FORWARD)
    assert [e.waits for e in recording.events()] == [()]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a core")
def test_own_time_stands_still_while_another_process_has_the_core() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()  # it runs, on the same core
        clock = HostClock()
        start, cpu = clock.read(clock.now()), time.thread_time()
        while time.perf_counter() < start[0] + 0.3:
            pass
        end, cpu = clock.read(clock.now()), time.thread_time() - cpu
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, cores)
    assert end[1] - start[1] == pytest.approx(cpu, rel=0.1)
    assert cpu < 0.9 * (end[0] - start[0])


def test_usage_counts_cpu_time_of_the_process() -> None:
    recording = Recording(HostClock())
    stop = time.process_time() + 0.05
    while time.process_time() < stop:
        pass
    usage = recording.usage()
    assert usage.process >= 0.05
    assert usage.seconds >= 0.05
    assert 0 <= usage.beside < usage.process
