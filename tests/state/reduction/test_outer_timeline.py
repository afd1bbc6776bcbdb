"""When fragments are exchanged: each once every so many versions, one at a time, by the number of
the version alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import OuterConfig
from hybridpar.state.reduction.outer_timeline import OuterTimeline, fragment_of


@st.composite
def timelines(draw: st.DrawFn) -> OuterTimeline:
    every = draw(st.integers(1, 12))
    fragments = draw(st.integers(1, every))
    delay = draw(st.integers(0, every // fragments))
    settings = OuterConfig(every=every, fragments=fragments, delay=delay)
    return OuterTimeline(settings, draw(st.integers(0, 20)))


@given(timelines())
def test_each_fragment_leaves_once_and_is_taken_before_the_next(timeline: OuterTimeline) -> None:
    start = timeline.since + 1
    left = [timeline.leaving(v) for v in range(start, start + timeline.settings.every)]
    assert sorted(f for f in left if f is not None) == list(range(timeline.settings.fragments))
    under_way = None
    for version in range(1, timeline.since + 4 * timeline.settings.every):
        taken = timeline.taken(version)
        leaving = timeline.leaving(version)
        if timeline.settings.delay == 0:
            assert taken == leaving
            assert timeline.under_way(version) is None
            continue
        if taken is not None:
            assert taken == under_way
            under_way = None
        if leaving is not None:
            assert version > timeline.since
            assert under_way is None
            under_way = leaving
        assert timeline.under_way(version) == under_way


@given(timelines(), st.integers(0, 50))
def test_sites_have_the_same_weights_only_where_all_is_taken_at_once(
    timeline: OuterTimeline, version: int
) -> None:
    at_once = timeline.settings.fragments == 1 and timeline.settings.delay == 0
    expected = version <= timeline.since or (at_once and version % timeline.settings.every == 0)
    assert timeline.is_common(version) == expected
    ahead = timeline.next_common(version)
    if version >= timeline.since:
        assert ahead == (
            (version // timeline.settings.every + 1) * timeline.settings.every if at_once else None
        )
        mixed = replace(timeline, settings=replace(timeline.settings, mix=0.5))
        assert mixed.next_common(version) is None


def test_a_fragment_has_every_so_many_th_block_and_tied_weights_together() -> None:
    assert [fragment_of(f"blocks.{n}.x", "", 3) for n in range(5)] == [0, 1, 2, 0, 1]
    assert fragment_of("blocks.4.head", "embedding", 3) == 0
