"""What moves is the least that any policy of replacement would move."""

import pytest
from pipeline.plan.items import READ, with_residency

from hybridpar.pipeline.plan.action import Kind
from hybridpar.pipeline.plan.residency import Touch


def sweeps(n):
    """A batch's accesses: forward and backward; then the update; with recomputation of two chunks at a time instead."""
    up = list(range(n))
    segments = [number for first in range(n - 2, -1, -2) for number in (first, first + 1, first + 1, first)]
    return {"plain": up + up[::-1], "update": up + up[::-1] + up, "recompute": up + segments}


def fetches(accesses, capacity):
    moves, _ = with_residency([[Touch(item, READ)] for item in accesses], [1] * 10, capacity)
    return sum(action.kind is Kind.FETCH for action in moves)


@pytest.mark.parametrize(("n", "capacity", "sweep", "best"), [
    (6, 3, "update", 9), (8, 3, "update", 15), (8, 5, "update", 9), (10, 4, "update", 18), (6, 3, "recompute", 6),
    (8, 5, "recompute", 6), (6, 3, "plain", 6), (9, 8, "plain", 2)])
def test_a_batch_in_the_steady_state(n, capacity, sweep, best):
    accesses = sweeps(n)[sweep]
    assert fetches(accesses * 9, capacity) - fetches(accesses * 8, capacity) == best


@pytest.mark.parametrize(("n", "capacity", "known"), [(6, 3, (21, 30, 21)), (8, 3, (33, 48, 33)), (8, 5, (23, 32, 23))])
def test_three_batches_from_nothing(n, capacity, known):
    """Numbers that trying all choices gives."""
    assert tuple(fetches(accesses * 3, capacity) for accesses in sweeps(n).values()) == known
