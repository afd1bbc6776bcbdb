"""The paper's worked cases, and what fits through a link that is shared."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_behaviour.traces import Rank

from hybridpar.memory_behaviour.analysis.behaviour import Peak, analyse
from hybridpar.memory_behaviour.analysis.swap import (
    LINKS,
    Link,
    across,
    away_at_peak,
    feasible,
    num_feasible,
    saved_at_peak,
    swappable,
)
from hybridpar.memory_behaviour.events import Access, Life, lives

SLOW = Link("slow", 1.0, 2.0)


def life(block: int, num_bytes: int, *times: float) -> Life:
    return Life(
        block,
        num_bytes,
        "aten::mm",
        -1,
        "",
        times[0],
        "F0@0",
        1,
        accesses=[Access(time, False, "aten::mm", "F0@0", 1, "", num_bytes) for time in times],
    )


def peak_at(time: float) -> Peak:
    return Peak(0, time, 1, "", {}, {}, ())


def test_worked_cases() -> None:
    paper = LINKS["paper"]
    assert swappable(25e-6, paper) / 1e3 == pytest.approx(79.37, abs=0.005)
    assert swappable(840_211e-6, paper) / 2**20 == pytest.approx(2543.9, abs=0.05)
    assert swappable(840_211e-6, paper) > 1200e6  # the paper's outlier has 1200 MB
    assert swappable(0.0, paper) == swappable(-1.0, paper) == 0


@given(st.floats(0, 1e3), st.sampled_from(list(LINKS.values())))
def test_the_largest_block_that_fits(seconds: float, link: Link) -> None:
    most = swappable(seconds, link)
    assert link.round_trip(most) <= seconds * (1 + 1e-12)
    assert link.round_trip(most + 2) > seconds * (1 - 1e-12)


def test_intervals_that_are_long_enough() -> None:
    swaps = feasible(
        [life(0, 4, 0.0, 6.0, 11.0, 18.0), life(1, 0, 0.0, 100.0), life(2, 1, 3.0)], SLOW
    )
    assert [(s.life.block, s.start, s.end, s.num_bytes, s.spare) for s in swaps] == [
        (0, 0.0, 6.0, 4, 0.0),
        (0, 11.0, 18.0, 4, 1.0),
    ]


def test_intervals_are_counted_as_they_are_listed() -> None:
    made = [life(0, 4, 0.0, 6.0, 11.0, 18.0), life(1, 0, 0.0, 100.0), life(2, 1, 3.0, 3.0, 4.4)]
    gaps = [(b.time - a.time, b.num_bytes) for one in made for a, b in one.intervals()]
    seconds, num_bytes = np.array(gaps, np.float64).T
    for link in (SLOW, *LINKS.values()):
        assert num_feasible(seconds, num_bytes, link) == len(feasible(made, link))
    assert num_feasible(seconds, num_bytes, SLOW) == 2
    for time in (3.0, 5.0, 11.0, 17.0):
        peak = peak_at(time)
        assert saved_at_peak(across(made, time), SLOW, peak) == saved_at_peak(made, SLOW, peak)


def test_tensors_of_a_block_leave_alone() -> None:
    accesses = [(0.0, "a"), (3.0, "b"), (6.0, "a"), (9.0, "b")]
    flat = replace(
        life(0, 6, 0.0),
        accesses=[
            Access(time, False, "aten::mm", "F0@0", 1, tensor, {"a": 4, "b": 2}[tensor])
            for time, tensor in accesses
        ],
    )
    # the block would need 9 s, and is accessed every 3
    assert [(s.start, s.end, s.num_bytes, s.spare) for s in feasible([flat], SLOW)] == [
        (0.0, 6.0, 4, 0.0),
        (3.0, 9.0, 2, 3.0),
    ]


def test_at_the_peak_a_block_is_neither_leaving_nor_coming_back() -> None:
    one = [life(0, 4, 0.0, 10.0)]
    assert [saved_at_peak(one, SLOW, peak_at(time)) for time in (3.9, 4.0, 8.0, 8.1)] == [
        0,
        4,
        4,
        0,
    ]


def test_a_shared_link_takes_one_block_at_a_time() -> None:
    two = [life(0, 4, 0.0, 20.0), life(1, 3, 0.0, 20.0)]
    assert saved_at_peak(two, SLOW, peak_at(6.0), shared=False) == 7
    assert saved_at_peak(two, SLOW, peak_at(6.0)) == 4  # both take 7 s to leave
    assert saved_at_peak(two, SLOW, peak_at(7.0)) == 7
    assert saved_at_peak(two, SLOW, peak_at(17.0)) == 4  # and 3.5 s to come back
    assert [swap.life.block for swap in away_at_peak(two, SLOW, peak_at(17.0))] == [0]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(0, 24)), max_size=5),
    st.integers(6, 18),
)
def test_the_choice_can_be_carried_out(triples: list[tuple[int, int, int]], peak: int) -> None:
    made = [
        life(i, num_bytes, float(start), float(start + seconds))
        for i, (num_bytes, start, seconds) in enumerate(triples)
    ]
    away = away_at_peak(made, SLOW, peak_at(peak))
    saved = saved_at_peak(made, SLOW, peak_at(peak))
    assert (
        saved
        == sum(swap.num_bytes for swap in away)
        <= saved_at_peak(made, SLOW, peak_at(peak), shared=False)
    )
    alone = [swap for swap in feasible(made, SLOW) if can_be_done([swap], peak)]
    best = max(
        sum(swap.num_bytes for swap in some)
        for n in range(len(alone) + 1)
        for some in combinations(alone, n)
        if can_be_done(some, peak)
    )
    assert can_be_done(away, peak)
    assert best / 2 <= saved <= best


def can_be_done(swaps, peak: float) -> bool:
    """Whether some order of copies out, and one of copies back, are all in time."""

    def out(order) -> bool:
        now = 0.0
        for swap in order:
            now = max(now, swap.start) + swap.num_bytes / SLOW.d2h
        return now <= peak

    def back(order) -> bool:
        now = peak
        for swap in order:
            now += swap.num_bytes / SLOW.h2d
            if now > swap.end:
                return False
        return True

    return any(map(out, permutations(swaps))) and any(map(back, permutations(swaps)))


def test_a_pipeline_keeps_what_could_leave() -> None:
    """Activations wait for whole micro-batches: most of the peak could leave over a fast link, less
    over a slow one."""
    spans = list(Rank().spans())
    peak = analyse(spans).peak
    saved = [
        saved_at_peak(lives(spans), Link("", rate, rate), peak) / peak.num_bytes
        for rate in (1e8, 1e9, 1e10)
    ]
    assert saved == sorted(saved)
    assert saved[0] < 0.2 < 0.6 < saved[2] < 1
