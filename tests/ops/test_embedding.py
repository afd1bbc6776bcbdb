"""Rows of an embedding table and their gradients: every backend against float64, and the same bits with any threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar import ops
from hybridpar.dp import GradientAccumulator
from hybridpar.grid import Axis
from hybridpar.nn import VocabParallelEmbedding
from hybridpar.nn.layout import FlatLayout
from hybridpar.ops import registry

BACKENDS = [row.name for row in registry.backends("embedding") if row.unsupported("cpu", torch.float32) is None]
TYPES = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
         (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
CASES = {  # rows of the table, hidden size, shape of ids, first row, number of ids in all
    "odd": (13, 37, (3, 7), 5, 30), "one": (1, 1, (1,), 0, 1), "no ids": (4, 8, (0, 3), 0, 4),
    "no rows": (0, 5, (2, 3), 9, 20), "all alike": (50, 64, (300,), 0, 1), "many": (1000, 33, (4, 257), 500, 2000),
    "whole": (40, 9, (50,), None, 40)}


def make(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int | None]:
    rows, h, shape, start, count = CASES[case]
    g = torch.Generator().manual_seed(len(case))
    ids = torch.randint(count, shape, generator=g)
    weight, dy = (torch.randn(s, generator=g).to(dtype) for s in ((rows, h), (*shape, h)))
    return ids, weight, dy, start


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "wide"), TYPES)
def test_rows_and_gradients(backend: str, case: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    ids, weight, dy, start = make(case, dtype)
    passes, first = ops.embedding(weight, backend), start or 0
    y, exact = passes.rows(ids, weight, start), torch.zeros(len(weight), weight.shape[1], dtype=torch.float64)
    for at in map(tuple, torch.cartesian_prod(*map(torch.arange, ids.shape)).view(-1, ids.dim()).tolist()):
        row = int(ids[at]) - first
        assert torch.equal(y[at], weight[row] if 0 <= row < len(weight) else torch.zeros_like(y[at]))
        if 0 <= row < len(weight):
            exact[row] += dy[at].double()
    assert y.shape == dy.shape
    gradient = torch.full(weight.shape, torch.nan, dtype=wide)
    passes.add_gradient_(gradient, dy, ids, start, True)
    passes.add_gradient_(gradient, dy, ids, start, False)
    # terms that all fall on one row are summed in the type of the gradient; the reference rounds to dy's first
    tolerance = torch.finfo(dtype if backend == "torch" else wide).eps * max(ids.numel(), 1)
    torch.testing.assert_close(gradient.double(), 2 * exact, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif("cpp" not in BACKENDS, reason="needs hybridpar._C")
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_threads(case: str) -> None:
    ids, weight, dy, start = make(case, torch.float32)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        gradient = torch.full_like(weight, torch.nan)
        ops.embedding(weight, "cpp").add_gradient_(gradient, dy, ids, start, True)
        results.append(gradient)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_straight_into_the_buffer(dtype: torch.dtype) -> None:
    """Two micro-batches into a buffer that held NaN; rows without an id are zero; hooks run once in each backward."""
    layer = VocabParallelEmbedding(11, 6, Axis("tp"), dtype=dtype)
    torch.nn.init.normal_(layer.weight)
    accumulator = GradientAccumulator(FlatLayout(["w"], [(11, 6)], torch.float32))
    accumulator.buffers[0].fill_(torch.nan)
    accumulator.begin(0)
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
