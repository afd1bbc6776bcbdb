"""Products of several layers with rows of one tensor are the products of each layer by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engines import gpt, start
from torch import Tensor
from torch.nn import functional as F

from hybridpar.grid import Axis
from hybridpar.nn import grouped
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


def flat_layers(
    sizes: tuple[int, int], device: str = "cpu", gap: int = 8
) -> list[ColumnParallelLinear]:
    """Layers whose weights lie in one buffer, `gap` elements between two of them."""
    torch.manual_seed(1)
    inputs, outputs = sizes
    made = [
        ColumnParallelLinear(
            inputs, outputs, Axis("tp"), bias=False, device=device, dtype=torch.bfloat16
        )
        for _ in COUNTS
    ]
    step = inputs * outputs + gap
    buffer = torch.randn(len(made) * step).to(device, torch.bfloat16)
    for number, layer in enumerate(made):
        part = buffer[number * step : number * step + inputs * outputs]
        layer.weight.data = part.view(outputs, inputs)
    return made


def forward_and_backward(group: list[ColumnParallelLinear]) -> list[Tensor]:
    """The output, and the gradients of the rows and the weights."""
    weights = [layer.weight for layer in group]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(COUNTS), weights[0].shape[1], generator=generator)
    x = x.to(weights[0]).requires_grad_()
    y = grouped_linear(x, COUNTS, group)
    dy = torch.randn(y.shape, generator=generator).to(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], dy)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Results of `grouped_mm`, which the CPU takes too, as if it had the kernel."""
    results: list[Tensor] = []
    original = F.grouped_mm

    def noted(*args: Any, **options: Any) -> Tensor:
        results.append(original(*args, **options))
        return results[-1]

    monkeypatch.setattr(F, "grouped_mm", noted)
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda x: True)
    return results


def test_one_kernel_has_the_products_of_all(
    calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = flat_layers((16, 24))
    got = forward_and_backward(group)
    assert len(calls) == 2, "the output and the gradient of the rows"
    assert torch.equal(calls[0], got[0])
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda x: False)
    for a, b in zip(got, forward_and_backward(group), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("sizes", "gap"), [((12, 24), 8), ((16, 20), 8), ((16, 24), 4)], ids=["in", "out", "gap"]
)
def test_unaligned_weights_take_a_product_each(
    sizes: tuple[int, int], gap: int, calls: list[Tensor]
) -> None:
    forward_and_backward(flat_layers(sizes, gap=gap))
    assert not calls


def test_no_rows_take_no_kernel(calls: list[Tensor]) -> None:
    """A rank of ep may get no token."""
    group = flat_layers((16, 24))
    x = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    y = grouped_linear(x, [0] * len(group), group)
    assert y.shape == (0, 24)
    y.sum().backward()
    assert x.grad is not None
    assert not calls


def test_weights_of_their_own_memory_take_a_product_each(calls: list[Tensor]) -> None:
    forward_and_backward(layers(torch.bfloat16))
    group = flat_layers((16, 24))
    group[3].weight.data = group[3].weight.data.clone()
    forward_and_backward(group)
    group = flat_layers((16, 24))
    group[0], group[1] = group[1], group[0]
    forward_and_backward(group)
    assert not calls


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_experts_of_a_training_lie_in_one_buffer(
    schedule: str, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, three micro-batches, two batches: both products forward and both backward."""
    experts = {"num_experts": 4, "router_topk": 2, "expert_ffn_hidden_size": 32}
    sections: dict[str, Any] = {
        "model": experts,
        "parallel": {"dp": 1},
        "pipeline": {"num_microbatches": 3, "schedule": schedule},
        "train": {"dtype": "bf16"},
    }

    def losses() -> list[float]:
        engine, loader = start(gpt((2, 64, 4, 16, 37), sections))
        steps: list[float] = []
        engine.train(loader, 2, lambda step: steps.append(step.loss))
        return steps

    got = losses()
    assert len(calls) == 2 * 3 * 2 * 4
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda x: False)
    assert got == pytest.approx(losses(), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_it_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    group = flat_layers((64, 40), "cuda")
    got = forward_and_backward(group)
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda x: False)
    for a, b in zip(got, forward_and_backward(group), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
