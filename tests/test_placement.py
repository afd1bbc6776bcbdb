"""Splits, shards and placements: together the parts are the whole, and every element has exactly
one owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybridpar import ColumnParallelLinear, Dropout
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.nn import (
    Init,
    ParallelModule,
    Placement,
    Shard,
    named_placements,
    split_ranges,
    split_sizes,
)
from hybridpar.nn.placement import has_shared_rows

NORMAL = Init("normal", 0.02)


@st.composite
def shards(draw: st.DrawFn) -> tuple[int, Shard]:
    """A dimension and any split of it that covers it: several ranges a rank, overlaps, empty ranks,
    any order."""
    cuts = sorted(draw(st.sets(st.integers(1, 11), max_size=5)))
    size = draw(st.integers(cuts[-1] if cuts else 1, 12))
    pieces = [r for r in zip([0, *cuts], [*cuts, size], strict=True) if r[0] < r[1]]
    num_ranks = draw(st.integers(1, 5))
    held: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for piece in draw(st.permutations(pieces)):
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
            held[rank].append(piece)
    return size, Shard(draw(st.integers(0, 2)), tuple(map(tuple, held)))


def placement_of(size: int, shard: Shard) -> Placement:
    return Placement((*(2, 3)[: shard.dim], size, *(2, 3)[shard.dim :]), NORMAL, shard)


@given(st.integers(0, 100), st.integers(1, 20))
def test_split(size: int, parts: int) -> None:
    sizes = split_sizes(size, parts)
    ranges = split_ranges(size, parts)
    assert len(sizes) == parts
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(size))
    assert tuple(b - a for a, b in ranges) == sizes
    shard = Shard.even(0, size, parts)
    assert [shard.local_size(r) for r in range(parts)] == list(sizes)
    assert not len(Placement((size,), NORMAL, shard).shared_index())


@given(shards())
def test_parts_make_the_whole(case: tuple[int, Shard]) -> None:
    size, shard = case
    placement = placement_of(size, shard)
    full = torch.arange(6.0 * size).view(placement.shape)
    parts = [placement.take(full, r) for r in range(len(shard.ranges))]
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == placement.local_shape(rank)
    assert torch.equal(placement.assemble(parts), full)


@given(shards())
def test_every_slice_has_one_owner(case: tuple[int, Shard]) -> None:
    size, shard = case
    ranks = range(len(shard.ranges))
    held = torch.cat([shard.index(r) for r in ranks])
    assert shard.holders(size).tolist() == torch.bincount(held, minlength=size).tolist()
    owned = torch.cat([shard.index(r)[shard.owned(r, size)] for r in ranks])
    assert sorted(owned.tolist()) == list(range(size))
    shared = placement_of(size, shard).shared_index()
    assert shared.tolist() == [i for i in range(size) if (held == i).sum() > 1]
    assert has_shared_rows(placement_of(size, shard)) == bool(len(shared))


@given(shards())
def test_how_it_is_held_along_every_axis(case: tuple[int, Shard]) -> None:
    size, shard = case
    split = placement_of(size, shard)
    other = replace(split, shard=replace(shard, axis="ep"), tied="word", partial=("tp",))
    assert [split.along(axis).value for axis in ("pp", "dp", "tp", "x")] == [
        "sharded",
        "partial",
        "sharded",
        "replicated",
    ]
    assert [other.along(axis).value for axis in ("pp", "dp", "tp", "ep")] == [
        "partial",
        "partial",
        "partial",
        "sharded",
    ]
    assert (
        split.rank_at({"tp": 3, "ep": 2}),
        other.rank_at({"tp": 3, "ep": 2}),
        other.rank_at({}),
    ) == (3, 2, 0)


def test_replicated() -> None:
    placement = Placement((3, 2), NORMAL)
    full = torch.randn(3, 2)
    assert placement.local_shape(4) == (3, 2)
    assert placement.take(full, 4) is full
    assert placement.assemble([full, full]) is full
    assert not len(placement.shared_index())


def test_take_refuses_another_shape() -> None:
    with pytest.raises(AssertionError, match="expected"):
        Placement((3, 2), NORMAL).take(torch.randn(2, 3), 0)


def test_parameters_are_local_and_placed() -> None:
    module = ParallelModule(Axis("tp", 1, (0, 1, 2), group=object()))
    module.add_parameter(
        "weight",
        Placement((7, 2), NORMAL, Shard.even(0, 7, 3)),
        device="meta",
        dtype=torch.bfloat16,
    )
    assert module.weight.shape == (2, 2)
    assert module.weight.is_meta
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.requires_grad


def test_named_placements() -> None:
    def layer() -> ParallelModule:
        module = ParallelModule(Axis("tp"))
        module.add_parameter("weight", Placement((2,), NORMAL, Shard.even(0, 2, 1)))
        return module

    model = nn.ModuleDict({"a": layer(), "b": nn.Sequential(layer(), nn.Identity())})
    assert [name for name, _, _ in named_placements(model)] == ["a.weight", "b.0.weight"]
    assert all(
        placement.shard is None for _, _, placement in named_placements(model)
    )  # nothing is split over one rank
    model["b"][0].weight = model["a"].weight
    assert [name for name, _, _ in named_placements(model)] == ["a.weight"]
    with pytest.raises(AssertionError, match=r"0\.weight has no placement"):
        list(named_placements(nn.Sequential(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColumnParallelLinear(4, 4, 2), "axis = 2: must be a hybridpar.Axis"),  # type: ignore[arg-type]
        (lambda: Init("x"), "Init.kind = 'x': must be one of normal, zeros"),  # type: ignore[arg-type]
        (lambda: Dropout("x", "name"), "model.dropout = 'x': must be a number"),
    ],
)  # type: ignore[arg-type]
def test_a_layer_refuses_what_cannot_work(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
