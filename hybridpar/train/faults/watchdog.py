"""The watchdog of a rank: a small process that ends a rank which cannot end itself.

    launcher gone   the rank was told by SIGTERM (stop.end_with) and saves; it is ended if it makes
                    no progress for faults.timeout_s, or still runs after ORPHAN_S
    rank hangs      under torchrun, which sees only processes that end: ended after the limit of
                    its phase, as by `train --ranks N`, so that torchrun restarts all ranks

It is a process rather than a thread, because a rank that is stopped (SIGSTOP), or whose main thread
holds Python's lock in a C function, runs no other thread. It imports no torch, sleeps until the
launcher ends (under torchrun it looks once a second), and ends with the rank. It needs Linux, whose
process descriptors never refer to another process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

import hybridpar
from hybridpar.flight import FAILED, NO_FLIGHT, Flight, Observer, Record, hang_text
from hybridpar.train.reporting import console
from hybridpar.train.stop import end_with

if TYPE_CHECKING:
    from hybridpar.config import Launch

ORPHAN_S = 300.0
"""Time that a rank has to finish and save after its launcher is gone; the same as after Ctrl-C."""
STILL_S = 60.0
"""Time that such a rank may make no progress, until its configuration sets faults.timeout_s."""
START_S = 600.0
"""Time that a rank has to start, until its configuration sets faults.start_timeout_s."""
_LOOK_EVERY_S = 1.0
_ASLEEP_S = 5.0
"""Pause between two looks after which the machine was probably asleep, or the watchdog stopped
together with the rank."""
_SAY_S = 1.0
SAVING = "saving"
"""Name of a rank's thread that writes checkpoints."""

_flight = NO_FLIGHT
_pid = 0
"""Process that the watchdog and the record belong to: a fork has neither."""
_watchdog: Popen[bytes] | None = None


def record_name(rank: int, thread: str = "") -> str:
    """Return the name of the flight record of a rank, or of one of its threads."""
    return f"rank_{rank:05d}.{thread}" if thread else f"rank_{rank:05d}"


def begin(launch: Launch, limit_s: float = START_S) -> Flight:
    """Start this process's watchdog once, and return its flight record.

    The record is in memory until it moves to a file. A process that neither our launcher nor
    torchrun has started gets a record without memory, and no watchdog.

    Args:
        limit_s: Time without progress until the process records another phase; 0: no limit.
    """
    global _flight, _pid
    if not launch.elastic:
        return Flight()
    if _pid == os.getpid():
        return _flight
    launcher = launch.supervisor or os.getppid()
    end_with(launcher)
    everyone = list(range(launch.world_size))
    who = {
        "rank": launch.rank,
        "pid": os.getpid(),
        "axes": {"world": everyone},
        "timeout_s": STILL_S,
    }
    _flight = Flight.in_memory(record_name(launch.rank), who)
    _pid = os.getpid()
    _flight.phase("importing", limit_s)
    try:
        _start(launcher, launch.rank, ends_hangs=not launch.supervisor)
    except OSError as error:
        console.say(
            f"rank {launch.rank} runs without its watchdog ({error.strerror}): it may outlive its "
            "launcher if it hangs"
        )
    return _flight


def current() -> Flight:
    """Return the flight record that `begin` created in this process, or one that ignores calls."""
    return _flight if _pid == os.getpid() else NO_FLIGHT


def is_stopped(pid: int) -> bool:
    """Return whether Linux reports a process as stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _start(launcher: int, rank: int, *, ends_hangs: bool) -> None:
    """Start the watchdog process. Raises: OSError."""
    global _watchdog
    if not hasattr(os, "pidfd_open"):
        return
    pid = os.getpid()
    held = [os.pidfd_open(pid)]
    try:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(launcher))
        # if the launcher has ended, its number may belong to another process by now
        lives = len(held) == 2 and os.getppid() == launcher
        numbers = [pid, rank, held[0], held[1] if lives else -1]
        root = str(Path(hybridpar.__file__).parents[1])
        program = (
            f"import sys; sys.path.insert(0, {root!r})\n"
            f"from {__name__} import watch; watch(*{numbers}, ends_hangs={ends_hangs})"
        )
        # in its own session, so that no signal to the rank's group reaches it
        _watchdog = Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=DEVNULL,
            stdout=DEVNULL,
            pass_fds=held,
            start_new_session=True,
        )
    finally:
        for descriptor in held:
            os.close(descriptor)


def watch(pid: int, rank: int, process: int, launcher: int, *, ends_hangs: bool) -> None:
    """Watch a process until it has ended: the main function of a watchdog.

    Args:
        process: Its descriptor (pidfd).
        launcher: Descriptor of its launcher; -1 if the launcher is gone.
    """
    _ignore_signals()
    watched = _Watched(pid, rank)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    orphaned_at = 0.0
    if launcher >= 0:
        poll.register(launcher, select.POLLIN)
    else:
        orphaned_at = time.monotonic()
    while True:
        looks = ends_hangs or orphaned_at > 0
        events = [
            descriptor for descriptor, _ in poll.poll(1000 * _LOOK_EVERY_S if looks else None)
        ]
        if process in events:
            return
        if launcher in events:
            poll.unregister(launcher)
            orphaned_at = time.monotonic()
            watched.restart()
        if looks:
            text = watched.orphan(orphaned_at) if orphaned_at else watched.hang()
            if text:
                watched.note(text)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                _say(f"hybridpar: {text}\n")
                return


class _Watched:
    """The watched process: its records, and the reasons to end it."""

    def __init__(self, pid: int, rank: int):
        self._pid = pid
        self._rank = rank
        self._main = Observer(pid, record_name(rank))
        self._saving = Observer(pid, record_name(rank, SAVING))
        self._looked = time.monotonic()

    def restart(self) -> None:
        """Restart the clock of all records."""
        self._main.restart()
        self._saving.restart()

    def hang(self) -> str:
        """Return why the process must be ended because it hangs; empty if it need not.

        A rank that waits for others does not hang, unless it is stopped.
        """
        (record, idle_s), (saving, saving_idle_s) = self._look()
        stopped = is_stopped(self._pid)
        for one, still_s in ((record, idle_s), (saving, saving_idle_s)):
            if one is None or (one.waits and not stopped):
                continue
            limit_s = one.limit_s or (START_S if stopped and one is record else 0.0)
            if limit_s and still_s > limit_s:
                text = hang_text(self._name(record), still_s, one.doing(), stopped=stopped)
                return f"{text}; ended, for the launcher to start again"
        return ""

    def orphan(self, since: float) -> str:
        """Return why to end the process, whose launcher ended at `since`; empty: it has time."""
        (record, idle_s), (saving, saving_idle_s) = self._look()
        who = self._name(record)
        now = time.monotonic()
        doing = record.doing() if record is not None else ""
        if now - since > ORPHAN_S:
            return (
                f"{who} was still there {now - since:.0f} s after its launcher had ended{doing}; "
                "ended"
            )
        limit_s = record.who.get("timeout_s", STILL_S) if record is not None else STILL_S
        stopped = is_stopped(self._pid)
        saves = saving is not None and saving.limit_s > 0 and not stopped
        still_s = min(idle_s, saving_idle_s)
        if still_s > limit_s and not saves:
            text = hang_text(who, still_s, doing, stopped=stopped)
            return f"{text}; ended, as its launcher has ended"
        return ""

    def note(self, text: str) -> None:
        """Record the reason in the flight record."""
        self._main.write_end(FAILED, text)

    def _look(self) -> tuple[tuple[Record | None, float], tuple[Record | None, float]]:
        now = time.monotonic()
        if now - self._looked > _ASLEEP_S:
            self.restart()
        self._looked = now
        return self._main.look(), self._saving.look()

    def _name(self, record: Record | None) -> str:
        plain = f"rank {self._rank}"
        return plain if record is None else str(record.who.get("name", plain))


def _ignore_signals() -> None:
    """Ignore signals, which are for the rank, and leave a folder that may be unmounted."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    os.chdir("/")


def _say(text: str) -> None:
    """Write to stderr, unless nobody reads it."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(event & select.POLLOUT for _, event in poll.poll(1000 * _SAY_S)):
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
