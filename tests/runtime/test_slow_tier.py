"""Activations on their way to a GPU's host: what is timed, and in which order streams work, on a
modelled clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from streams import Machine

from hybridpar.errors import HybridparError
from hybridpar.runtime import slow_tier
from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.runtime.slow_tier import HostTier, MoveTimes
from hybridpar.schedules.action import Action, Kind
from hybridpar.state.host import StreamWork
from hybridpar.state.residency.store import PAGE

CPU = torch.device("cpu")
BANDWIDTH = 1e6


@contextmanager
def host_tier(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, num_bytes: int = 0
) -> Iterator[HostTier]:
    machine.stand_in(monkeypatch)
    monkeypatch.setattr(slow_tier, "host_work", StreamWork)
    tier = HostTier(CPU, num_bytes)
    try:
        yield tier
    finally:
        tier.close()


def content(num_bytes: int) -> list[torch.Tensor]:
    return [torch.randint(256, (num_bytes,), dtype=torch.uint8)]


def test_the_time_of_a_move_is_that_of_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the forward before it, nor of moves before it, whose turn comes first."""
    machine = Machine(BANDWIDTH)
    with host_tier(machine, monkeypatch) as tier:
        moves = []
        for _ in range(3):
            machine.compute.compute(7.0)
            moves.append((*tier.write(kept := content(50_000)), kept))
        places = [(place, kept) for place, written, kept in moves if written.result() is None]
        assert (tier.times().write, tier.times().read) == pytest.approx((0.05, 0.0))
        for place, kept in places:
            machine.compute.compute(7.0)
            tier.read(place, kept).result()
        assert (tier.times().write, tier.times().read) == pytest.approx((0.05, 0.05))
        tier.restart()
        assert tier.times() == MoveTimes()
        tier.write(content(20_000))[1].result()
        assert (tier.times().write, tier.times().read) == pytest.approx((0.02, 0.0))


@pytest.mark.parametrize(("shared", "takes"), [(False, 0.05), (True, 0.1)])
def test_directions_that_share_the_link_take_longer(
    shared: bool, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read and a write that may begin at the same time: the read finds the link free or not."""
    machine = Machine(BANDWIDTH, shared)
    with host_tier(machine, monkeypatch) as tier:
        first, written = tier.write(kept := content(50_000))
        written.result()
        machine.compute.compute(7.0)
        mark = tier._work.mark()
        monkeypatch.setattr(tier._work, "mark", lambda: mark)
        tier.write(content(50_000))[1].result()
        tier.read(first, kept).result()
        assert (tier.times().write, tier.times().read) == pytest.approx((0.05, takes))


def test_a_block_is_one_copy_and_a_piece_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand copies would take the interpreter from the launch thread a thousand times."""
    machine = Machine(BANDWIDTH)
    with host_tier(machine, monkeypatch) as tier:
        kept = content(24 << 20) + content(3 << 20) + content(5000)
        before = [tensor.clone() for tensor in kept]
        place, written = tier.write(kept)
        written.result()
        assert machine.num_copies == 4, "a block of 24 MiB is on two pieces of 16"
        for tensor in kept:
            tensor.zero_()
        tier.read(place, kept).result()
        assert all(map(torch.equal, kept, before))


def move(kind: Kind) -> Action:
    return Action(kind, 0, 0)


def test_memory_is_freed_after_its_copy_and_read_into_after_its_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EVICT: the copy has read it, and read what the forward wrote. RELOAD: the allocator hands out
    memory that kernels before it still write to; the copy comes after them."""
    machine = Machine(BANDWIDTH)
    with host_tier(machine, monkeypatch) as tier:
        offloader = ActivationOffloader(tier)
        kept = torch.zeros(PAGE)
        with offloader.noting(move(Kind.F), None):
            pass
        monkeypatch.setattr(offloader._kept[0, 0].notes, "alone", lambda: [kept])
        machine.compute.compute(2.0, lambda: kept.fill_(3.0))  # the forward's kernel
        offloader.move(move(Kind.OFFLOAD))
        offloader.access(move(Kind.EVICT))
        offloader.move(move(Kind.EVICT))
        assert kept.untyped_storage().nbytes() == 0
        # RELOAD takes memory that a kernel queued before still writes to
        offloader.listeners.append(
            lambda content: machine.compute.compute(2.0, lambda: content.fill_(99))
        )
        offloader.move(move(Kind.RELOAD))
        offloader.access(move(Kind.B))
        machine.compute.synchronize()
        assert torch.equal(kept, torch.full((PAGE,), 3.0))


def test_memory_is_taken_before_training_and_checked_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never more than the host has: the system would end the process."""
    room = 100 << 20
    monkeypatch.setattr(slow_tier, "host_room", lambda: room)
    made: list[Any] = []
    store = slow_tier.HostStore
    monkeypatch.setattr(slow_tier, "HostStore", lambda *sizes: made.append(sizes) or store(*sizes))
    with host_tier(Machine(BANDWIDTH), monkeypatch, 40 << 20) as tier:
        assert len(tier._free) == 3
        for _ in range(2):
            place, written = tier.write(kept := content(33 << 20))
            written.result()
            tier.read(place, kept).result()
        assert len(made) == 1
        room = 1 << 20
        with pytest.raises(
            HybridparError, match=r"need 16 MiB more host memory, and only 1 MiB are free"
        ):
            tier.write(content(49 << 20))
    with pytest.raises(HybridparError, match="offload fewer micro-batches"):
        HostTier(CPU, 2 << 20)
