"""A recording's use of the looks at its clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridpar.runtime import recording as module
from hybridpar.runtime.recording import Event, HostClock, Recording
from hybridpar.schedules.action import Action, Kind

FORWARD, SEND, REDUCE = (
    Action(Kind.F, 0, 1, 0),
    Action(Kind.SEND_F, 0, 1),
    Action(Kind.REDUCE, 0, 0),
)


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
    assert recording.events() == (
        Event(FORWARD, 0, 6, ((1, 4),), own=2, gap=0),
        Event(SEND, 7, 8, (), own=1, gap=0.5),
    )
    first = recording.events()[0]
    assert (first.ready, first.waited) == (4, 3)


def test_started_work_ends_when_first_seen_ended() -> None:
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


def test_own_time_stands_still_without_a_core_and_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a system counts longer waits than there was time, as a virtual machine may."""
    kept = tmp_path / "schedstat"
    now = 100.0
    kept.write_text(f"5 {7 * 10**9} 1\n")
    monkeypatch.setattr(module, "_SCHEDSTAT", kept)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = HostClock()
    owns = [clock.now()[1]]
    for now, seconds in ((103.0, 9), (104.0, 12), (106.0, 12)):  # noqa: B007  # which the clock reads
        kept.write_text(f"5 {seconds * 10**9} 1\n")
        owns.append(clock.now()[1])
    assert [own - owns[0] for own in owns] == pytest.approx([0, 1, 1, 3])


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the system does not say who waits"
)
def test_a_core_that_another_process_has_is_waited_for() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()  # it runs, on the same core
        clock = HostClock()
        start = now = clock.now()
        while (now[0] - start[0]) - (now[1] - start[1]) < 0.1:
            assert now[0] - start[0] < 60, "it has not waited, though two share a core"
            now = clock.now()
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, cores)


def test_usage_counts_cpu_time_of_the_process() -> None:
    recording = Recording(HostClock())
    stop = time.thread_time() + 0.05
    while time.thread_time() < stop:
        pass
    usage = recording.usage()
    assert usage.process >= 0.05
    assert usage.seconds >= 0.05
    assert 0 <= usage.beside < usage.process
