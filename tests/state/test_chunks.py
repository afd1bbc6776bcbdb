"""Chunks cover a layout in order, and no block is cut; a buffer of several is used as one of one."""

from __future__ import annotations

import pytest
import torch

from hybridpar.state.chunks import Buffer, Chunk, Location, block_of, cut
from hybridpar.state.layout import FlatLayout

NAMES = ["blocks.0.tokens.weight", *(f"blocks.{n}.{part}" for n in range(4) for part in ("norm", "bias")),
         *(f"blocks.{n}.weight" for n in range(4))]
LAYOUT = FlatLayout(NAMES, [(40,)] * 9 + [(7, 30)] * 4, torch.float32)
CPU = torch.device("cpu")


def test_blocks_of_names() -> None:
    assert [block_of(name) for name in ("blocks.12.mlp.up.weight", "blocks.x.y", "weight")] == [12, -1, -1]


@pytest.mark.parametrize("chunk_bytes", [1, 700, 2000, 10**9])
def test_cuts_lie_between_blocks(chunk_bytes: int) -> None:
    chunks = cut(LAYOUT, chunk_bytes)
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == LAYOUT.numel
    blocks = dict(zip(LAYOUT.offsets, map(block_of, NAMES), strict=True))
    offsets = [*LAYOUT.offsets, LAYOUT.numel]
    for chunk in chunks[:-1]:
        before = offsets[offsets.index(chunk.stop) - 1]
        assert blocks[before] != blocks[chunk.stop]
        assert 4 * (chunk.stop - chunk.start) >= chunk_bytes
    assert len(chunks) == {1: 8, 700: 6, 2000: 2, 10**9: 1}[chunk_bytes]


def test_an_empty_layout_is_one_chunk_of_nothing() -> None:
    empty = FlatLayout([], [], torch.float32)
    assert cut(empty, 1) == ()
    assert Buffer(empty, torch.float32, CPU).chunks == (Chunk(0, 0),)


def test_a_buffer_in_chunks() -> None:
    chunks = cut(LAYOUT, 700)
    whole, parts = Buffer(LAYOUT, torch.float32, CPU), Buffer(LAYOUT, torch.float32, CPU, chunks, Location.SHARDED)
    assert whole.places == [Location.DEVICE]
    assert parts.places == [Location.SHARDED] * len(chunks)
    assert whole.nbytes == parts.nbytes == 4 * LAYOUT.numel
    for i, view in enumerate(whole.views().values()):
        view.fill_(i)
    parts.copy_(whole)
    assert all(torch.equal(view, whole.views()[name]) for name, view in parts.views().items())
    with pytest.raises(AssertionError, match="not in one chunk"):
        parts[chunks[0].stop - 1 : chunks[0].stop + 1]
