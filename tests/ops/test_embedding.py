"""Rows of an embedding table and their gradients: every backend against float64, and the same bits
with any threads."""

from __future__ import annotations

import pytest
import torch
from ops.places import places
from torch import Tensor

from hybridpar import ops
from hybridpar.grid import Axis
from hybridpar.nn import VocabParallelEmbedding
from hybridpar.nn.binding import ParameterBinding
from hybridpar.state import GradientAccumulator
from hybridpar.state.layout import FlatLayout

TYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
CASES = {  # rows of the table, hidden size, shape of ids, first row, number of ids in all
    "odd": (13, 37, (3, 7), 5, 30),
    "one": (1, 1, (1,), 0, 1),
    "no ids": (4, 8, (0, 3), 0, 4),
    "no rows": (0, 5, (2, 3), 9, 20),
    "all alike": (50, 64, (300,), 0, 1),
    "many": (1000, 33, (4, 67), 500, 2000),
    "few": (3, 70, (2, 90), 1, 5),
    "whole": (40, 9, (50,), None, 40),
}


def make(
    case: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, int | None]:
    rows, h, shape, start, count = CASES[case]
    g = torch.Generator().manual_seed(len(case))
    ids = torch.randint(count, shape, generator=g).to(device)
    weight, dy = (torch.randn(s, generator=g).to(device, dtype) for s in ((rows, h), (*shape, h)))
    return ids, weight, dy, start


@pytest.mark.parametrize(("backend", "device"), places("embedding"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "wide"), TYPES, ids=str)
def test_rows_and_gradients(
    backend: str, device: str, case: str, dtype: torch.dtype, wide: torch.dtype
) -> None:
    ids, weight, dy, start = make(case, dtype, device)
    passes = ops.embedding(weight, backend)
    first = start or 0
    y = passes.rows(ids, weight, start)
    gradient = torch.full(weight.shape, torch.nan, dtype=wide, device=device)
    passes.add_gradient_(gradient, dy, ids, start, True)
    passes.add_gradient_(gradient, dy, ids, start, False)
    ids, weight, dy, y = (x.cpu() for x in (ids, weight, dy, y))
    exact = torch.zeros(len(weight), weight.shape[1], dtype=torch.float64)
    for at in map(
        tuple, torch.cartesian_prod(*map(torch.arange, ids.shape)).view(-1, ids.dim()).tolist()
    ):
        row = int(ids[at]) - first
        assert torch.equal(
            y[at], weight[row] if 0 <= row < len(weight) else torch.zeros_like(y[at])
        )
        if 0 <= row < len(weight):
            exact[row] += dy[at].double()
    assert y.shape == dy.shape
    # terms that all fall on one row are summed in the type of the gradient; the reference rounds to
    # dy's first
    tolerance = torch.finfo(dtype if backend == "torch" else wide).eps * max(ids.numel(), 1)
    torch.testing.assert_close(gradient.double().cpu(), 2 * exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("backend", "device"), places("embedding", reference=False))
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_threads(backend: str, device: str, case: str) -> None:
    ids, weight, dy, start = make(case, torch.float32, device)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        gradient = torch.full_like(weight, torch.nan)
        ops.embedding(weight, backend).add_gradient_(gradient, dy, ids, start, True)
        results.append(gradient)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_straight_into_the_buffer(dtype: torch.dtype) -> None:
    """Two micro-batches into a buffer that held NaN; rows without an id are zero; hooks run once in
    each backward."""
    layer = VocabParallelEmbedding(11, 6, Axis("tp"), dtype=dtype)
    torch.nn.init.normal_(layer.weight)
    accumulator = GradientAccumulator(FlatLayout({"w": (11, 6)}, torch.float32))
    accumulator.buffers[0].tensors[0].fill_(torch.nan)
    accumulator.begin(0)
    layer.bind_parameter("weight", ParameterBinding(accumulator.consumer("w")))
    reported: list[str] = []
    accumulator.arm(reported.append)
    wanted = torch.zeros(11, 6)
    for ids in (torch.tensor([[3, 3, 0]]), torch.tensor([[10, 3, 9]])):
        accumulator.bind({"w": layer.weight}, 0)
        dy = torch.randn(1, 3, 6).to(dtype)
        layer(ids).backward(dy)
        wanted.index_add_(0, ids[0], dy[0].float())
    accumulator.finish(0)
    assert reported == ["w", "w"]
    torch.testing.assert_close(accumulator.views(0)["w"], wanted, rtol=1e-6, atol=1e-6)
