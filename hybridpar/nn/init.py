"""Starting values of parameters: each rank draws its shard alone, equal on every grid to the
bit."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from hybridpar import random
from hybridpar.grid import ALONE, Place
from hybridpar.nn.placement import Placement

_CHUNK = 1 << 20  # numbers drawn at a time: bounds the float64 temporaries


@torch.no_grad()
def initialize(
    named: Iterable[tuple[str, Tensor, Placement]], seed: int, place: Place = ALONE
) -> None:
    """Fill local parameters with their parts of the global values; see `named_placements`.

    The values depend on the seed and the parameter's name (its tied name if it has one). They
    are rounded to float32 first, whatever the type of the parameter, so runs in float64, float32
    and bfloat16 start from one point. For a tensor that has no values none are drawn.

    Args:
        named: Parameters with their names and placements.
        seed: The seed.
        place: Index of this rank on each axis.

    Raises:
        ConfigError: The seed does not fit 64 bits.
    """
    for name, parameter, placement in named:
        rank = placement.rank_at(place)
        expected = placement.local_shape(rank)
        assert tuple(parameter.shape) == expected, (
            f"{name}: placed as {expected}, got {tuple(parameter.shape)}"
        )
        assert not parameter.is_meta, f"{name} has no memory yet"
        if not getattr(parameter, "has_values", True):
            continue
        if placement.init.kind == "normal":
            _fill_normal(parameter, placement, seed, random.site(placement.tied or name), rank)
        elif placement.init.draw is not None:
            parameter.copy_(placement.take(placement.init.draw(seed), rank))
        else:
            parameter.fill_({"zeros": 0.0, "ones": 1.0}[placement.init.kind])


def _fill_normal(parameter: Tensor, placement: Placement, seed: int, site: int, rank: int) -> None:
    """Fill with normal numbers. Each range of a split dimension is a block of rows in the
    flattened global tensor: [outer, part of inner]."""
    shape = placement.shape
    shard = placement.shard
    if shard is None:
        outer = 1
        inner = prod(shape)
        ranges = [(0, prod(shape))]
    else:
        outer = prod(shape[: shard.dim])
        item = prod(shape[shard.dim + 1 :])
        inner = shape[shard.dim] * item
        ranges = [(a * item, b * item) for a, b in shard.ranges[rank]]
    local = parameter.view(outer, -1) if parameter.numel() else parameter.view(outer, 0)
    at = 0
    for a, b in ranges:
        _fill_block(local[:, at : at + b - a], seed, site, placement.init.std, inner, a)
        at += b - a


def _fill_block(block: Tensor, seed: int, site: int, std: float, stride: int, start: int) -> None:
    rows, cols = block.shape
    if not rows or not cols:
        return
    width = min(cols, _CHUNK)
    height = max(1, _CHUNK // width) if width == cols else 1
    for r in range(0, rows, height):
        for c in range(0, cols, width):
            part = block[r : r + height, c : c + width]
            counters = random.CounterBlock(
                part.shape[0], part.shape[1], stride, start + r * stride + c
            )
            values = random.normal(seed, site, counters, torch.float64)
            part.copy_(values.mul_(std).float())
