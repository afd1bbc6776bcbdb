"""The products of linear layers: equal to torch's; the weight's gradient is added in place where
the leaf allows it."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import ParallelMLP, matmul
from hybridpar.nn.binding import UNBOUND, ParameterBinding
from hybridpar.nn.linear import column_linear
from hybridpar.state import GradientAccumulator
from hybridpar.state.layout import FlatLayout

AXIS = Axis("tp")


def pair(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, dtype=dtype)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (1,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equal_to_torch(dtype: torch.dtype, batch: tuple[int, ...], with_bias: bool) -> None:
    (x, x_ref), (w, w_ref), (b, b_ref) = pair(dtype, *batch, 5), pair(dtype, 7, 5), pair(dtype, 7)
    y = column_linear(x, w, b if with_bias else None, AXIS)
    y_ref = F.linear(x_ref, w_ref, b_ref if with_bias else None)
    torch.testing.assert_close(y, y_ref)
    (y * y).sum().backward()
    (y_ref * y_ref).sum().backward()
    for mine, theirs in ((x, x_ref), (w, w_ref), *([(b, b_ref)] if with_bias else [])):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adds_in_place(dtype: torch.dtype) -> None:
    """The buffer stays the buffer, hooks run once in each backward, also where the weight has
    another use."""
    w, w_ref = pair(dtype, 7, 5)
    accumulator = GradientAccumulator(FlatLayout({"w": (7, 5)}, dtype))
    flat = accumulator.buffers[0].tensors[0][:35]
    flat.fill_(float("nan"))
    accumulator.begin(0)
    accumulator.bind({"w": w}, 0)
    calls: list[bool] = []
    w.register_post_accumulate_grad_hook(
        lambda leaf: calls.append(torch.equal(leaf.grad, w_ref.grad))
    )
    ids = torch.tensor([0, 6, 6])
    bound = ParameterBinding(accumulator.consumer("w"))
    for i in range(1, 4):
        for weight, binding in ((w_ref, UNBOUND), (w, bound)):
            x = F.embedding(ids, weight)
            y = column_linear(x, weight, None, AXIS, binding=binding)[:, :5]
            column_linear(y, weight, None, AXIS, binding=binding).square().sum().backward()
        torch.testing.assert_close(flat.view(7, 5), w_ref.grad)
        assert len(calls) == i
        assert w.grad.data_ptr() == flat.data_ptr()


def mlp(dtype: torch.dtype) -> Tensor:
    grid = ProcessGrid(tp=2)
    layer = ParallelMLP(8, 12, grid.tp, dtype=dtype)
    for p in layer.parameters():
        torch.nn.init.constant_(p, 0.25)
    x = torch.linspace(-1, 1, 48, dtype=dtype).view(2, 3, 8).requires_grad_()
    layer(x).square().sum().backward()
    return x.grad


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_split_in_working_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Column then row in the precisions that training uses: their products come from other
    libraries than float64's."""
    for result, expected in zip(
        run_ranks(mlp, 2, dtype), run_ranks(mlp, 2, torch.float64), strict=True
    ):
        largest = expected.abs().max().item()
        torch.testing.assert_close(
            result.double(), expected, rtol=tolerance, atol=tolerance * largest
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(3, 11), (1,), (0,)])
def test_products_by_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """A CPU without fast instructions for a type takes float32's products of the same numbers,
    rounded once."""
    monkeypatch.setattr(matmul, "_has_fast_instructions", lambda dtype: dtype == torch.float32)
    inputs = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((*rows, 65), (17, 65), (17,))
    ]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    y = column_linear(*inputs, AXIS)
    y_ref = F.linear(*wide)
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    y_ref.backward(dy.float())
    assert y.dtype == dtype
    torch.testing.assert_close(y, y_ref.to(dtype))
    for x, x_ref in zip(inputs[:2], wide[:2], strict=True):
        torch.testing.assert_close(x.grad, x_ref.grad.to(dtype))


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this build of torch"
)
@pytest.mark.parametrize("rows", [(3, 11), (1,), (0,)])
def test_products_by_onednn(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]) -> None:
    """If oneDNN is the faster one, at any size, numbers are equal, the weight's gradient added in
    blocks of rows."""
    monkeypatch.setattr(matmul, "_onednn", lambda: matmul._OneDNN(1, 1))
    monkeypatch.setattr(matmul, "ONEDNN_BLOCK", 4 * 65)
    inputs = [torch.randn(shape).requires_grad_() for shape in ((*rows, 65), (17, 65), (17,))]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    accumulator = GradientAccumulator(FlatLayout({"w": (17, 65)}, torch.float32))
    accumulator.buffers[0].tensors[0].fill_(float("nan"))
    accumulator.begin(0)
    accumulator.bind({"w": inputs[1]}, 0)
    binding = ParameterBinding(accumulator.consumer("w"))
    for _ in range(2):
        y = column_linear(*inputs, AXIS, binding=binding)
        y_ref = F.linear(*wide)
        dy = torch.randn(17, *y.shape[:-1]).movedim(0, -1)  # strided
        y.backward(dy)
        y_ref.backward(dy.double())
        torch.testing.assert_close(y, y_ref.float())
    for x, x_ref in zip(inputs, wide, strict=True):
        torch.testing.assert_close(x.grad, x_ref.grad.float(), rtol=1e-5, atol=1e-4)
    w = torch.randn(17, 65, requires_grad=True)
    column_linear(torch.ones(*rows, 65), w, None, AXIS).sum().backward()  # without a buffer
    torch.testing.assert_close(w.grad, torch.full((17, 65), float(torch.Size(rows).numel())))


@pytest.mark.parametrize("shape", [(7, 5), (23,), (3, 40)])
def test_gradients_of_another_type_are_added_in_blocks(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.randn(shape)
    part = torch.randn(shape).bfloat16()
    expected = total + part
    added = list[int]()
    monkeypatch.setattr(matmul, "ADD_BLOCK", 10)
    real = Tensor.add_
    monkeypatch.setattr(
        Tensor, "add_", lambda self, other: (added.append(other.numel()), real(self, other))[1]
    )
    matmul.add_(total, part)
    assert torch.equal(total, expected)
    assert sum(added) == part.numel()
    assert max(added) <= max(10, part[0].numel())
