"""Fixtures that tests of placements share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from hybridpar.placement import solve
from hybridpar.placement.solvers import latency_milp
from hybridpar.placement.solvers.highs import Answer, Highs, Program


@pytest.fixture(scope="module")
def highs() -> Iterator[Highs]:
    """One process for all programs of a module that has many of them: it takes half a second to
    start."""
    with Highs() as process, pytest.MonkeyPatch.context() as patch:
        for module in (solve, latency_milp):
            patch.setattr(module, "Highs", lambda: nullcontext(process))
        yield process


@pytest.fixture
def only_highs_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still, but while HiGHS solves: all else may take as long as a busy
    machine lets it."""
    clock = time.monotonic
    solve = Highs.solve
    now = 0.0

    def timed(self: Highs, program: Program, deadline: float) -> Answer:
        nonlocal now
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", clock)
            began = clock()
            answer = solve(self, program, began + deadline - now)
            now = min(deadline, now + clock() - began)
        return answer

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Highs, "solve", timed)
