"""Watch links to other hosts: outages are waited for and reported, bytes are counted.

    a thread   inspects this process's TCP connections once a second (hybridpar.sockets)
    outage     nothing has come from a host for SILENT_S while this rank waits: reported now and
               every _SAY_EVERY_S, until something comes. TCP resumes by itself;
               `faults.patience_s` is the time limit of the wait
    bytes      recorded in the flight record, so that the first rank can sum the bytes of its host

If all ranks are on one host, there is no such thread.
"""

from __future__ import annotations

import math
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar import sockets
from hybridpar.flight import Flight, read

SILENT_S = 5.0
"""Silence after which a link counts as down: its host was probed twice and has not answered."""
_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_STUCK_RETRIES = 6
"""Unacknowledged retransmissions after which a link counts as down in one direction."""
DAY_S = 86400.0


@dataclass(frozen=True)
class Silence:
    """A link to another host that is down. since: in time.monotonic()."""

    host: str
    since: float

    def __str__(self) -> str:
        lasts = time.monotonic() - self.since
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - lasts))
        return f"the link to {self.host} has been silent for {lasts:.0f} s, since {clock}"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        own: Name of this host.
        names: Names by address.
        ranks: Ranks on this host.
    """

    own: str
    names: Mapping[str, str]
    ranks: tuple[int, ...]

    @staticmethod
    def introduce() -> list[Any]:
        """Return this process's message to the others: host name, and addresses towards hosts."""
        return [platform.node(), sorted({one.own for one in sockets.connections()})]

    @staticmethod
    def of(introductions: Sequence[Any], rank: int) -> Hosts:
        """Derive the hosts from the messages of all processes; two may have one name."""
        name, mine = introductions[rank]
        names = {
            address: f"{node} ({address})"
            for node, addresses in introductions
            for address in addresses
        }
        here = tuple(
            r
            for r, (node, addresses) in enumerate(introductions)
            if node == name and (set(addresses) & set(mine) or not (addresses and mine))
        )
        return Hosts(names[mine[0]] if mine else name, names, here)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host has sent to others and received, headers included, at a time."""

    sent: float = 0
    received: float = 0
    seconds: float = 0.0

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.sent - before.sent, self.received - before.received, self.seconds - before.seconds
        )

    @property
    def a_day(self) -> tuple[float, float]:
        """Bytes sent and received per day."""
        days = max(self.seconds, 1e-9) / DAY_S
        return self.sent / days, self.received / days

    def __str__(self) -> str:
        return (
            f"sent {amount(self.sent)} to other hosts and received {amount(self.received)}, that "
            f"is {a_day(*self.a_day)}"
        )


def a_day(sent: float, received: float) -> str:
    """Format bytes per day: '4.1 GB a day each way', or both ways if they differ by a tenth."""
    out = amount(sent)
    back = amount(received)
    if abs(sent - received) <= 0.1 * max(sent, received):
        return f"{out if sent > received else back} a day each way"
    return f"{out} a day out, {back} in"


def amount(num_bytes: float) -> str:
    """Format bytes: '4.1 GB'."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


class LinkWatch:
    """Watches the links from this process to other hosts.

    Args:
        flight: Flight record of this process, which receives the counted bytes.
        files: Flight records of all ranks of this host; `traffic` sums their bytes.
        say: Called with each line to report; None if another rank of this host reports.
    """

    def __init__(
        self,
        flight: Flight,
        limit_s: float,
        hosts: Hosts,
        files: Sequence[Path] = (),
        say: Callable[[str], None] | None = None,
    ):
        self.hosts = hosts
        self._flight = flight
        self._limit_s = limit_s
        self._files = files
        self._say = say or (lambda text: None)
        self._known: dict[int, sockets.Connection] = {}
        self._silence: Silence | None = None
        self._said = -math.inf
        self._over = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()

    @property
    def silence(self) -> Silence | None:
        """The link that is down while this rank waits; None if there is none."""
        return self._silence

    def traffic(self) -> Traffic:
        """Return the bytes that this host's ranks have sent and received, up to a second ago."""
        records = [record for path in self._files if (record := read(path)) is not None]
        return Traffic(
            sum(record.sent for record in records),
            sum(record.received for record in records),
            time.monotonic(),
        )

    def _look(self) -> None:
        """Count bytes, and report a link that is down."""
        found = sockets.connections()
        if any(one.number not in self._known for one in found):
            sockets.prepare(self._limit_s)
        self._known |= {one.number: one for one in found}
        self._flight.traffic(
            sum(one.sent for one in self._known.values()),
            sum(one.received for one in self._known.values()),
        )
        self._detect_outage(found)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._look()

    def _detect_outage(self, found: Sequence[sockets.Connection]) -> None:
        record = self._flight.read()
        before = self._silence
        now = time.monotonic()
        silent = {
            host: min(one.silent_s for one in found if one.host == host)
            for host in {one.host for one in found}
        }
        stuck = {one.host for one in found if one.retries >= _STUCK_RETRIES}
        out = {host: s for host, s in silent.items() if s >= SILENT_S or host in stuck}
        if out and (before is not None or (record is not None and record.waits)):
            host = max(out, key=lambda host: out[host])
            name = self.hosts.names.get(host, host)
            if before is None or before.host != name:
                self._silence = before = Silence(name, now - out[host])
                self._said = -math.inf
            if now - self._said >= _SAY_EVERY_S:
                self._say(f"waiting for the link to {name}, {now - before.since:.0f} s")
                self._said = now
        elif before is not None and not out:
            self._say(f"the link to {before.host} is back after {now - before.since:.0f} s")
            self._silence = None
