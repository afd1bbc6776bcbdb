"""Collectives under autograd: values, gradients and counts; nobody else's tensor is written to."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import traffic, values

from hybridpar import comm
from hybridpar.grid import Axis, ProcessGrid


def copy_to(axis: Axis) -> None:
    x = values("x", 2, 3).requires_grad_()
    weights = [values(f"w{r}", 2, 3) for r in range(axis.size)]
    with traffic(axis):
        y = comm.copy_to(x, axis)
    assert torch.equal(x, y)
    with traffic(axis, all_reduce=1):
        (y * weights[axis.rank]).sum().backward()
    torch.testing.assert_close(x.grad, sum(weights))

    # the incoming gradient is also the gradient of another branch, and must stay as it is
    a, b = (values("x", 2, 3).requires_grad_() for _ in range(2))
    g = values(f"g{axis.rank}", 2, 3)
    kept = g.clone()
    torch.autograd.backward([comm.copy_to(a, axis) + b], [g])
    assert torch.equal(g, kept)
    assert torch.equal(b.grad, kept)
    torch.testing.assert_close(a.grad, sum(values(f"g{r}", 2, 3) for r in range(axis.size)))
    comm.copy_to(
        a := values("x", 2, 3).requires_grad_(), axis
    ).sum().backward()  # expanded gradient
    assert torch.equal(a.grad, torch.full((2, 3), float(axis.size), dtype=torch.float64))


def reduce_from(axis: Axis) -> None:
    x = values(f"x{axis.rank}", 3, 2).t().requires_grad_()
    expected = sum(values(f"x{r}", 3, 2).t() for r in range(axis.size))
    kept = x.detach().clone()
    with traffic(axis, all_reduce=1):
        y = comm.reduce_from(x, axis)
    torch.testing.assert_close(y, expected)
    assert torch.equal(x, kept)
    with traffic(axis):
        (y * values("w", 2, 3)).sum().backward()
    assert torch.equal(x.grad, values("w", 2, 3))

    x = values(f"x{axis.rank}", 3, 2).requires_grad_()
    fresh = x * 2
    y = comm.reduce_from_(fresh, axis)
    assert y.data_ptr() == fresh.data_ptr()
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 8 * expected.t())
    assert (
        comm.reduce_from_(torch.ones(2), axis).tolist() == [axis.size] * 2
    )  # nothing requires a gradient


def gather_from(axis: Axis) -> None:
    sizes = [2, 0, 3, 1][: axis.size]
    whole = values("x", 4, sum(sizes))
    x = whole.split(sizes, 1)[axis.rank].clone().requires_grad_()
    with traffic(axis, all_gather=1):
        y = comm.gather_from(x, axis, -1, sizes)
    assert torch.equal(y, whole)
    w = values("w", 4, sum(sizes))
    with traffic(axis):
        (y * w).sum().backward()
    assert torch.equal(x.grad, w.split(sizes, 1)[axis.rank])


def scatter_to(axis: Axis) -> None:
    sizes = [2, 0, 3, 1][: axis.size]
    x = values("x", sum(sizes), 4).requires_grad_()
    with traffic(axis):
        y = comm.scatter_to(x, axis, 0, sizes)
    assert torch.equal(y, x.split(sizes)[axis.rank])
    w = values("w", sum(sizes), 4)
    with traffic(axis, all_gather=1):
        (y * w.split(sizes)[axis.rank]).sum().backward()
    assert torch.equal(x.grad, w)
    even = values("x", 3, 2 * axis.size).requires_grad_()
    y = comm.gather_from(comm.scatter_to(even, axis, 1), axis, 1)
    assert torch.equal(y, even)
    y.sum().backward()
    assert (even.grad == 1).all()
    if axis.size > 1:
        with pytest.raises(AssertionError, match="needs sizes"):
            comm.scatter_to(torch.zeros(1), axis, 0)


def gather_sequence(axis: Axis) -> None:
    sizes = [2, 0, 3, 1][: axis.size]
    whole = values("x", 4, sum(sizes), 2)
    x = whole.split(sizes, 1)[axis.rank].clone().requires_grad_()
    with traffic(axis, all_gather=1):
        y = comm.gather_sequence(x, axis, sizes)
    assert torch.equal(y, whole)
    with traffic(axis, reduce=sum(size > 0 for size in sizes)):
        (y * values(f"w{axis.rank}", *y.shape)).sum().backward()
    total = sum(values(f"w{r}", *y.shape) for r in range(axis.size))
    torch.testing.assert_close(x.grad, total.split(sizes, 1)[axis.rank])


def scatter_sequence(axis: Axis) -> None:
    sizes = [2, 0, 3, 1][: axis.size]
    shape = 4, sum(sizes), 2
    x = values(f"x{axis.rank}", *shape).requires_grad_()
    kept = x.detach().clone()
    with traffic(axis, reduce=sum(size > 0 for size in sizes)):
        y = comm.scatter_sequence(x, axis, sizes)
    total = sum(values(f"x{r}", *shape) for r in range(axis.size))
    torch.testing.assert_close(y, total.split(sizes, 1)[axis.rank])
    assert torch.equal(x, kept)
    w = values("w", *shape)
    with traffic(axis, all_gather=1):
        (y * w.split(sizes, 1)[axis.rank]).sum().backward()
    assert torch.equal(x.grad, w)


def run_cases(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for case in (copy_to, reduce_from, gather_from, scatter_to, gather_sequence, scatter_sequence):
        case(axis)


def test_size_one() -> None:
    run_cases(1)


@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 4])
def test_autograd(tp: int) -> None:
    run_ranks(run_cases, tp, tp)
