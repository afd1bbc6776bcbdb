"""What tests of placements share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from hybridpar.planner.placement import latency_milp, solve
from hybridpar.planner.placement.highs import Highs


@pytest.fixture(scope="module")
def highs() -> Iterator[Highs]:
    """One process for all programs of a module that has many of them: it takes half a second to start."""
    with Highs() as process, pytest.MonkeyPatch.context() as patch:
        for module in (solve, latency_milp):
            patch.setattr(module, "Highs", lambda: nullcontext(process))
        yield process
