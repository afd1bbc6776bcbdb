"""The modelled caching allocator, by hand and against a slow one."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_behaviour.traces import random_spans

from hybridpar.memory_behaviour.analysis import fragmentation
from hybridpar.memory_behaviour.analysis.fragmentation import replay
from hybridpar.memory_behaviour.events import MemoryEvent, What

KIB = 1 << 10
MIB = 1 << 20


def events(*steps: int) -> list[MemoryEvent]:
    """A malloc of so many bytes for each positive number; -1 frees the first of them, -2 the
    second, .."""
    sizes = [size for size in steps if size >= 0]
    made = []
    count = 0
    for step in steps:
        block = count if step >= 0 else -step - 1
        made.append(
            MemoryEvent(What.MALLOC if step >= 0 else What.FREE, block, sizes[block], "", 0.0)
        )
        count += step >= 0
    return made


@pytest.mark.parametrize(
    ("steps", "reserved", "live"),
    [
        ((), 0, 0),
        ((0,), 0, 0),
        ((1,), 2 * MIB, 1),
        ((MIB, MIB), 2 * MIB, 2 * MIB),  # two in a small segment
        ((MIB, MIB, 1), 4 * MIB, 2 * MIB + 1),
        ((MIB + 1,), 20 * MIB, MIB + 1),  # the first large one
        (
            (10 * MIB - 512, 10 * MIB - 512),
            20 * MIB,
            20 * MIB - 1024,
        ),  # split: more than 1 MiB is left
        ((10 * MIB,), 10 * MIB, 10 * MIB),  # its own segment
        ((11 * MIB + 1,), 12 * MIB, 11 * MIB + 1),
        (
            (20 * MIB, -1, 19 * MIB, MIB + 512),
            40 * MIB,
            20 * MIB + 512,
        ),  # 1 MiB left over is not split off
        ((20 * MIB, -1, 18 * MIB, 2 * MIB), 20 * MIB, 20 * MIB),  # 2 MiB are
        (
            (1024 * KIB, 512, -1, 512 * KIB, 512 * KIB),
            2 * MIB,
            MIB + 512,
        ),  # freed, cut in two and used again
        ((512 * KIB, 512 * KIB, 512 * KIB, -1, -2, MIB), 2 * MIB, 3 * 512 * KIB),  # neighbours join
        (
            (512 * KIB, 512 * KIB, 512 * KIB, 512 * KIB, -1, -3, MIB),
            4 * MIB,
            2 * MIB,
        ),  # these are none
        ((12 * MIB, 14 * MIB, -1, -2, 11 * MIB, 13 * MIB), 26 * MIB, 26 * MIB),  # best fit
    ],
)
def test_known_answers(steps: tuple[int, ...], reserved: int, live: int) -> None:
    usage = replay(events(*steps))
    assert (usage.reserved, usage.largest_live, usage.fits) == (reserved, live, True)


def test_the_sizes_are_those_of_the_torch_that_is_installed() -> None:
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.is_file():
        pytest.skip("no headers are installed")
    found = {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+);", header.read_text())}
    assert found["kMinBlockSize"] == fragmentation.ROUND
    assert found["kSmallSize"] == fragmentation.SMALL
    assert found["kSmallBuffer"] == fragmentation.SMALL_SEGMENT
    assert found["kMinLargeAlloc"] == fragmentation.LEAST_OWN_SEGMENT
    assert found["kRoundLarge"] == fragmentation.SEGMENT_STEP
    assert f"large_segment_size_{{{fragmentation.LARGE_SEGMENT}}}" in header.read_text()


def test_under_a_limit_cached_segments_are_given_back() -> None:
    steps = events(30 * MIB, -1, 40 * MIB)
    assert replay(steps).reserved == 70 * MIB
    assert replay(steps, 50 * MIB).reserved == 40 * MIB
    assert replay(steps, 50 * MIB).fits
    assert not replay(steps, 39 * MIB).fits
    assert not replay(events(30 * MIB, 2 * MIB, -1, 30 * MIB, 20 * MIB), 60 * MIB).fits
    split = events(30 * MIB, -1, 4 * MIB, 40 * MIB)  # the first segment is in use in part
    assert not replay(split, 60 * MIB).fits


@given(st.randoms(use_true_random=False), st.integers(1, 30), st.sampled_from([1, 700, 30_000]))
def test_equals_a_slow_one(random: Random, num_steps: int, scale: int) -> None:
    made = [
        event._replace(num_bytes=event.num_bytes * scale)
        for span in random_spans(random, num_steps)
        for event in span.events
    ]
    usage = replay(made)
    assert (usage.reserved, usage.largest_live) == slow(made)
    assert usage.reserved >= usage.largest_live


def slow(made: list[MemoryEvent]) -> tuple[int, int]:
    """Segments as lists of pieces [size, block or None], searched from end to end."""
    segments: list[tuple[bool, list[list]]] = []
    reserved = live = largest = 0
    for event in made:
        if event.what not in (What.MALLOC, What.FREE) or not event.num_bytes:
            continue
        if event.what is What.FREE:
            live -= event.num_bytes
            for _, pieces in segments:
                for piece in pieces:
                    if piece[1] == event.block:
                        piece[1] = None
                at = 0
                while at + 1 < len(pieces):
                    if pieces[at][1] is None and pieces[at + 1][1] is None:
                        pieces[at][0] += pieces.pop(at + 1)[0]
                    else:
                        at += 1
            continue
        live += event.num_bytes
        largest = max(largest, live)
        size = (event.num_bytes + 511) // 512 * 512
        small = size <= MIB
        free = [
            (piece[0], i, j)
            for i, (is_small, pieces) in enumerate(segments)
            if is_small == small
            for j, piece in enumerate(pieces)
            if piece[1] is None and piece[0] >= size
        ]
        if free:
            _, i, j = min(free)
        else:
            whole = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            segments.append((small, [[whole, None]]))
            reserved += whole
            i = len(segments) - 1
            j = 0
        pieces = segments[i][1]
        left = pieces[j][0] - size
        if left >= 512 if small else left > MIB:
            pieces[j][0] = size
            pieces.insert(j + 1, [left, None])
        pieces[j][1] = event.block
    return reserved, largest
