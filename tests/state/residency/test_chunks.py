"""Chunks cover a layout in order, each of one use; a buffer of several is used as one of one."""

from __future__ import annotations

import pytest
import torch

from hybridpar.state.layout import FlatLayout
from hybridpar.state.residency.chunks import (
    EMPTY,
    WHOLE,
    Buffer,
    BufferUsage,
    Chunk,
    Memory,
    block_of,
    cut,
)

NAMES = [
    "blocks.0.tokens.weight",
    *(f"blocks.{n}.{part}" for n in range(4) for part in ("norm", "bias")),
    *(f"blocks.{n}.weight" for n in range(4)),
]
LAYOUT = FlatLayout(
    {name: (7, 30) if name in NAMES[9:] else (40,) for name in NAMES}, torch.float32
)


def test_blocks_of_names() -> None:
    assert [block_of(name) for name in ("blocks.12.mlp.up.weight", "blocks.x.y", "weight")] == [
        12,
        -1,
        -1,
    ]


def pairs(name: str) -> BufferUsage:
    """Two blocks are a part; norms and biases stay."""
    part = block_of(name) // 2
    return (
        BufferUsage((0, 1), stays=True)
        if name.endswith(("norm", "bias"))
        else BufferUsage((part,), part)
    )


def test_neighbours_of_equal_use_are_a_chunk() -> None:
    chunks = cut(LAYOUT, pairs)
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == LAYOUT.numel
    assert [c.use for c in chunks] == [
        pairs(name) for name in (NAMES[0], NAMES[1], NAMES[9], NAMES[11])
    ]
    assert [c.start for c in chunks] == [LAYOUT.ranges[NAMES[i]][0] for i in (0, 1, 9, 11)]
    assert cut(LAYOUT, lambda name: WHOLE) == (Chunk(0, LAYOUT.numel),)


def test_an_empty_layout_is_one_chunk_of_nothing() -> None:
    empty = FlatLayout({}, torch.float32)
    assert cut(empty, pairs) == (EMPTY,)
    assert Buffer(empty, torch.float32, Memory()).chunks == (Chunk(0, 0),)


def test_a_buffer_in_chunks() -> None:
    chunks = cut(LAYOUT, pairs)
    whole, parts = (
        Buffer(LAYOUT, torch.float32, Memory()),
        Buffer(LAYOUT, torch.float32, Memory(), chunks),
    )
    assert whole.nbytes == parts.nbytes == 4 * LAYOUT.numel
    assert parts.group(0) == [0, 1, 2]
    for i, view in enumerate(whole.views().values()):
        view.fill_(i)
    for number in range(len(chunks)):
        parts.take(whole, number)
    assert all(torch.equal(view, whole.views()[name]) for name, view in parts.views().items())
    with pytest.raises(AssertionError, match="not in one chunk"):
        parts[chunks[0].stop - 1 : chunks[0].stop + 1]
