"""Adapters of split linear layers: equal to the merged weight's mathematics on whole tensors, for
every tp."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import TOLERANCE, check_gradients, fill, leaf, traffic, values
from torch.nn import functional as F

from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import ColumnParallelLinear, RowParallelLinear
from hybridpar.nn.linear import AdaptableLinear
from hybridpar.nn.placement import Shard, split_sizes
from hybridpar.nn.recomputable import recomputable

F64 = torch.float64
SCALE = 5 / 2
SHARED = Shard(0, (((0, 4),), ((2, 7),)))
"""Rows of two ranks, of which both hold 2 and 3."""


def adapted(layer: AdaptableLinear, axis: Axis) -> dict[str, torch.Tensor]:
    """Gives a layer an adapter and freezes the rest; returns whole tensors as leaves."""
    layer.add_adapter(2, 5.0)
    whole = fill(layer, axis)
    for name in ("weight", "bias"):
        layer.get_parameter(name).requires_grad_(False)
        layer.placements.pop(name)
        whole[name].requires_grad_(False)
    return whole


def merged(x: torch.Tensor, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = whole["weight"] + SCALE * whole["lora_B"] @ whole["lora_A"]
    return F.linear(x, weight, whole["bias"])


def check(layer: AdaptableLinear, whole: dict[str, torch.Tensor], axis: Axis) -> None:
    frozen = {name: layer._parameters.pop(name) for name in ("weight", "bias")}
    check_gradients(layer, whole, axis)
    assert all(parameter.grad is None for parameter in frozen.values())


def column(axis: Axis, shared: bool, gives_input_gradient: bool) -> None:
    shard = SHARED if shared and axis.size > 1 else None
    layer = ColumnParallelLinear(5, 7, axis, shard=shard, dtype=F64)
    rows = (shard or Shard.even(0, 7, axis.size)).index(axis.rank)
    whole = adapted(layer, axis)
    x = values("x", 3, 4, 5).requires_grad_(gives_input_gradient)
    x_ref = x.detach().clone().requires_grad_(gives_input_gradient)
    dy = values("dy", 3, 4, 7)
    dy_local = dy[..., rows]
    if shared and axis.size > 1:  # each rank has a part of the gradient of rows that both hold
        dy_local = dy_local / SHARED.holders(7)[rows]
    with traffic(axis, all_reduce=int(gives_input_gradient)):
        y = layer(x)
        y.backward(dy_local)
    y_ref = merged(x_ref, whole)
    torch.testing.assert_close(y, y_ref[..., rows], **TOLERANCE)
    y_ref.backward(dy)
    if gives_input_gradient:
        torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y, **TOLERANCE)
    check(layer, whole, axis)


def row(axis: Axis) -> None:
    layer = RowParallelLinear(7, 5, axis, input_is_parallel=False, dtype=F64)
    whole = adapted(layer, axis)
    x = leaf("x", 3, 4, 7)
    x_ref = leaf("x", 3, 4, 7)
    with traffic(axis, all_reduce=1, all_gather=1):
        y = layer(x)
        y.backward(values("dy", *y.shape))
    y_ref = merged(x_ref, whole)
    torch.testing.assert_close(y, y_ref, **TOLERANCE)
    y_ref.backward(values("dy", *y.shape))
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y, **TOLERANCE)
    check(layer, whole, axis)


def sequence(axis: Axis, recomputes: bool) -> None:
    """A column and a row layer with parts of the sequence: five collectives, as without adapters,
    and a small reduce-scatter."""
    up = ColumnParallelLinear(5, 7, axis, dtype=F64)
    down = RowParallelLinear(7, 5, axis, sequence=axis.size > 1, dtype=F64)
    wholes = [adapted(layer, axis) for layer in (up, down)]
    sizes = split_sizes(5, axis.size)
    part = slice(sum(sizes[: axis.rank]), sum(sizes[: axis.rank + 1]))
    x_ref = leaf("x", 2, 5, 5)
    x = x_ref.detach()[:, part].clone().requires_grad_()
    given = recomputable(2 * x, lambda: 2 * x.detach()) if recomputes else 2 * x
    with traffic(axis, all_gather=2, reduce=3 * axis.size):
        y = down(up(given, sizes), sizes)
        y.backward(values("dy", 2, 5, 5)[:, part])
    y_ref = merged(merged(2 * x_ref, wholes[0]), wholes[1])
    torch.testing.assert_close(y, y_ref[:, part], **TOLERANCE)
    y_ref.backward(values("dy", 2, 5, 5))
    torch.testing.assert_close(x.grad, x_ref.grad[:, part], **TOLERANCE)
    for layer, whole in zip((up, down), wholes, strict=True):
        check(layer, whole, axis)


def all_of(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for gives_input_gradient in (True, False):
        column(axis, tp == 2, gives_input_gradient)
        column(axis, False, gives_input_gradient)
    row(axis)
    for recomputes in (False, True):
        sequence(axis, recomputes)


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_an_adapter_is_its_merged_weight(tp: int) -> None:
    run_ranks(all_of, tp, tp)


def test_a_layer_of_its_own_precision() -> None:
    layer = ColumnParallelLinear(8, 6, Axis("tp"), bias=False, dtype=torch.bfloat16)
    layer.add_adapter(4, 4.0)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert not layer.placements["lora_B"].init.std
    assert layer.placements["lora_A"].init.std == pytest.approx((3 * 8) ** -0.5)
