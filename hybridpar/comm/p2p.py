"""Transfers between two ranks of an axis, counted as `send` and `recv`.

Transfers from one rank to another arrive in the order they were sent: both sides must post them in
the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.comm.collectives import Work, Works, message, put_back, room_for
from hybridpar.grid import Axis


def isend(x: Tensor, to: int, axis: Axis) -> Work:
    """Start to send `x` to axis rank `to`.

    `x` must not change, and is kept alive, until the work was waited for.
    """
    assert to != axis.rank, f"rank {to} of axis {axis.name} sends to itself"
    sent = message(x.detach(), axis)
    peer = axis.ranks[to]
    waiting = axis.call("send", x.nbytes, peer)
    with waiting:  # a link that is already broken fails here, and the error says so
        handle = dist.isend(sent, group=axis.group, group_dst=to)
    return Work(handle, sent, waiting=waiting)


def irecv(buffer: Tensor, source: int, axis: Axis) -> Work:
    """Post a receive from axis rank `source` into `buffer`.

    The buffer must be contiguous, and must not be touched before the work was waited for.
    """
    assert source != axis.rank, f"rank {source} of axis {axis.name} receives from itself"
    assert buffer.is_contiguous(), "a receive needs a contiguous buffer"
    buffer = buffer.detach()
    peer = axis.ranks[source]
    taken = room_for(buffer.shape, buffer, axis) if axis.via_host else buffer
    waiting = axis.call("recv", buffer.nbytes, peer)
    with waiting:
        handle = dist.irecv(taken, group=axis.group, group_src=source)
    return Work(handle, buffer, taken, finish=lambda: put_back(taken, buffer), waiting=waiting)


def exchange(x: Tensor, to: int, buffer: Tensor, source: int, axis: Axis) -> Works:
    """Start to send `x` to axis rank `to`, and to receive from axis rank `source` into `buffer`.

    Both may be one rank, and every rank of a ring may call this at once: with NCCL, which runs the
    operations of a communicator in order, both transfers are one operation.
    """
    if axis.via_host or not x.is_cuda or dist.get_backend(axis.group) != "nccl":
        return Works([irecv(buffer, source, axis), isend(x, to, axis)])
    assert buffer.is_contiguous(), "a receive needs a contiguous buffer"
    sent = x.detach().contiguous()
    axis.call("send", sent.nbytes, axis.ranks[to])
    waiting = axis.call("recv", buffer.nbytes, axis.ranks[source])
    operations = [
        dist.P2POp(dist.isend, sent, group=axis.group, group_peer=to),
        dist.P2POp(dist.irecv, buffer, group=axis.group, group_peer=source),
    ]
    return Works(
        Work(handle, sent, buffer, waiting=waiting) for handle in dist.batch_isend_irecv(operations)
    )


def connect(axis: Axis, links: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Send one byte over each link, in order, so that NCCL connects the two ranks of each now.

    At the first transfer from one rank to another NCCL blocks the hosts of both until both have
    called it. A plan that posts receives ahead would deadlock: with pipeline.schedule = "naive"
    rank 0 would wait for the first gradient, which rank 1 sends after the first activation, which
    rank 0 has not sent yet.

    Args:
        axis: Its ranks call this together.
        links: Sender and receiver, as ranks of the axis, in the same order on all of them. That
            order has no cycle, whatever the links are.
        device: Device of the byte.
    """
    for source, target in links:
        if axis.rank in (source, target):
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            work = isend(byte, target, axis) if axis.rank == source else irecv(byte, source, axis)
            work.wait()
