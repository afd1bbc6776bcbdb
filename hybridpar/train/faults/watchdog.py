"""The watchdog of a rank: a small process beside it that ends it where it cannot end itself.

    launcher gone   the rank has been told by SIGTERM (stop.end_with) and saves; one that stands
                    still for faults.timeout_s, or is there after ORPHAN_S, is ended
    rank hangs      under torchrun, which sees only processes that end: after the limit of its
                    phase, as `train --ranks N` would say, so that torchrun starts all again

It is a process and no thread, because a rank that is stopped (SIGSTOP), or whose main thread keeps
Python's lock in a C function, runs no other thread. It imports no torch, sleeps until the launcher
ends (under torchrun it looks once a second), and ends with the rank. It needs Linux, whose
descriptors of processes never lead to another process.
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
from hybridpar.train.stop import end_with

if TYPE_CHECKING:
    from hybridpar.config import Launch

ORPHAN_S = 300.0
"""How long a rank whose launcher is gone may take to finish and save; as long as after Ctrl-C."""
STILL_S = 60.0
"""How long such a rank may stand still before its configuration, which has faults.timeout_s, is
read."""
START_S = 600.0
"""How long a rank may take to start before its configuration, which has faults.start_timeout_s, is
read."""
_LOOK_EVERY_S = 1.0
_ASLEEP_S = 5.0
"""After so long a pause between two looks the machine was asleep, or the watchdog stopped together
with the rank."""
_SAY_S = 1.0
SAVING = "saving"
"""Name of the thread of a rank that writes checkpoints."""

_flight = NO_FLIGHT
_pid = 0
"""The process that the watchdog and the record belong to, as a fork has neither."""
_watchdog: Popen[bytes] | None = None


def record_name(rank: int, thread: str = "") -> str:
    """Name of the flight record of a rank, or of a thread of it."""
    return f"rank_{rank:05d}.{thread}" if thread else f"rank_{rank:05d}"


def begin(launch: Launch, limit_s: float = START_S) -> Flight:
    """Starts the watchdog of this process, once; returns its flight record, which is in memory
    until it has a file.

    A process that no launcher of ours and no torchrun has started gets neither.
    limit_s: how long the process may stand still until it notes another phase; 0: without a limit.
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
        print(
            f"hybridpar: rank {launch.rank} runs without its watchdog ({error.strerror}): it may "
            "outlive its "
            "launcher if it hangs",
            file=sys.stderr,
            flush=True,
        )
    return _flight


def current() -> Flight:
    """The flight record that `begin` has made in this process; one that notes nothing where there
    is none."""
    return _flight if _pid == os.getpid() else NO_FLIGHT


def is_stopped(pid: int) -> bool:
    """Whether Linux says that a process is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _start(launcher: int, rank: int, *, ends_hangs: bool) -> None:
    """Raises: OSError."""
    global _watchdog
    if not hasattr(os, "pidfd_open"):
        return
    pid = os.getpid()
    held = [os.pidfd_open(pid)]
    try:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(launcher))
        lives = (
            len(held) == 2 and os.getppid() == launcher
        )  # else the number may be another process's by now
        numbers = [pid, rank, held[0], held[1] if lives else -1]
        root = str(Path(hybridpar.__file__).parents[1])
        program = (
            f"import sys; sys.path.insert(0, {root!r}); from hybridpar.train.faults.watchdog "
            "import "
            "watch; "
            f"watch(*{numbers}, ends_hangs={ends_hangs})"
        )
        # in a session of its own, so that no signal to the rank's group reaches it
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
    """Watches a process until it has ended; the whole life of a watchdog.

    process, launcher: descriptors (pidfd) of the process and of the one that has started it; -1:
    that one is gone. ends_hangs: whether to end the process if it hangs.
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
    """The process that is watched: its records, and whether there is a reason to end it."""

    def __init__(self, pid: int, rank: int):
        self._pid = pid
        self._rank = rank
        self._main = Observer(pid, record_name(rank))
        self._saving = Observer(pid, record_name(rank, SAVING))
        self._looked = time.monotonic()

    def restart(self) -> None:
        """Counts all time from now on."""
        self._main.restart()
        self._saving.restart()

    def hang(self) -> str:
        """The reason to end the process because it hangs, in words; empty: there is none.

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
        """The reason to end the process whose launcher has ended then; empty: it may still take
        some time."""
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
            return (
                f"{hang_text(who, still_s, doing, stopped=stopped)}; ended, as its launcher has "
                "ended"
            )
        return ""

    def note(self, text: str) -> None:
        """Leaves the reason in the record."""
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
    """Ignores signals, which are meant for the rank, and leaves its working folder, which may be of
    a mounted disk."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    os.chdir("/")


def _say(text: str) -> None:
    """Writes to stderr, unless nobody reads it there."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(event & select.POLLOUT for _, event in poll.poll(1000 * _SAY_S)):
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
