"""The split by dynamic programming against all splits there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.planner.searching.split import BlockCosts, best_split, sums

TIMES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8)


def all_splits(count: int, stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in zip((0, *cuts), (*cuts, count), strict=True))
        for cuts in combinations(range(1, count), stages - 1)
    ]


@given(TIMES, st.integers(1, 8))
def test_is_as_fast_as_the_fastest_of_all_splits(times: list[float], stages: int) -> None:
    found = best_split(BlockCosts(times, [2 * t for t in times], [1.0] * len(times)), stages)
    if stages > len(times):
        assert found is None
        return
    assert found is not None
    periods = [
        max(sum(3 * times[i] + 1 for i in blocks) for blocks in split)
        for split in all_splits(len(times), stages)
    ]
    assert found.period == pytest.approx(min(periods))
    assert sum(found.sizes) == len(times)
    assert min(found.sizes) >= 1
    assert not any(found.recomputed)


@given(TIMES, st.integers(1, 4), st.lists(st.integers(1, 6), min_size=4, max_size=4))
def test_recomputes_only_where_memory_asks_for_it(
    times: list[float], stages: int, room: list[int]
) -> None:
    """Stage s holds room[s] blocks, or twice as many if they are recomputed."""
    count = len(times)

    def peaks(stage: int, again: bool) -> np.ndarray:
        return sums([1.0] * count) / (room[stage] * (2 if again else 1))

    found = best_split(BlockCosts(times, times, [0.0] * count), stages, peaks, 1.0)
    periods = []
    for split in all_splits(count, stages) if stages <= count else []:
        if all(len(blocks) <= 2 * room[s] for s, blocks in enumerate(split)):
            periods.append(
                max(
                    sum(times[i] * (2 + (len(b) > room[s])) for i in b) for s, b in enumerate(split)
                )
            )
    if not periods:
        assert found is None
        return
    assert found is not None
    assert found.period == pytest.approx(min(periods))
    assert [size > room[s] for s, size in enumerate(found.sizes)] == list(found.recomputed)


def test_equal_splits_are_decided_by_fewer_blocks_at_the_end() -> None:
    found = best_split(BlockCosts([1.0] * 5, [0.0] * 5, [0.0] * 5), 2)
    assert found is not None
    assert found.sizes == (3, 2)


@given(TIMES, st.lists(st.integers(0, 9).map(float), min_size=8, max_size=8), st.integers(1, 5))
def test_equal_splits_are_decided_by_the_fullest_stage(
    times: list[float], bytes_of: list[float], stages: int
) -> None:
    """Stage s has as many micro-batches in flight as there are stages from it to the end."""
    stages = min(stages, len(times))
    kept = bytes_of[: len(times)]
    found = best_split(
        BlockCosts(times, times, times), stages, lambda stage, again: (stages - stage) * sums(kept)
    )
    assert found is not None

    def worst(split: tuple[range, ...]) -> tuple[float, float]:
        return (
            max(3 * sum(times[i] for i in blocks) for blocks in split),
            max((stages - s) * sum(kept[i] for i in blocks) for s, blocks in enumerate(split)),
        )

    ends = [sum(found.sizes[:s]) for s in range(stages + 1)]
    assert worst(tuple(range(a, b) for a, b in pairwise(ends))) == min(
        map(worst, all_splits(len(times), stages))
    )
