"""Helpers to compare a layer split over an axis with the same mathematics on whole tensors, in
float64."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.grid import Axis
from hybridpar.nn import named_placements, reduce_shared_gradients

# float64 sums in another order: a few hundred roundings of 1e-16, with room
TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}


def values(name: str, *shape: int) -> Tensor:
    """Equal float64 numbers on every rank, different for every name."""
    return torch.randn(
        shape,
        generator=torch.Generator().manual_seed(zlib.crc32(name.encode())),
        dtype=torch.float64,
    )


def leaf(name: str, *shape: int) -> Tensor:
    return values(name, *shape).requires_grad_()


def fill(module: nn.Module, axis: Axis) -> dict[str, Tensor]:
    """Gives every parameter its part of `values(name)`, and returns the whole ones as leaves."""
    whole = {}
    for name, parameter, placement in named_placements(module):
        whole[name] = leaf(name, *placement.shape)
        with torch.no_grad():
            parameter.copy_(placement.take(whole[name], axis.rank))
    return whole


def gathered(value: Any, axis: Axis) -> list[Any]:
    """The values of all ranks, tensors among them, in the order of the axis."""
    values: list[Any] = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def check_gradients(module: nn.Module, whole: dict[str, Tensor], axis: Axis) -> None:
    """Every local gradient is the part of the whole one; assembled they are it, and its norm is
    counted once."""
    entries = list(named_placements(module))
    reduce_shared_gradients([(p.grad, placement) for _, p, placement in entries], axis)
    for name, parameter, placement in entries:
        expected = whole[name].grad
        grad = parameter.grad
        try:
            torch.testing.assert_close(grad, placement.take(expected, axis.rank), **TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        parts = gathered(grad, axis)
        torch.testing.assert_close(placement.assemble(parts), expected, **TOLERANCE)
        if placement.shard is None:
            counted = grad.square().sum() if axis.rank == 0 else 0.0
        else:
            dim = placement.shard.dim
            owned = placement.shard.owned(axis.rank, placement.shape[dim])
            counted = grad.movedim(dim, 0)[owned].square().sum()
        torch.testing.assert_close(
            sum(gathered(counted, axis)), expected.square().sum(), **TOLERANCE
        )


@contextmanager
def traffic(axis: Axis, **calls: int) -> Iterator[None]:
    """Assert that the code inside makes exactly these calls over the axis (none at all if its size
    is 1)."""
    axis.traffic.clear()
    yield
    expected = {op: n for op, n in calls.items() if n} if axis.size > 1 else {}
    assert dict(axis.traffic.calls) == expected, (
        f"expected {expected}, counted {dict(axis.traffic.calls)}"
    )
