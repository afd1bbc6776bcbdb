"""Compare the clocks of several hosts.

    rank 0                    t        the answer: its time
                             / \\
    first of a host    sent /   \\ got        shift = t - (sent + got) / 2, wrong by at most (got - sent) / 2

All processes of a host read one clock (CLOCK_MONOTONIC). Between hosts, the exchange with the
shortest round trip counts.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridpar.comm import gather_objects
from hybridpar.comm.p2p import irecv, isend
from hybridpar.grid import ProcessGrid

_EXCHANGES = 32
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Shift:
    """Seconds to add to this host's clock to get rank 0's, and a bound on their error."""

    seconds: float = 0.0
    error: float = 0.0


def shift_to_first(grid: ProcessGrid) -> Shift:
    """Return the shift of this rank's clock to rank 0's. Collectives: on all ranks."""
    world = grid.world
    hosts: list[str] = gather_objects(_host(), world)
    mine = Shift()
    for asking in sorted({hosts.index(host) for host in hosts} - {0}):
        if world.rank == asking:
            mine = best(_ask(grid))
        elif world.rank == 0:
            _answer(grid, asking)
    shifts: list[Shift] = gather_objects(mine, world)
    return shifts[hosts.index(hosts[world.rank])]


def best(exchanges: Iterable[tuple[float, float, float]]) -> Shift:
    """Return the shift of the quickest exchange (time sent, time on rank 0, time received)."""
    sent, there, got = min(exchanges, key=lambda times: times[2] - times[0])
    return Shift(there - (sent + got) / 2, (got - sent) / 2)


def _host() -> str:
    """Return a name for this host's clock: its boot id, since containers share a clock."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text()
    return platform.node()


def _ask(grid: ProcessGrid) -> list[tuple[float, float, float]]:
    message = torch.zeros(1, dtype=torch.float64, device=grid.device_type)
    exchanges = []
    for _ in range(_EXCHANGES):
        sent = time.perf_counter()
        isend(message, 0, grid.world).wait()
        irecv(message, 0, grid.world).wait()
        there = message.item()  # on a GPU this waits for the answer
        exchanges.append((sent, there, time.perf_counter()))
    return exchanges


def _answer(grid: ProcessGrid, asking: int) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=grid.device_type)
    for _ in range(_EXCHANGES):
        irecv(message, asking, grid.world).wait()
        message.item()
        isend(message.fill_(time.perf_counter()), asking, grid.world).wait()
