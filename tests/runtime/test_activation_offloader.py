"""Actions wait for activations that move: which ones, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from torch import Tensor

from hybridpar.runtime.activation_offloader import ActivationOffloader
from hybridpar.runtime.slow_tier import SlowTier
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import Kind

WAITING = {
    Kind.OFFLOAD: [Kind.EVICT],
    Kind.RELOAD: [Kind.B, Kind.I],
}


class Slow(SlowTier):
    """A tier whose newest move is complete when a test says so."""

    def read(self, place: Any, into: Sequence[Tensor]) -> Future[None]:
        self.newest: Future[None] = Future()
        return self.newest


def action(kind: Kind) -> Action:
    return Action(kind, 0, 3)


@pytest.mark.parametrize("move", WAITING)
def test_actions_that_wait_for_a_move(move: Kind) -> None:
    """Not a batch's, which may have the micro-batch's number."""
    tier = Slow()
    offloader = ActivationOffloader(tier)
    with offloader.noting(action(Kind.F), None):
        pass
    is_done = offloader.move(action(move))
    assert is_done is not None
    assert not is_done()
    for kind in {Kind.F, Kind.W, Kind.REDUCE, Kind.NORM, Kind.UPDATE}:
        assert offloader.are_here(action(kind))
        offloader.access(action(kind))
    assert not any(offloader.are_here(action(kind)) for kind in WAITING[move])
    tier.newest.set_result(None)
    assert is_done()
    assert all(offloader.are_here(action(kind)) for kind in WAITING[move])


def test_a_backward_leaves_activations_to_autograd() -> None:
    """Its later segments wait for nothing. An eviction keeps them, and starts nothing."""
    offloader = ActivationOffloader(SlowTier())
    with offloader.noting(action(Kind.F), None):
        pass
    for kind in (Kind.OFFLOAD, Kind.EVICT, Kind.RELOAD):
        offloader.access(action(kind))
        assert (offloader.move(action(kind)) is None) == (kind is Kind.EVICT)
        assert offloader.left == [(0, 3)]
    for part in (1, 0):
        offloader.access(Action(Kind.B, 0, 3, part=part))
        assert offloader.left == []
