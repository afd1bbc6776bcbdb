"""Products of several layers with rows of one tensor are the products of each layer by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hybridpar.grid import Axis
from hybridpar.nn.binding import GradientPart, ParameterBinding
from hybridpar.nn.grouped import grouped_linear
from hybridpar.nn.linear import ColumnParallelLinear
from hybridpar.nn.recomputable import recomputable

COUNTS = [3, 0, 5, 1, 0]


def layers(dtype: torch.dtype) -> list[ColumnParallelLinear]:
    torch.manual_seed(1)
    made = [
        ColumnParallelLinear(7, 6, Axis("tp"), bias=False, device="cpu", dtype=dtype)
        for _ in COUNTS
    ]
    for layer in made:
        torch.nn.init.normal_(layer.weight)
    return made


def rows(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(COUNTS), 7, generator=generator).to(dtype).requires_grad_()


def one_by_one(x: Tensor, group: list[ColumnParallelLinear]) -> Tensor:
    parts = zip(x.split(COUNTS), group, strict=True)
    return torch.cat([F.linear(part, layer.weight) for part, layer in parts])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recomputes", [False, True])
def test_it_is_each_layers_product(dtype: torch.dtype, recomputes: bool) -> None:
    group = layers(dtype)
    weights = [layer.weight for layer in group]
    x = rows(dtype)
    wanted = one_by_one(x.sin(), group)
    dy = torch.randn(wanted.shape).to(dtype)
    want = torch.autograd.grad(wanted, [x, *weights], dy)
    value = x.sin()
    given = recomputable(value, partial(torch.sin, x.detach())) if recomputes else value
    y = grouped_linear(given, COUNTS, group)
    got = torch.autograd.grad(y, [x, *weights], dy)
    tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(y, wanted, **tolerance)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert not got[2].any(), "a layer without rows has a gradient of zero"
    with torch.no_grad():
        assert torch.equal(grouped_linear(given, COUNTS, group), y)


class Taker:
    """Takes the parts of a gradient, in place of autograd."""

    wants_factors = False

    def __init__(self, gradient: Tensor):
        self.gradient = gradient

    def add(self, part: GradientPart, now: bool = False) -> None:
        part.add_to(self.gradient, overwrite=False)


def test_a_consumer_adds_up_its_layers_gradients() -> None:
    group = layers(torch.float64)
    x = rows(torch.float64)
    want = torch.autograd.grad(
        one_by_one(x, group).square().sum(), [layer.weight for layer in group]
    )
    takers = [Taker(torch.zeros_like(layer.weight)) for layer in group]
    for layer, taker in zip(group, takers, strict=True):
        layer.bind_parameter("weight", ParameterBinding(taker))
    for _ in range(2):
        grouped_linear(x, COUNTS, group).square().sum().backward()
    for taker, gradient in zip(takers, want, strict=True):
        torch.testing.assert_close(taker.gradient, 2 * gradient)


def test_frozen_layers_and_constant_rows_have_no_gradient() -> None:
    group = layers(torch.float64)
    for layer in group[:3]:
        layer.weight.requires_grad_(False)
    x = rows(torch.float64)
    grouped_linear(x.detach(), COUNTS, group).sum().backward()
    assert [layer.weight.grad is not None for layer in group] == [False, False, False, True, True]
    for layer in group:
        layer.weight.requires_grad_(False)
    grouped_linear(x, COUNTS, group).sum().backward()
    assert x.grad is not None
