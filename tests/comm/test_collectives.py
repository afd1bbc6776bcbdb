"""Collectives: results, what is counted, uneven sizes, strides, types; identity and uncounted on an
axis of size 1."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tensor_parallel import traffic

from hybridpar import comm
from hybridpar.comm import collectives
from hybridpar.grid import Axis, ProcessGrid


def reductions(axis: Axis) -> None:
    n = axis.size
    r = axis.rank
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = torch.full((2, 3), r + 1, dtype=dtype)
        with traffic(axis, all_reduce=2):
            assert comm.all_reduce(x, axis) is x
            assert (x == n * (n + 1) // 2).all()
            x.fill_(-r - 1)
            comm.all_reduce(x, axis, "max")
        assert (x == -1).all()
        assert axis.traffic.num_bytes["all_reduce"] == (2 * 6 * x.element_size() if n > 1 else 0)
    base = torch.arange(6.0).view(2, 3)
    x = base.t()  # not contiguous: still in place
    comm.all_reduce(x, axis)
    assert torch.equal(base, n * torch.arange(6.0).view(2, 3))
    with traffic(axis, all_reduce=1):
        assert comm.all_reduce(torch.empty(0, 3), axis).shape == (0, 3)


def asynchronous(axis: Axis) -> None:
    tensors = [torch.full((4,), float(i * axis.rank)) for i in range(3)]
    works = [comm.all_reduce_async(x, axis) for x in tensors]
    works.append(comm.all_reduce_async(strided := torch.ones(4, 2)[:, 0], axis))
    for work in (*works, *works):  # a second wait does nothing
        work.wait()
    for i, x in enumerate(tensors):
        assert (x == i * sum(range(axis.size))).all()
    assert (strided == axis.size).all()


def gathers(axis: Axis) -> None:
    n = axis.size
    r = axis.rank
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        whole = (torch.arange(4 * 3 * n * 5) % 7 % 2).view(4, 3 * n, 5).to(dtype)
        for dim in (0, 1, -1):
            moved = whole.movedim(1, dim)
            with traffic(axis, all_gather=1):
                got = comm.all_gather(moved.narrow(dim, 3 * r, 3), axis, dim)
            assert torch.equal(got, moved)
            assert got.is_contiguous() or n == 1
    assert axis.traffic.num_bytes["all_gather"] == (60 if n > 1 else 0)  # bool: a byte each
    sizes = [0, 3, 1, 5][:n] if n > 1 else [4]
    whole = torch.arange(2.0 * sum(sizes)).view(2, -1)
    with traffic(axis, all_gather=1):
        got = comm.all_gather(whole.split(sizes, 1)[r], axis, 1, sizes)
    assert torch.equal(got, whole)
    if n > 1:
        assert axis.traffic.num_bytes["all_gather"] == 2 * sizes[r] * 4  # its own, not the padding
        with pytest.raises(AssertionError, match="sizes"):
            comm.all_gather(torch.zeros(2, 7), axis, 1, sizes)
    assert comm.all_gather(torch.empty(0, 3), axis, 0).shape == (0, 3)


def others(axis: Axis) -> None:
    n = axis.size
    r = axis.rank
    for source in range(n):
        x = torch.full((3,), r)
        with traffic(axis, broadcast=1):
            assert comm.broadcast(x, axis, source) is x
        assert (x == source).all()
    base = torch.full((2, 3), float(r))
    comm.broadcast(base.t(), axis, n - 1)
    assert (base == n - 1).all()
    with traffic(axis, all_gather=1):
        assert comm.gather_objects({"rank": r}, axis) == [{"rank": i} for i in range(n)]
    with traffic(axis, barrier=1):
        comm.barrier(axis)


def exchanges(axis: Axis) -> None:
    """Rank r sends r * 10 + i to rank i, (r + i) % 3 times: uneven, and to some nothing."""
    n = axis.size
    r = axis.rank
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        send = [(r + i) % 3 for i in range(n)]
        x = torch.tensor([r * 10 + i for i in range(n) for _ in range(send[i])], dtype=dtype)
        with traffic(axis, all_to_all=1):
            got = comm.all_to_all(x, axis, send, [(r + i) % 3 for i in range(n)])
        assert got.tolist() == [i * 10 + r for i in range(n) for _ in range((r + i) % 3)]
    assert axis.traffic.num_bytes["all_to_all"] == (2 * sum(send) if n > 1 else 0)
    assert comm.all_to_all(torch.empty(0), axis, [0] * n, [0] * n).shape == (0,)


def parts(axis: Axis) -> None:
    """Each part is summed on its owner, then everyone gets it; nothing arrives before the wait on a
    via_host axis."""
    n = axis.size
    r = axis.rank
    cut = [(i % n, 3 * i, 3 * i + 2 + i % 2) for i in range(n + 1)]
    x = torch.full((3 * n + 4,), float(r + 1))
    with traffic(axis, reduce=len(cut)):
        comm.reduce_scatter_async(x, cut, axis).wait()
    total = n * (n + 1) // 2
    assert all((x[a:b] == total).all() for owner, a, b in cut if owner == r)
    own = [(a, b) for owner, a, b in cut if owner == r]
    x.fill_(-1.0)
    for a, b in own:
        x[a:b] = 10.0 + r
    with traffic(axis, broadcast=len(cut)):
        work = comm.all_gather_async(x, cut, axis)
        if axis.via_host:
            assert all((x[a:b] == -1.0).all() for owner, a, b in cut if owner != r)
        work.wait()
    assert n == 1 or all((x[a:b] == 10.0 + owner).all() for owner, a, b in cut)


def even_parts() -> bool:
    """One collective each, as with NCCL, where parts are even and those of all ranks; else one for
    each part."""
    axis = ProcessGrid(tp=2).tp
    collectives._in_one_call = collectives._are_even
    even = [(0, 0, 3), (1, 3, 6)]
    odd = [(0, 0, 2), (1, 2, 6)]
    for cut, names in (
        (even, ("reduce_scatter", "all_gather")),
        (odd, ("reduce", "broadcast")),
        (even[::-1], ("reduce", "broadcast")),
    ):
        x = torch.arange(6.0) + axis.rank
        with traffic(axis, **{names[0]: 1 if cut is even else 2}):
            comm.reduce_scatter_async(x, cut, axis).wait()
        start, stop = next((a, b) for owner, a, b in cut if owner == axis.rank)
        assert torch.equal(x[start:stop], (2 * torch.arange(6.0) + 1)[start:stop])
        with traffic(axis, **{names[1]: 1 if cut is even else 2}):
            comm.all_gather_async(x, cut, axis).wait()
        assert torch.equal(x, 2 * torch.arange(6.0) + 1)
    return True


@pytest.mark.ranks
def test_even_parts_go_in_one_call() -> None:
    assert all(run_ranks(even_parts, 2))


def scattered_sums(axis: Axis) -> None:
    """Along any dimension, into slices that differ and may be empty; the argument stays as it
    is."""
    n = axis.size
    r = axis.rank
    sizes = [2, 0, 3, 1][:n]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dim, shape in ((1, (3, sum(sizes), 2)), (0, (sum(sizes), 2)), (1, (1, sum(sizes), 2))):
            base = (
                (torch.arange(float(sum(sizes) * 6)) % 5)
                .view(-1)[: torch.Size(shape).numel()]
                .view(shape)
                .to(dtype)
            )
            x = base * (r + 1)
            with traffic(axis, reduce=sum(size > 0 for size in sizes)):
                got = comm.reduce_scatter(x, axis, dim, sizes)
            assert torch.equal(got, (base * (n * (n + 1) // 2)).split(sizes, dim)[r])
            assert torch.equal(x, base * (r + 1))
            assert got.is_contiguous()
            assert axis.traffic.num_bytes["reduce"] == (x.nbytes if n > 1 else 0)
    with pytest.raises(AssertionError, match="reduce_scatter of extent 2"):
        comm.reduce_scatter(torch.zeros(3, 2), axis, 1, [3] * n)


def run_cases(tp: int, device: str, computes_on: str = "cpu") -> None:
    """`device`: what the grid believes; on Gloo, other than the CPU means through host memory,
    wherever tensors are."""
    axis = ProcessGrid(tp=tp, device_type=device).tp
    assert axis.via_host == (tp > 1 and device != "cpu")
    with torch.device(computes_on):
        for case in (reductions, asynchronous, gathers, exchanges, others, parts, scattered_sums):
            case(axis)


def test_size_one() -> None:
    run_cases(1, "cpu")


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_collectives(tp: int, device: str) -> None:
    run_ranks(run_cases, tp, tp, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_collectives_of_tensors_on_a_shared_gpu() -> None:
    run_ranks(run_cases, 2, 2, "cuda", "cuda", start="spawn")


def inner_axes() -> tuple[list[int], list[int], int]:
    """Broadcast takes an axis rank, not a global one; each axis counts for itself."""
    grid = ProcessGrid(tp=2, dp=2)
    x = torch.tensor([grid.rank])
    y = comm.broadcast(x.clone(), grid.dp, 1)
    z = comm.all_gather(x, grid.dp, 0)
    return y.tolist(), z.tolist(), sum(grid.tp.traffic.calls.values())


@pytest.mark.ranks
def test_inner_axes() -> None:
    assert run_ranks(inner_axes, 4) == [([2], [0, 2], 0), ([3], [1, 3], 0)] * 2
