"""Point-to-point messages: order, tags, strides, and what is counted."""

from __future__ import annotations

import gc

import pytest
import torch
from ranks import run_ranks

from hybridpar.comm import irecv, isend
from hybridpar.comm.p2p import connect
from hybridpar.grid import Axis, ProcessGrid


def ring(device: str, computes_on: str = "cpu") -> None:
    """`device`: what the grid believes; on Gloo, other than the CPU means through host memory,
    wherever tensors are."""
    axis = ProcessGrid(pp=3, device_type=device).pp
    right = (axis.rank + 1) % 3
    left = (axis.rank - 1) % 3
    with torch.device(computes_on):
        buffers = [torch.full((2, 3), torch.nan) for _ in range(3)]
        receives = [irecv(b, left, axis) for b in buffers]
        # temporaries, strided
        sends = [isend(torch.full((3, 2), 10.0 * axis.rank + i).t(), right, axis) for i in range(3)]
    gc.collect()
    if axis.via_host:
        assert all(b.isnan().all() for b in buffers), "received before the wait"
    for work in (*receives, *sends, *sends):
        work.wait()
    for i, b in enumerate(buffers):
        assert (b == 10 * left + i).all()
    assert dict(axis.traffic.calls) == {"send": 3, "recv": 3}
    assert dict(axis.traffic.num_bytes) == {"send": 72, "recv": 72}
    with pytest.raises(AssertionError, match="to itself"):
        isend(buffers[0], axis.rank, axis)
    with pytest.raises(AssertionError, match="contiguous"):
        irecv(buffers[0].t(), left, axis)


def directions(device: str) -> None:
    """The reverse axis is a line of its own, and so is each axis again."""
    grid = ProcessGrid(pp=2, device_type=device)
    other = 1 - grid.pp.rank
    axes = (grid.pp, grid.again("pp"))
    assert axes[1].group is not axes[0].group
    sends = [
        isend(torch.tensor([float(i), grid.pp.rank]), other, axis) for i, axis in enumerate(axes)
    ]
    got = [torch.empty(2) for _ in axes]
    for i in (1, 0):
        irecv(got[i], other, axes[i]).wait()
    back = torch.empty(2, requires_grad=True)
    sends.append(isend(torch.ones(2, requires_grad=True) * 7, other, grid.pp_reverse))
    irecv(back, other, grid.pp_reverse).wait()
    empty = torch.empty(0, 4)
    sends.append(isend(empty, other, grid.pp))
    irecv(torch.empty(0, 4), other, grid.pp).wait()
    for work in sends:
        work.wait()
    assert [x.tolist() for x in got] == [[0.0, other], [1.0, other]]
    assert back.tolist() == [7.0, 7.0]
    assert grid.pp_reverse.traffic.calls == {"send": 1, "recv": 1}


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ring(device: str) -> None:
    run_ranks(ring, 3, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ring_of_tensors_on_a_shared_gpu() -> None:
    run_ranks(ring, 3, "cuda", "cuda", start="spawn")


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_directions(device: str) -> None:
    run_ranks(directions, 2, device)


def test_nobody_to_talk_to() -> None:
    with pytest.raises(AssertionError, match="itself"):
        isend(torch.ones(1), 0, Axis("pp"))


def connected() -> dict[str, int]:
    """A ring both ways, which every rank goes through in one order."""
    axis = ProcessGrid(pp=3).pp
    connect(axis, [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)], torch.device("cpu"))
    return dict(axis.traffic.calls)


@pytest.mark.ranks
def test_ranks_connect_over_every_link() -> None:
    assert run_ranks(connected, 3) == [{"send": 2, "recv": 2}] * 3
