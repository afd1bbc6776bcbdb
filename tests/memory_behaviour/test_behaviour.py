"""Behaviours by hand, and against slow and simple computations of the same."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_behaviour.traces import Rank, random_spans

from hybridpar.memory_behaviour.analysis import behaviour
from hybridpar.memory_behaviour.analysis.account import examine
from hybridpar.memory_behaviour.analysis.behaviour import Distribution, analyse
from hybridpar.memory_behaviour.events import Category, Header, MemoryEvent, Span, What, lives
from hybridpar.schedules.pipeline_shape import PipelineShape

M = What.MALLOC
F = What.FREE
R = What.READ
W = What.WRITE


def span(step: int, action: str, end: float, *events: tuple[What, int, int, float]) -> Span:
    return Span(
        step,
        action,
        0.0,
        end,
        [
            MemoryEvent(what, block, num_bytes, "aten::add", time, layer=block)
            for what, block, num_bytes, time in events
        ],
    )


def test_known_answers() -> None:
    weights = Span(1, "", 0.0, 0.0, [MemoryEvent(M, 0, 100, "", 0.0, name="weights 0")])
    found = analyse(
        [
            weights,
            span(
                1,
                "F0@0v0",
                2.0,
                (R, 0, 100, 1.0),
                (M, 1, 40, 1.0),
                (W, 1, 40, 1.0),
                (M, 2, 7, 1.5),
                (W, 2, 7, 1.5),
                (R, 2, 7, 1.6),
                (F, 2, 7, 1.6),
            ),
            span(
                1,
                "B0@0v0",
                5.0,
                (R, 1, 40, 3.0),
                (M, 3, 30, 3.0),
                (W, 3, 30, 3.0),
                (R, 0, 100, 4.0),
                (F, 1, 40, 4.0),
                (F, 3, 30, 5.0),
            ),
        ]
    )
    peak = found.peak
    assert (peak.num_bytes, peak.time, peak.step, peak.action) == (170, 3.0, 1, "B0@0v0")
    assert peak.by_category == {
        Category.WEIGHTS: 100,
        Category.ACTIVATIONS: 40,
        Category.TEMPORARIES: 30,
    }
    assert peak.by_layer == {1: 40}
    assert [life.block for life in peak.owners] == [0, 1, 3]
    assert found.timeline == [
        (0.0, {Category.WEIGHTS: 100}),
        (2.0, {Category.WEIGHTS: 100, Category.ACTIVATIONS: 40}),
        (3.0, peak.by_category),
        (5.0, {Category.WEIGHTS: 100}),
    ]
    intervals = found.intervals
    assert intervals.distribution.count == 3
    assert intervals.distribution.total == pytest.approx(3.0 + 2.0 + 0.1)
    assert [(one.life.block, one.seconds) for one in intervals.outliers] == [
        (0, 3.0),
        (1, 2.0),
        (2, pytest.approx(0.1)),
    ]
    assert intervals.outliers[0].before.action == "F0@0v0"
    assert intervals.outliers[0].after.action == "B0@0v0"
    # block 2: nothing between; 1: block 2; 0: blocks 1, 2 and 3
    assert (found.reuse.count, found.reuse.zeros, found.reuse.total) == (3, 1, 7 + 77)
    assert found.lifetimes[Category.ACTIVATIONS].total == 3.0
    assert Category.WEIGHTS not in found.lifetimes
    totals = found.breakdown[Category.TEMPORARIES]
    assert (totals.num_blocks, totals.num_bytes, totals.reads, totals.writes, totals.accesses) == (
        2,
        37,
        1,
        2,
        3,
    )
    assert (found.num_steps, found.stable_from, found.num_events) == (1, None, 14)


def test_intervals_of_tensors_in_a_block_by_hand() -> None:
    """Two weights in one block. As one block it would have intervals of 1, 1, 2 and 1 s."""
    accesses = [
        (1.0, R, "a"),
        (2.0, R, "b"),
        (3.0, R, "a"),
        (5.0, R, "a"),
        (5.0, W, "a"),  # one operator
        (5.0, W, "b"),
        (6.0, R, "b"),
    ]
    bytes_of = {"a": 60, "b": 40}
    spans = [
        Span(1, "", 0.0, 0.0, [MemoryEvent(M, 0, 100, "", 0.0, name="weights 0")]),
        Span(
            1,
            "F0@0v0",
            0.5,
            6.0,
            [
                MemoryEvent(what, 0, bytes_of[name], "aten::mm", time, name=name)
                for time, what, name in accesses
            ],
        ),
    ]
    found = analyse(spans)
    intervals = [
        (one.after.tensor, one.before.time, one.after.time, one.after.num_bytes)
        for one in found.intervals.outliers
    ]
    assert intervals == [
        # seconds x bytes: 120, 120, 120, 40; the first of equals first
        ("a", 1.0, 3.0, 60),
        ("a", 3.0, 5.0, 60),
        ("b", 2.0, 5.0, 40),
        ("b", 5.0, 6.0, 40),
    ]
    assert found.intervals.distribution.count == 4
    assert found.intervals.distribution.total == 2.0 + 2.0 + 3.0 + 1.0
    # between: b; nothing, and in one operator nothing; a; nothing
    assert (found.reuse.count, found.reuse.zeros, found.reuse.total) == (5, 3, 40 + 60)
    assert found.breakdown[Category.WEIGHTS].reads == 5
    account = examine(Header(), found, lambda: spans)
    assert sorted((gap.tensor, gap.seconds, gap.num_bytes) for gap in account.gaps) == [
        ("a", 2.0, 60),
        ("a", 2.0, 60),
        ("b", 1.0, 40),
        ("b", 3.0, 40),
    ]
    assert [(one.tensor, one.seconds, one.median) for one in account.tensors] == [
        ("a", [2.0, 2.0], 2.0),
        ("b", [1.0, 3.0], 2.0),
    ]


def test_a_first_step_that_reaches_no_more_than_others_is_not_the_one_that_is_shown() -> None:
    steps = [
        span(step, f"F{step - 1}@0v0", step, (M, step, 40, step), (F, step, 40, step))
        for step in (1, 2, 3)
    ]
    assert analyse(steps).peak.step == 2
    assert analyse([*steps, span(4, "F3@0v0", 4.0, (M, 4, 41, 4.0))]).peak.step == 4
    assert (
        analyse([span(1, "F0@0v0", 1.0, (M, 9, 41, 0.5), (F, 9, 41, 0.6)), *steps[1:]]).peak.step
        == 1
    )


def test_nothing_at_all() -> None:
    found = analyse([])
    assert (found.peak.num_bytes, found.timeline, found.num_steps, found.reuse.percentile(50)) == (
        0,
        [],
        0,
        0.0,
    )


@given(st.randoms(use_true_random=False), st.integers(0, 12))
def test_equals_slow_ones(random: Random, num_steps: int) -> None:
    spans = list(random_spans(random, num_steps))
    found, all_lives = analyse(iter(spans)), list(lives(spans))
    events = [event for one in spans for event in one.events]
    live = 0
    most = 0
    for event in events:
        live += {M: event.num_bytes, F: -event.num_bytes}.get(event.what, 0)
        most = max(most, live)
    assert found.peak.num_bytes == most == sum(found.peak.by_category.values())
    assert sum(found.peak.by_layer.values()) == found.peak.by_category.get(Category.ACTIVATIONS, 0)
    assert max((sum(point.values()) for _, point in found.timeline), default=0) == most
    times = [
        b.time - a.time
        for life in all_lives
        for a, b in zip(life.accesses, life.accesses[1:], strict=False)
        if b.time > a.time
    ]
    assert found.intervals.distribution.count == len(times)
    assert found.intervals.distribution.total == pytest.approx(sum(times))
    products = sorted(
        (b.time - a.time) * life.num_bytes
        for life in all_lives
        for a, b in zip(life.accesses, life.accesses[1:], strict=False)
    )
    assert [one.seconds * one.life.num_bytes for one in found.intervals.outliers] == pytest.approx(
        [product for product in reversed(products) if product]
    )
    assert sorted(slow_reuse(events)) == pytest.approx(
        sorted(values_of(found.reuse, slow_reuse(events)))
    )
    assert {category: totals.num_blocks for category, totals in found.breakdown.items()} == Counter(
        life.category for life in all_lives
    )
    assert sum(totals.accesses for totals in found.breakdown.values()) == sum(
        len(life.accesses) for life in all_lives
    )
    for category, lifetimes in found.lifetimes.items():
        ended = [
            life.died - life.born
            for life in all_lives
            if life.category is category and life.died is not None
        ]
        assert (lifetimes.count, lifetimes.total) == (len(ended), pytest.approx(sum(ended)))
    plain = [
        point
        for i, point in enumerate(found.timeline)
        if point[1] is not found.peak.by_category or most == 0
    ]
    assert plain == slow_timeline(spans)


def values_of(distribution: Distribution, expected: list[int]) -> list[int]:
    """The expected values, if the distribution has their count, sum, ends and number of zeros."""
    assert (distribution.count, distribution.total) == (len(expected), sum(expected))
    assert distribution.zeros == expected.count(0)
    assert not expected or (distribution.least, distribution.most) == (min(expected), max(expected))
    return expected


def slow_reuse(events: list[MemoryEvent]) -> list[int]:
    found = []
    sizes = {}
    since: dict[int, set[int]] = {}
    for event in events:
        if event.what is M:
            sizes[event.block] = event.num_bytes
        elif event.what is F:
            since.pop(event.block, None)
        else:
            if event.block in since:
                found.append(sum(sizes[block] for block in since[event.block] - {event.block}))
            for others in since.values():
                others.add(event.block)
            since[event.block] = set()
    return found


def slow_timeline(spans: list[Span]) -> list[tuple[float, dict[Category, int]]]:
    """Bytes alive after each action: every block's category looked up among whole lives."""
    category = {life.block: life.category for life in lives(spans)}
    living: dict[int, int] = {}
    points = []
    for one in spans:
        for event in one.events:
            if event.what is M:
                living[event.block] = event.num_bytes
            elif event.what is F:
                del living[event.block]
        sums: dict[Category, int] = defaultdict(int)
        for block, num_bytes in living.items():
            sums[category[block]] += num_bytes
        points.append((one.end, {name: total for name, total in sums.items() if total}))
    return points


@pytest.mark.parametrize("most", [4, 8, 16])
@given(random=st.randoms(use_true_random=False), num_steps=st.integers(1, 12))
def test_a_long_timeline_is_thinned(most: int, random: Random, num_steps: int) -> None:
    spans = list(random_spans(random, num_steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behaviour, "MOST_POINTS", most)
        found = analyse(spans)
    assert len(found.timeline) <= most
    every = slow_timeline(spans)
    points = [point for point in found.timeline if point[1] is not found.peak.by_category]
    assert all(point in every for point in points)
    assert points[-1:] == every[-1:]
    if found.peak.num_bytes:
        assert (found.peak.time, found.peak.by_category) in found.timeline


@given(st.lists(st.floats(1e-9, 1e9), min_size=1), st.sampled_from([1, 10, 50, 90, 99, 100]))
def test_percentiles_are_near(values: list[float], percent: int) -> None:
    found = Distribution()
    for value in values:
        found.add(value)
    exact = sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]
    assert found.percentile(percent) == pytest.approx(exact, rel=0.01)
    assert found.mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "2bw", "pipedream"])
def test_steps_of_a_schedule_repeat(name: str) -> None:
    """Also where actions of several steps come by turns, and versions differ within a step."""
    sizes = PipelineShape(4, 4, 2 if name == "interleaved" else 1)
    found = analyse(Rank(name, sizes, num_batches=6).spans())
    assert found.num_steps == 6
    assert found.stable_from is not None
    assert found.stable_from <= (2 if name in ("1f1b", "interleaved") else 3)
    assert found.stable_until in (5, 6)
    assert found.changes[0] == 2  # the first step makes what is there before


def test_changes_from_step_to_step() -> None:
    def steps(*sizes: int) -> Iterator[Span]:
        for i, size in enumerate(sizes):
            yield span(i + 1, f"F{i}@0v{i}", i + 1.0, (M, i, size, i + 0.5), (F, i, size, i + 0.6))

    def row(*sizes: int) -> tuple[object, ...]:
        found = analyse(steps(*sizes))
        return found.stable_from, found.stable_until, found.changes

    assert row(1, 1, 1) == (1, 3, ())
    assert row(2, 1, 1) == (2, 3, (2,))
    assert row(1, 2, 3) == (None, None, (2, 3))
    assert row(3, 2, 2, 1, 1, 1, 4) == (4, 6, (2, 4, 7))


@pytest.mark.thorough
def test_ten_thousand_steps_take_little_memory() -> None:
    def spans() -> Iterator[Span]:
        events = [MemoryEvent(M, i, 1000, "", 0.0, name="weights 0") for i in range(3)]
        yield Span(1, "", 0.0, 0.0, events)
        for i in range(10_000):
            events = [
                MemoryEvent(R, block, 1000, "aten::mm", i + 0.1 * block) for block in range(3)
            ]
            events += [
                MemoryEvent(what, i + 3, 8 + i % 50, "aten::mm", i + 0.5) for what in (M, W, R, F)
            ]
            yield Span(i + 1, f"F{i}@0v{i}", float(i), i + 0.9, events)

    tracemalloc.start()
    found = analyse(spans())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.num_steps == 10_000
    assert most < 12e6
