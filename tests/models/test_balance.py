"""The split into stages that balances given costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.models.balance import balanced_split, even_out


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_contiguous_split_is_better(costs: list[int], data: st.DataObject) -> None:
    p = data.draw(st.integers(1, len(costs)))
    sizes = balanced_split(tuple(costs), p)
    assert len(sizes) == p
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1

    def bottleneck(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    ours = tuple(sum(sizes[:i]) for i in range(1, p))
    assert bottleneck(ours) == min(
        bottleneck(cuts) for cuts in combinations(range(1, len(costs)), p - 1)
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_equal_splits_are_decided_by_the_fullest_stage(
    costs: list[int], data: st.DataObject
) -> None:
    p = data.draw(st.integers(1, len(costs)))
    held = data.draw(
        st.lists(
            st.tuples(st.integers(0, 20), st.integers(0, 9)),
            min_size=len(costs),
            max_size=len(costs),
        )
    )
    ours = tuple(accumulate(balanced_split(tuple(costs), p, tuple(held))))[:-1]

    def worst(cuts: tuple[int, ...]) -> tuple[int, int]:
        edges = [*pairwise((0, *cuts, len(costs)))]
        return (
            max(sum(costs[a:b]) for a, b in edges),
            max(
                sum(state + (p - stage) * kept for state, kept in held[a:b])
                for stage, (a, b) in enumerate(edges)
            ),
        )

    assert worst(ours) == min(map(worst, combinations(range(1, len(costs)), p - 1)))


def test_within_the_slack_memory_decides() -> None:
    costs = (100, 99, 99, 100, 101)
    held = ((0, 9),) * 5
    assert balanced_split(costs, 2, held) == (3, 2), "298 is less than 300"
    assert balanced_split(costs, 2, held, slack=0.01) == (2, 3), "less in flight"


@pytest.mark.parametrize(
    ("costs", "num_ranks", "chunks"),
    [
        ([0, *[1] * 24, 4], 4, 2),
        ([0, *[1] * 9, 2], 2, 3),
        ([0, *[1] * 14, 1], 4, 4),
        ([3, 1, 4, 1, 5, 9, 2, 6], 2, 2),
    ],
)
def test_chunks_even_out_over_their_ranks(costs: list[int], num_ranks: int, chunks: int) -> None:
    """Against all splits there are: the costliest rank is within a block of the best one's."""
    num_stages = num_ranks * chunks
    before = balanced_split(tuple(costs), num_stages)
    sizes = even_out(tuple(costs), before, num_ranks)

    def costliest(sizes: Sequence[int]) -> int:
        ends = (0, *accumulate(sizes))
        stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(sum(stages[rank::num_ranks]) for rank in range(num_ranks))

    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert costliest(sizes) <= costliest(before)
    if len(costs) < 14:
        cuts = combinations(range(1, len(costs)), num_stages - 1)
        best = min(costliest([b - a for a, b in pairwise((0, *cut, len(costs)))]) for cut in cuts)
        assert costliest(sizes) <= best + 1
    one_each = balanced_split(tuple(costs), num_ranks)
    assert even_out(tuple(costs), one_each, num_ranks) == one_each


def test_the_head_leaves_the_last_rank_fewer_layers() -> None:
    """24 layers and a head of four: each of four ranks gets seven."""
    costs = (0, *[1] * 24, 4)
    sizes = even_out(costs, balanced_split(costs, 8), 4)
    ends = (0, *accumulate(sizes))
    stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
    assert [sum(stages[rank::4]) for rank in range(4)] == [7] * 4
