"""No policy of replacement would move less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import READ, with_residency

from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes.residency import Access


def sweeps(n):
    """A batch's accesses: forward and backward; then the update; with recomputation of two chunks
    at a time instead."""
    up = list(range(n))
    segments = [
        number for first in range(n - 2, -1, -2) for number in (first, first + 1, first + 1, first)
    ]
    return {"plain": up + up[::-1], "update": up + up[::-1] + up, "recompute": up + segments}


def fetches(accesses, capacity):
    moves, _ = with_residency([[Access(item, READ)] for item in accesses], [1] * 10, capacity)
    return sum(action.kind is Kind.FETCH for action in moves)


def least_recent(accesses, capacity):
    """Misses where what was not used for longest gives way."""
    here = []
    misses = 0
    for item in accesses:
        misses += item not in here
        here = [*(other for other in here if other != item), item][-capacity:]
    return misses


def in_list_order(accesses, capacity):
    """Misses where the first in the list gives way, as in PatrickStar before it has watched an
    iteration."""
    here = set()
    misses = 0
    for item in accesses:
        misses += item not in here
        if item not in here and len(here) == capacity:
            here.remove(min(here))
        here.add(item)
    return misses


@pytest.mark.parametrize(
    ("n", "capacity", "sweep", "best", "recent", "listed"),
    [
        (6, 3, "update", 9, 12, 10),
        (8, 3, "update", 15, 18, 16),
        (8, 5, "update", 9, 14, 10),
        (10, 4, "update", 18, 22, 19),
        (6, 3, "recompute", 6, 7, 9),
        (8, 5, "recompute", 6, 7, 9),
        (6, 3, "plain", 6, 6, 6),
        (9, 8, "plain", 2, 2, 2),
    ],
)
def test_a_batch_in_the_steady_state(n, capacity, sweep, best, recent, listed):
    accesses = sweeps(n)[sweep]
    for policy, known in ((fetches, best), (least_recent, recent), (in_list_order, listed)):
        assert policy(accesses * 9, capacity) - policy(accesses * 8, capacity) == known


@pytest.mark.parametrize(
    ("n", "capacity", "known"), [(6, 3, (21, 30, 21)), (8, 3, (33, 48, 33)), (8, 5, (23, 32, 23))]
)
def test_three_batches_from_nothing(n, capacity, known):
    """Numbers that trying all choices gives."""
    assert tuple(fetches(accesses * 3, capacity) for accesses in sweeps(n).values()) == known


@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 6))
def test_the_least_recent_is_no_better(items, capacity):
    assert len(set(items)) <= fetches(items, capacity) <= least_recent(items, capacity)
