import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.plan.items import READ, with_residency

from hybridpar.pipeline.plan.action import Kind
from hybridpar.pipeline.plan.policies import POLICIES, count_misses
from hybridpar.pipeline.plan.residency import Touch


def sweeps(n):
    """A batch's accesses: forward and backward; then the update; with recomputation of two chunks at a time instead."""
    up = list(range(n))
    segments = [number for first in range(n - 2, -1, -2) for number in (first, first + 1, first + 1, first)]
    return {"plain": up + up[::-1], "update": up + up[::-1] + up, "recompute": up + segments}


def steady_misses(accesses, capacity):
    return [count_misses(policy, accesses * 9, capacity) - count_misses(policy, accesses * 8, capacity)
            for policy in ("opt", "lru", "fifo", "list order")]


@pytest.mark.parametrize(("n", "capacity", "sweep", "known"), [
    (6, 3, "update", [9, 12, 12, 10]), (8, 3, "update", [15, 18, 18, 16]), (8, 5, "update", [9, 14, 16, 10]),
    (10, 4, "update", [18, 22, 22, 19]), (6, 3, "recompute", [6, 7, 8, 9]), (8, 5, "recompute", [6, 7, 8, 9]),
    (6, 3, "plain", [6, 6, 6, 6]),
])
def test_known_answers(n, capacity, sweep, known):
    assert steady_misses(sweeps(n)[sweep], capacity) == known


@pytest.mark.parametrize(("n", "capacity"), [(4, 2), (6, 3), (8, 3), (8, 5), (10, 4), (9, 8)])
def test_formulas(n, capacity):
    plain, update = (steady_misses(sweeps(n)[name], capacity) for name in ("plain", "update"))
    assert plain[:2] == [2 * (n - capacity)] * 2, "which does not tell lru from the best"
    assert update[:2] == [3 * (n - capacity), 3 * n - 2 * capacity]


@pytest.mark.parametrize(("n", "capacity", "known"), [(6, 3, (21, 30, 21)), (8, 3, (33, 48, 33)), (8, 5, (23, 32, 23))])
def test_three_batches_from_nothing(n, capacity, known):
    """Numbers that trying all choices gives; of the plan's own moves too."""
    for accesses, misses in zip(sweeps(n).values(), known, strict=True):
        assert count_misses("opt", accesses * 3, capacity) == misses
        moves, _ = with_residency([[Touch(item, READ)] for item in accesses * 3], [1] * n, capacity)
        assert sum(action.kind is Kind.FETCH for action in moves) == misses


@given(st.lists(st.integers(0, 7), max_size=40), st.integers(1, 6), st.sampled_from(sorted(POLICIES)))
def test_none_is_better_than_the_best(items, capacity, policy):
    moves, _ = with_residency([[Touch(item, READ)] for item in items], [1] * 8, capacity)
    best = sum(action.kind is Kind.FETCH for action in moves)
    assert len(set(items)) <= best == count_misses("opt", items, capacity) <= count_misses(policy, items, capacity)
