"""Flight recorder of a rank: its current action, in a small file that outlives it.

    0    number of notes; time of the last (seconds since 1970)       one struct each, so that a note is one call:
    16   phase; its limit in seconds, 0 for none                      0.5 us for an action, 0.7 us for a wait
    88   action: kind, stage, micro-batch, version
    120  wait: operation, axis, peer
    168  error with which the rank has ended
    680  bytes sent to other hosts, and received from them
    696  JSON: who the rank is

The file is mapped into memory: a note is there after kill -9, and can be read while a rank hangs. It does not outlive
the machine: nothing is synced.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridpar.turns import Turns

_HEAD, _PHASE, _ACTION, _WAIT, _ERROR, _TRAFFIC = (
    struct.Struct(f"<{form}") for form in ("Qd", "64sd", "8sqqq", "24s16sq", "512s", "QQ"))
_PHASE_AT, _ACTION_AT, _WAIT_AT, _ERROR_AT, _TRAFFIC_AT, _WHO_AT = 16, 88, 120, 168, 680, 696
_LIMIT = struct.Struct("<d")
_NO_WAIT, _NO_ACTION = _WAIT.pack(b"", b"", -1), _ACTION.pack(b"", -1, -1, -1)
NOBODY = -1
"""Peer of a wait for all ranks of the axis."""
FAILED, LOST, REFUSED = "failed", "lost contact", "refused"
"""Phases of a rank that ends: by an error; because another one has left it; because it cannot do what is asked for, or
was asked to stop."""
EVALUATING = "evaluating"
"""The phase whose actions belong to no step."""


class Flight:
    """Notes what this rank does. Without a file it notes nothing."""

    def __init__(self, path: Path | None = None, who: Mapping[str, Any] | None = None):
        """Opens a file. who: plain values about this rank, `Record.who`."""
        self._map: mmap.mmap | None = None
        self._count = 0
        if path is not None:
            text = json.dumps(dict(who or {})).encode()
            with path.open("w+b") as file:
                file.write(bytes(_WHO_AT) + text)
                file.flush()
                self._map = mmap.mmap(file.fileno(), 0)
            self.phase("starting")

    def phase(self, name: str, limit_s: float = 0.0) -> None:
        """Notes that a part of the run begins. Standing still in it for longer than the limit (0: none) is a fault."""
        if self._map is not None:
            self.tick()  # first, so that no time before it counts against the new limit
            _PHASE.pack_into(self._map, _PHASE_AT, name.encode(), limit_s)
            self._map[_ACTION_AT : _ACTION_AT + len(_NO_ACTION)] = _NO_ACTION
            self.go_on()

    def limit(self, limit_s: float) -> None:
        """Gives the phase another limit from now on."""
        if self._map is not None:
            self.tick()
            _LIMIT.pack_into(self._map, _ACTION_AT - _LIMIT.size, limit_s)

    def end(self, phase: str, error: str) -> None:
        """Notes that this rank ends by an error (FAILED, LOST, REFUSED); its action and wait stay."""
        if self._map is not None:
            _PHASE.pack_into(self._map, _PHASE_AT, phase.encode(), 0.0)
            _ERROR.pack_into(self._map, _ERROR_AT, error.encode()[: _ERROR.size])
            self.tick()

    def action(self, kind: str, stage: int, microbatch: int, version: int) -> None:
        """Notes that an action of the plan begins."""
        if self._map is not None:
            _ACTION.pack_into(self._map, _ACTION_AT, kind.encode(), stage, microbatch, version)
            self.tick()

    def wait(self, operation: str, axis: str, peer: int = NOBODY) -> None:
        """Notes that this rank begins to wait, for one other (its global rank) or for all of an axis."""
        if self._map is not None:
            _WAIT.pack_into(self._map, _WAIT_AT, operation.encode(), axis.encode(), peer)
            self.tick()

    def go_on(self) -> None:
        """Notes that the wait is over."""
        if self._map is not None:
            self._map[_WAIT_AT : _WAIT_AT + len(_NO_WAIT)] = _NO_WAIT
            self.tick()

    def traffic(self, sent: int, received: int) -> None:
        """Notes the bytes that went to other hosts and came from them so far; no progress, so it counts none."""
        if self._map is not None:
            _TRAFFIC.pack_into(self._map, _TRAFFIC_AT, sent, received)

    def tick(self) -> None:
        """Counts progress in the current action."""
        if self._map is not None:
            self._count += 1
            _HEAD.pack_into(self._map, 0, self._count, time.time())

    def read(self) -> Record | None:
        """The record as it stands now; None without a file."""
        return None if self._map is None else _parse(bytes(self._map))


NO_FLIGHT = Flight()
"""A recorder that notes nothing, and so has no state."""


class Waiting:
    """Notes a wait: `with Waiting(flight, "all_reduce", "dp"): ...`. Where that fails, the note stays.

    `turns`: of which others may run first.
    """

    __slots__ = ("_flight", "_turns", "_what")

    def __init__(self, flight: Flight, operation: str, axis: str, peer: int = NOBODY, turns: Turns | None = None):
        self._flight, self._what, self._turns = flight, (operation, axis, peer), turns

    def __enter__(self) -> None:
        if self._turns is not None:
            self._turns.give_way()
        self._flight.wait(*self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self._flight.go_on()


@dataclass(frozen=True)
class Record:
    """The content of a recorder. Without an action `kind` is empty, without a wait `operation`. peer: a global rank.

    count: changes with every note. sent, received: bytes to and from other hosts. who: rank, stage (of the grid), the
    stages that it holds, its place by axis, pid, num_microbatches, and `axes`, the global ranks by axis; whatever was
    known when the recorder was opened.
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
        """The step (from 1) that its action belongs to; 0 where it has none."""
        if not self.kind or self.kind in ("FETCH", "RELEASE", "DROP"):
            return 0
        batch_wide = self.kind in ("REDUCE", "NORM", "UPDATE")
        return 1 + (self.microbatch if batch_wide else self.microbatch // self.who.get("num_microbatches", 1))

    @property
    def action(self) -> str:
        """The action as pipeline.plan writes it: 'F12@1v3'."""
        return f"{self.kind}{self.microbatch}@{self.stage}" + (f"v{self.version}" if self.kind in ("F", "B") else "")

    @property
    def peers(self) -> Sequence[int]:
        """Global ranks that it waits for."""
        others = self.who.get("axes", {}).get(self.axis, ())
        return () if not self.waits else (self.peer,) if self.peer != NOBODY else tuple(
            rank for rank in others if rank != self.who.get("rank"))

    def situation(self) -> str:
        """' during B12@1v3, waiting for recv over pp with rank 0'; empty where nothing is known.

        An end is no phase that a rank can be in.
        """
        phase = "" if self.phase in ("", FAILED, LOST, REFUSED) else f" while {self.phase}"
        text = f" during {self.action}" if self.kind else phase
        if not self.waits:
            return text
        names = ", ".join(map(str, self.peers)) or "others"
        return f"{text}, waiting for {self.operation} over {self.axis} with rank{'s' * (len(self.peers) > 1)} {names}"


def read(path: Path) -> Record | None:
    """The record in a file; None where there is none."""
    try:
        return _parse(path.read_bytes())
    except (OSError, ValueError, struct.error):
        return None


def _parse(data: bytes) -> Record:
    """Raises: ValueError, struct.error."""
    count, when = _HEAD.unpack_from(data, 0)
    phase, limit_s = _PHASE.unpack_from(data, _PHASE_AT)
    kind, stage, microbatch, version = _ACTION.unpack_from(data, _ACTION_AT)
    operation, axis, peer = _WAIT.unpack_from(data, _WAIT_AT)
    (error,) = _ERROR.unpack_from(data, _ERROR_AT)
    sent, received = _TRAFFIC.unpack_from(data, _TRAFFIC_AT)
    return Record(count, when, _text(phase), limit_s, _text(kind), stage, microbatch, version, _text(operation),
                  _text(axis), peer, _text(error), sent, received, json.loads(data[_WHO_AT:]))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
