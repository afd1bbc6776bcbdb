"""Chunks that come and go give their memory back, and views and autograd do not notice; room for
parts of them."""

from __future__ import annotations

import torch

from hybridpar.config import from_mapping
from hybridpar.grid import Axis
from hybridpar.prediction import measure
from hybridpar.state import Partition, Route, StatePolicy
from hybridpar.state.layout import FlatLayout
from hybridpar.state.policy import cut_into_parts
from hybridpar.state.residency.chunks import Buffer, BufferUsage, cut
from hybridpar.state.residency.shares import ShardedMemory, Shares, room

CPU = torch.device("cpu")
LAYOUT = FlatLayout({"stays": (1000,), "a": (300, 300), "b": (400, 500)}, torch.float32)
USES = {"stays": BufferUsage((0, 1), stays=True), "a": BufferUsage((0,)), "b": BufferUsage((1,))}


def test_chunks_come_and_go() -> None:
    policy = StatePolicy(from_mapping({"parallel": {"dp": 2, "zero": 3}}), 1, 1)
    with measure(CPU) as meter:
        memory = ShardedMemory(CPU, policy.moved_kinds)
        whole = Buffer(LAYOUT, torch.float32, memory, cut(LAYOUT, USES.__getitem__), "weights/0")
        views = whole.views()
        assert meter.read().current == whole.tensors[0].nbytes, "of what stays"
        assert meter.read().peak < whole.nbytes
        a, b = memory.chunks
        assert [(c.kind, c.use, c.num_bytes) for c in (a, b)] == [
            ("weights/0", USES["a"], 360_000),
            ("weights/0", USES["b"], 800_000),
        ]
        a.take()
        assert meter.read().current == whole.tensors[0].nbytes + 360_000
        a.give_back()
    partition = Partition(
        LAYOUT, dict.fromkeys(LAYOUT.names, Route(Axis("dp"))), uses=USES.__getitem__
    )
    shares = Shares(partition, whole, memory)
    assert [view.shape for view in shares.owned()] == [(1000,), (300, 300), (400, 500)]
    shares.views["a"].normal_()
    leaf = views["a"].detach().requires_grad_()
    x = torch.randn(2, 300, requires_grad=True)
    a.take()
    shares.gather(a.use).wait()
    (x @ leaf).sum().backward(retain_graph=True)
    loss = (x @ leaf).sum()
    before = x.grad
    x.grad = None
    a.give_back()
    with memory.writing(leaf):
        shares.gather(a.use).wait()
        loss.backward()
        assert torch.equal(leaf, shares.views["a"])
        leaf.detach().fill_(2.0)
        shares.take(["a"], add=True)
    assert before is not None
    assert torch.equal(x.grad, before)
    assert not a.is_here


def test_room_for_consecutive_parts() -> None:
    tied = [
        (BufferUsage((0, 2)), 100),
        (BufferUsage((0,)), 1),
        (BufferUsage((1,)), 10),
        (BufferUsage((2,)), 5),
        (BufferUsage((0, 1, 2), stays=True), 999),
    ]
    assert [room(tied, n) for n in (1, 2, 3)] == [105, 115, 116]
    assert room([], 2) == 0


def test_any_budget_cuts_a_stage_into_its_blocks() -> None:
    config = from_mapping({"memory": {"budget": 1}})
    assert cut_into_parts(config, range(2, 4)) == (range(2, 3), range(3, 4))
