"""Memory that searches ask for is traced once for all tests: they ask for the same stages again and
again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridpar.planner.costs import candidate_memory as memory
from hybridpar.planner.searching import remedies
from hybridpar.prediction import Footprints


@pytest.fixture(scope="session", autouse=True)
def footprints() -> Iterator[Footprints]:
    known = Footprints()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Footprints", lambda: known)
        patch.setattr(remedies, "Footprints", lambda: known)
        yield known
