"""Flight recorder of a rank: its current action, in a small file that survives the process.

    0    number of notes; time of the last (seconds since 1970)       one struct each, so that a note is one call:
    16   phase; its limit in seconds, 0 for none                      0.5 us for an action, 0.7 us for a wait
    88   action: kind, stage, micro-batch, version
    120  wait: operation, axis, peer
    168  error with which the rank has ended
    680  bytes sent to other hosts, and received from them
    696  JSON: identity of the rank

The file is mapped into memory: a note survives kill -9, and can be read while a rank hangs. It does
not survive a crash of the machine: nothing is synced.

Before a rank may write into the run folder, and if the disk is full, its record is in anonymous
memory (memfd) with the same content. Linux lists this memory, and a file that has been removed,
under /proc/PID/fd, where an `Observer` finds it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridpar.reading import parse_json, read_limited

_HEAD, _PHASE, _ACTION, _WAIT, _ERROR, _TRAFFIC = (
    struct.Struct(f"<{form}") for form in ("Qd", "64sd", "8sqqq", "24s16sq", "512s", "QQ")
)
_PHASE_AT = 16
_ACTION_AT = 88
_WAIT_AT = 120
_ERROR_AT = 168
_TRAFFIC_AT = 680
_WHO_AT = 696
_LIMIT = struct.Struct("<d")
_NO_WAIT, _NO_ACTION = _WAIT.pack(b"", b"", -1), _ACTION.pack(b"", -1, -1, -1)
_MAX_BYTES = 1 << 20
NOBODY = -1
"""Peer of a wait for all ranks of the axis."""
FAILED = "failed"
LOST = "lost contact"
REFUSED = "refused"
"""Phases of a rank that ends: by an error; because another rank has left it; because it cannot run
the configuration, or was asked to stop."""
STARTING = ("importing", "starting", "opening the run", "connecting", "setting up", "loading")
"""Phases in which a rank of a job has not begun to train."""
EVALUATING = "evaluating"
"""The phase whose actions belong to no step."""
RENDEZVOUS = "rendezvous"
"""The operation of a wait for other ranks in the launcher's store, before there is a process group
or without one."""
_MOVED = "moved"
"""The phase of a record that its rank has left for another one."""
HAS_MEMORY = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
"""Whether a rank can have a record in memory that others find, before it may write into the run
folder."""
_SEARCH_EVERY_S = 0.5
"""Seconds between searches for a record that does not exist yet; reading what a process has open
takes milliseconds."""
_MEMFD = "memfd:"
_REMOVED = " (deleted)"
"""Texts that Linux puts before the name of anonymous memory, and after the name of a removed file."""


class Flight:
    """Notes what this rank does. Without a file it notes nothing."""

    def __init__(self, path: Path | None = None, who: Mapping[str, Any] | None = None):
        """Open a file. who: plain values about this rank, `Record.who`."""
        self._map: mmap.mmap | None = None
        self._count = 0
        if path is not None:
            self.move(path, who)

    @staticmethod
    def in_memory(name: str, who: Mapping[str, Any] | None = None) -> Flight:
        """Create a recorder without a file; it notes nothing if the system has no such memory.

        name: the name that a file of this rank or thread would have.
        """
        flight = Flight()
        flight.move_to_memory(name, who)
        return flight

    def move(self, path: Path, who: Mapping[str, Any] | None = None) -> None:
        """Continue in a new file, which replaces an older one.

        Raises:
            OSError: The file cannot be written; the record stays in its old place.
        """
        path.unlink(missing_ok=True)  # also removes a link, which might lead anywhere
        with path.open("x+b") as file:
            self._begin(file.fileno(), who)

    def move_to_memory(self, name: str, who: Mapping[str, Any] | None = None) -> None:
        """Continue in memory that has no file, if the system has such memory."""
        if not HAS_MEMORY:
            return
        try:
            descriptor = os.memfd_create(name)
        except OSError:  # not permitted, or too many files are open
            return
        try:
            self._begin(descriptor, who)
        finally:
            os.close(descriptor)  # the mapping has its own

    def _begin(self, descriptor: int, who: Mapping[str, Any] | None) -> None:
        """Write an empty record into an open file, and continue there."""
        text = json.dumps(dict(who or {})).encode()
        data = bytes(_WHO_AT) + text
        while data:
            data = data[os.write(descriptor, data) :]
        before = self._map
        self._map = mmap.mmap(descriptor, 0)
        self.phase("starting")
        if before is not None:  # last, so that an observer always finds one of the two
            _PHASE.pack_into(before, _PHASE_AT, _MOVED.encode(), 0.0)
            before.close()

    def leave(self) -> None:
        """Note that this process has stopped writing this record, so that an observer looks for
        another one.
        """
        if self._map is not None:
            _PHASE.pack_into(self._map, _PHASE_AT, _MOVED.encode(), 0.0)

    def phase(self, name: str, limit_s: float = 0.0) -> None:
        """Note that a part of the run begins. No progress in it for longer than the limit (0: none)
        is a fault.
        """
        if self._map is not None:
            self.tick()  # first, so that no time before it counts against the new limit
            _PHASE.pack_into(self._map, _PHASE_AT, name.encode(), limit_s)
            self._map[_ACTION_AT : _ACTION_AT + len(_NO_ACTION)] = _NO_ACTION
            self.go_on()

    def limit(self, limit_s: float) -> None:
        """Change the limit of the phase from now on."""
        if self._map is not None:
            self.tick()
            _LIMIT.pack_into(self._map, _ACTION_AT - _LIMIT.size, limit_s)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Lift the limit of the phase while in this context, in which a function of the user
        runs.
        """
        if self._map is None:
            yield
            return
        (limit_s,) = _LIMIT.unpack_from(self._map, _ACTION_AT - _LIMIT.size)
        self.limit(0.0)
        try:
            yield
        finally:
            self.limit(limit_s)

    def end(self, phase: str, error: str) -> None:
        """Note that this rank ends by an error (FAILED, LOST, REFUSED); keep its action and
        wait.
        """
        if self._map is not None:
            _PHASE.pack_into(self._map, _PHASE_AT, phase.encode(), 0.0)
            _ERROR.pack_into(self._map, _ERROR_AT, error.encode()[: _ERROR.size])
            self.tick()

    def action(self, kind: str, stage: int, microbatch: int, version: int) -> None:
        """Note that an action of the plan begins."""
        if self._map is not None:
            _ACTION.pack_into(self._map, _ACTION_AT, kind.encode(), stage, microbatch, version)
            self.tick()

    def wait(self, operation: str, axis: str, peer: int = NOBODY) -> None:
        """Note that this rank begins to wait, for one other (its global rank) or for all of an
        axis.
        """
        if self._map is not None:
            _WAIT.pack_into(self._map, _WAIT_AT, operation.encode(), axis.encode(), peer)
            self.tick()

    def go_on(self) -> None:
        """Note that the wait has ended."""
        if self._map is not None:
            self._map[_WAIT_AT : _WAIT_AT + len(_NO_WAIT)] = _NO_WAIT
            self.tick()

    def traffic(self, sent: int, received: int) -> None:
        """Note the bytes sent to and received from other hosts so far. This does not count as
        progress.
        """
        if self._map is not None:
            _TRAFFIC.pack_into(self._map, _TRAFFIC_AT, sent, received)

    def tick(self) -> None:
        """Count progress in the current action."""
        if self._map is not None:
            self._count += 1
            _HEAD.pack_into(self._map, 0, self._count, time.time())

    def read(self) -> Record | None:
        """Return the current record; None without a file."""
        return None if self._map is None else _parse(bytes(self._map))


NO_FLIGHT = Flight()
"""A recorder that notes nothing, so it can be shared."""


class Waiting:
    """Notes a wait: `with Waiting(flight, "all_reduce", "dp"): ...`. If the body fails, the note
    stays.
    """

    __slots__ = ("_flight", "_what")

    def __init__(self, flight: Flight, operation: str, axis: str, peer: int = NOBODY):
        self._flight = flight
        self._what = (operation, axis, peer)

    def __enter__(self) -> None:
        self._flight.wait(*self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flight.go_on()


@dataclass(frozen=True)
class Record:
    """The content of a recorder. `kind` is empty without an action, `operation` without a wait.

    Attributes:
        count: Changes with every note.
        peer: A global rank.
        sent: Bytes sent to other hosts.
        received: Bytes received from other hosts.
        who: Rank, stage (of the grid), the stages that the rank holds, its place by axis, pid,
            num_microbatches, and `axes`, the global ranks by axis; whatever was known when the
            recorder was opened.
    """

    count: int
    time: float
    phase: str
    limit_s: float
    kind: str = ""
    stage: int = -1
    microbatch: int = -1
    version: int = -1
    operation: str = ""
    axis: str = ""
    peer: int = NOBODY
    error: str = ""
    sent: int = 0
    received: int = 0
    who: Mapping[str, Any] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return bool(self.operation)

    @property
    def step(self) -> int:
        """The step (from 1) that its action belongs to; 0 if it belongs to none."""
        if not self.kind or self.kind in ("FETCH", "RELEASE", "DROP"):
            return 0
        if self.kind in ("REDUCE", "NORM", "UPDATE"):
            return 1 + self.microbatch
        return 1 + self.microbatch // self.who.get("num_microbatches", 1)

    @property
    def action(self) -> str:
        """The action in the notation of a plan: 'F12@1v3'."""
        return f"{self.kind}{self.microbatch}@{self.stage}" + (
            f"v{self.version}" if self.kind in ("F", "B") else ""
        )

    @property
    def peers(self) -> Sequence[int]:
        """Global ranks that this rank waits for."""
        if not self.waits:
            return ()
        if self.peer != NOBODY:
            return (self.peer,)
        others = self.who.get("axes", {}).get(self.axis, ())
        return tuple(rank for rank in others if rank != self.who.get("rank"))

    def situation(self) -> str:
        """Return ' during B12@1v3, waiting for recv over pp with rank 0'; empty if nothing is
        known.

        The phases of a rank that has ended are left out.
        """
        phase = "" if self.phase in ("", FAILED, LOST, REFUSED) else f" while {self.phase}"
        text = f" during {self.action}" if self.kind else phase
        if not self.waits:
            return text
        names = ", ".join(map(str, self.peers)) or "others"
        return (
            f"{text}, waiting for {self.operation} over {self.axis} with "
            f"rank{'s' * (len(self.peers) > 1)} {names}"
        )

    def doing(self) -> str:
        """Return the situation with its step: ' in step 4 during F12@1v3 (micro-batch 12)'."""
        step = f" in step {self.step}" if self.step else ""  # moves of state belong to no step
        if self.kind and self.phase == EVALUATING:
            step = " in an evaluation"
        microbatch = ""
        if self.kind in ("F", "B", "SEND_F", "SEND_B"):
            microbatch = f" (micro-batch {self.microbatch})"
        return f"{step}{self.situation()}{microbatch}"


def hang_text(who: str, idle_s: float, doing: str, *, stopped: bool) -> str:
    """Return a description of a rank that hangs. doing: `Record.doing`. stopped: by SIGSTOP, or a
    debugger.
    """
    hangs = "is stopped, and hangs" if stopped else "hangs"
    return f"{who} {hangs}: nothing for {idle_s:.1f} s{doing}"


def read(path: Path) -> Record | None:
    """Return the record in a file of flight/ of a run folder; None if it is missing or damaged."""
    try:
        return _parse(read_limited(path, _MAX_BYTES, within=path.parent.parent))
    except (OSError, ValueError, struct.error):
        return None


class Observer:
    """Reads the record of another process of this machine, and measures how long it has not
    changed.

    The record stays open from the first look at it, so removing its file hides nothing.

    Args:
        pid: The process that writes the record.
        name: Name of its file.
        folder: Where the file should be, for systems without /proc and for a process that has
            ended.
    """

    def __init__(self, pid: int, name: str, folder: Path | None = None):
        self.pid = pid
        self._name = name
        self._folder = folder
        self._descriptor = -1
        self._count = -1
        self._since = time.monotonic()
        self._search_at = 0.0

    def look(self) -> tuple[Record | None, float]:
        """Return the record (None if there is none yet) and the seconds since it last changed."""
        record = self._read()
        now = time.monotonic()
        if (record is None and now >= self._search_at) or (
            record is not None and record.phase == _MOVED
        ):
            self._search_at = now + _SEARCH_EVERY_S
            self._find()
            record = self._read() or record
        count = -1 if record is None else record.count
        if count != self._count:
            self._count = count
            self._since = now
        return record, now - self._since

    def restart(self) -> None:
        """Restart the measurement of time."""
        self._since = time.monotonic()

    def write_end(self, phase: str, error: str) -> None:
        """Note how the process has ended, which cannot do so itself. Do nothing if the disk is
        full.
        """
        with contextlib.suppress(OSError):
            writable = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR)
            try:
                os.pwrite(writable, _PHASE.pack(phase.encode(), 0.0), _PHASE_AT)
                os.pwrite(writable, _ERROR.pack(error.encode()[: _ERROR.size]), _ERROR_AT)
            finally:
                os.close(writable)

    def close(self) -> None:
        """Close the record."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _read(self) -> Record | None:
        return None if self._descriptor < 0 else _read(self._descriptor)

    def _find(self) -> None:
        """Open the record that the process writes now, if there is one."""
        for path in self._places():
            try:
                found = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            except OSError:
                continue
            record = _read(found)
            if record is not None and record.who.get("pid") == self.pid and record.phase != _MOVED:
                self.close()
                self._descriptor = found
                return
            os.close(found)

    def _places(self) -> list[Path]:
        """Return the files that the process has open under the record's name; if the system does
        not list them, the file in the folder.
        """
        held = Path(f"/proc/{self.pid}/fd")
        found: list[Path] = []
        try:
            for path in held.iterdir():
                with contextlib.suppress(OSError):  # it may have been closed
                    name = os.readlink(path).removesuffix(_REMOVED).rpartition("/")[2]
                    if name.removeprefix(_MEMFD) == self._name:
                        found.append(path)
        except OSError:
            return [] if self._folder is None else [self._folder / self._name]
        return found


def _read(descriptor: int) -> Record | None:
    """Return the record in an open file; None if there is none."""
    try:
        return _parse(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    except (OSError, ValueError, struct.error):
        return None


def _parse(data: bytes) -> Record:
    """Return the record in these bytes.

    Raises:
        ValueError: It is damaged.
        struct.error: It is too short.
    """
    count, when = _HEAD.unpack_from(data, 0)
    phase, limit_s = _PHASE.unpack_from(data, _PHASE_AT)
    kind, stage, microbatch, version = _ACTION.unpack_from(data, _ACTION_AT)
    operation, axis, peer = _WAIT.unpack_from(data, _WAIT_AT)
    (error,) = _ERROR.unpack_from(data, _ERROR_AT)
    sent, received = _TRAFFIC.unpack_from(data, _TRAFFIC_AT)
    return Record(
        count,
        when,
        _text(phase),
        limit_s,
        _text(kind),
        stage,
        microbatch,
        version,
        _text(operation),
        _text(axis),
        peer,
        _text(error),
        sent,
        received,
        _who(data[_WHO_AT:]),
    )


def _who(text: bytes) -> dict[str, Any]:
    """Return the plain values about a rank.

    Raises:
        ValueError: `Record` cannot use them.
    """
    who = parse_json(text)
    if not isinstance(who, dict):
        raise ValueError("the record does not say which rank wrote it")
    axes = who.get("axes", {})
    if not isinstance(axes, dict):
        raise ValueError("axes must be an object")
    numbers = [who.get("rank", 0), who.get("num_microbatches", 1)]
    for ranks in axes.values():
        numbers += ranks if isinstance(ranks, list) else [None]
    if any(type(number) is not int for number in numbers) or numbers[1] < 1:
        raise ValueError("ranks and num_microbatches must be whole numbers")
    return who


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
