"""Passes of blocks beside which state comes and goes: what moves, and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from planner import made

from hybridpar.config import Config
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.planner.measuring.bench import Bench
from hybridpar.planner.measuring.overlap_bench import Gathers, InFile, Shared, Sums
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.state.residency.store import padded

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(made.config(tie_embeddings=False), 1, Axis("tp"), CPU)


@pytest.mark.parametrize(("make", "op", "times"), [(Gathers, "broadcast", 2), (Sums, "reduce", 1)])
def test_every_blocks_chunk_is_gathered_twice_or_summed_once(
    bench: Bench,
    make: Callable[[Config, Sequence[int], ProcessGrid], Shared],
    op: str,
    times: int,
) -> None:
    grid = ProcessGrid.of(silent_axis("dp", 2))
    shared = make(bench.config, bench.numbers, grid)
    chunks = [chunk for of_block in shared.chunks for chunk in of_block]
    assert len(shared.chunks) == len(bench.units)
    assert all(shared.chunks)
    shared.before(0, None, backward=False)
    first = grid.dp.traffic.num_bytes[op]
    bench.a_pass(shared)
    shared.end()
    moved = grid.dp.traffic.num_bytes[op]
    assert moved == times * sum(chunk.num_bytes for chunk in chunks)
    assert moved - first == shared.num_bytes
    assert not any(chunk.is_here for chunk in chunks)


@pytest.mark.parametrize("changed", [False, True])
def test_items_come_and_what_was_changed_leaves(
    bench: Bench, changed: bool, tmp_path: Path
) -> None:
    sizes = [unit.num_parameters * 4 for unit in bench.units]
    file = InFile(tmp_path, sizes, changed=changed)
    try:
        traffic = file.tiers.traffic
        written = traffic.written
        file.before(0, None, backward=False)
        read = traffic.read
        bench.a_pass(file)
        file.end()
        assert traffic.read - read == file.num_bytes
        assert traffic.written - written == (file.num_bytes + padded(sizes[0])) * changed
        assert all(map(file.tiers.is_absent, range(len(sizes))))
        assert traffic.peak <= file.tiers.budget
    finally:
        file.tiers.close()
