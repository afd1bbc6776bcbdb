"""Counted operations of `plan` and `simulate` for large clusters: calls of functions, which are the
same on every machine."""

from __future__ import annotations

import pytest

from benchmarks.plan_speed import BARS, calls, first_calls, simulate


def small() -> str:
    return simulate(stages=32, dp=2, m=64)


def test_512_ranks_are_simulated_in_few_calls() -> None:
    small()  # imports what is imported at first use
    assert calls(small) < 0.56e6


@pytest.mark.thorough
@pytest.mark.parametrize("what", BARS, ids=lambda what: what.__name__)
def test_large_clusters_take_no_more_calls_than_the_bar(what) -> None:
    assert first_calls(what) < BARS[what]
