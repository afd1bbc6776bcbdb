import random
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from state.plain_reducer import plain_reducer
from torch import nn

from hybridpar.grid import Axis, ProcessGrid
from hybridpar.state import GradientAccumulator, Partition, Route
from hybridpar.state.layout import FlatLayout

SIZES = [7, 16, 33, 16, 5]
BATCHES = 3
MICROBATCHES = 2


def one_axis(layout, axis, bucket_bytes=25 * 2**20):
    return Partition(layout, dict.fromkeys(layout.names, Route(axis)), bucket_bytes)


def network():
    torch.manual_seed(0)
    layers = [m for i, o in pairwise(SIZES) for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, 3), *layers).double()  # the first gets no gradient


def inputs(batch, rank):
    return torch.randn(
        4, SIZES[0], generator=torch.Generator().manual_seed(10 * batch + rank), dtype=torch.float64
    )


def overlapped(bucket_bytes, num_buffers, local=()):
    """Gradients of every batch, reduced while the backward runs; two buffers: a batch is waited for
    after the next."""
    axis = ProcessGrid(dp=torch.distributed.get_world_size()).dp
    model = network()
    leaves = dict(model.named_parameters())
    layout = FlatLayout({name: x.shape for name, x in leaves.items()}, torch.float64)
    accumulator = GradientAccumulator(layout, num_buffers=num_buffers)
    routes = {name: Route(Axis("alone") if name in local else axis) for name in leaves}
    reducer = plain_reducer(Partition(layout, routes, bucket_bytes))
    results = []
    early = []
    for batch in range(BATCHES):
        index = accumulator.buffer_index(batch)
        if batch >= num_buffers:
            results.append(finish(reducer, accumulator, batch - num_buffers))
        accumulator.begin(index)
        accumulator.bind(leaves, index)
        for microbatch in range(MICROBATCHES):
            out = model[1:](inputs(batch, axis.rank))
            if microbatch == MICROBATCHES - 1:
                reducer.arm(accumulator.buffers[index])
                accumulator.arm(reducer.ready)
            out.square().sum().backward()
        early.append(reducer._next)
        accumulator.finish(index)
        reducer.flush()
    for batch in range(len(results), BATCHES):
        results.append(finish(reducer, accumulator, batch))
    assert axis.traffic.calls["all_reduce"] == (len(reducer.buckets) - len(local)) * BATCHES
    return results, early, len(reducer.buckets)


def finish(reducer, accumulator, batch):
    reducer.wait()
    return {
        name: view.clone()
        for name, view in accumulator.views(accumulator.buffer_index(batch)).items()
    }


def expected(batch, ranks):
    model = network()
    for rank in ranks:
        for _ in range(MICROBATCHES):
            model[1:](inputs(batch, rank)).square().sum().backward()
    return {
        n: p.grad if p.grad is not None else torch.zeros_like(p)
        for n, p in model.named_parameters()
    }


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "bucket_bytes", "num_buffers"),
    [(2, 1, 1), (2, 1000, 2), (3, 2000, 2), (3, 10**9, 1)],
)
def test_overlapped_reduction_equals_the_sum(num_ranks, bucket_bytes, num_buffers):
    for rank, (results, early, num_buckets) in enumerate(
        run_ranks(overlapped, num_ranks, bucket_bytes, num_buffers)
    ):
        assert all(e == num_buckets - (2 if bucket_bytes == 1 else 1) for e in early), (
            "started before the flush"
        )
        for batch in range(BATCHES):
            for name, wanted in expected(batch, range(num_ranks)).items():
                torch.testing.assert_close(
                    results[batch][name],
                    wanted,
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}",
                )


@pytest.mark.ranks
def test_each_parameter_is_summed_over_its_own_axis():
    local = ("3.weight",)
    for rank, (results, _, _) in enumerate(run_ranks(overlapped, 2, 1000, 1, local)):
        alone = expected(0, [rank])
        total = expected(0, range(2))
        for name, got in results[0].items():
            torch.testing.assert_close(
                got, alone[name] if name in local else total[name], rtol=1e-12, atol=1e-12
            )


def shuffled(num_buckets):
    """Every rank calls its gradients final in an order of its own."""
    axis = ProcessGrid(dp=torch.distributed.get_world_size()).dp
    names = [f"p{i}" for i in range(num_buckets)]
    layout = FlatLayout({name: (3 + i,) for i, name in enumerate(names)}, torch.float32)
    reducer = plain_reducer(one_axis(layout, axis, bucket_bytes=1))
    assert len(reducer.buckets) == num_buckets
    flat = layout.zeros()
    views = layout.views(flat)
    for batch in range(5):
        order = names[:-2]  # two are left to flush
        random.Random(7 * axis.rank + batch).shuffle(order)
        for i, view in enumerate(views.values()):
            view.fill_(10.0**axis.rank * (i + 1))
        reducer.arm(flat)
        for name in order:
            reducer.ready(name)
        reducer.flush()
        reducer.wait()
        for i, view in enumerate(views.values()):
            assert (view == sum(10.0**r for r in range(axis.size)) * (i + 1)).all()
    return True


@pytest.mark.ranks
def test_buckets_start_in_one_order_whatever_the_order_of_gradients():
    assert all(run_ranks(shuffled, 3, 12))


def test_starts_early_and_in_order():
    layout = FlatLayout(dict.fromkeys("abc", (4,)), torch.float32)
    reducer = plain_reducer(one_axis(layout, Axis("dp"), bucket_bytes=1))
    reducer.arm(layout.zeros())
    reducer.ready("b")
    assert reducer._next == 0  # held back: c comes first
    reducer.ready("c")
    assert reducer._next == 2
    reducer.flush()
    assert reducer._flat is None


def test_one_replica_needs_no_special_case():
    layout = FlatLayout(dict.fromkeys("ab", (4,)), torch.float32)
    reducer = plain_reducer(one_axis(layout, Axis("dp")))
    flat = torch.ones(layout.numel)
    reducer.wait()  # nothing under way
    reducer.arm(flat)
    reducer.ready("b")
    reducer.flush()
    reducer.flush()
    reducer.wait()
    assert (flat == 1).all()


def test_misuse_fails():
    layout = FlatLayout(dict.fromkeys("ab", (4,)), torch.float32)
    reducer = plain_reducer(one_axis(layout, Axis("dp")))
    reducer.arm(layout.zeros())
    with pytest.raises(AssertionError, match="not flushed"):
        reducer.arm(layout.zeros())
    with pytest.raises(AssertionError, match="flush before waiting"):
        reducer.wait()
    reducer.ready("a")
    with pytest.raises(KeyError):
        reducer.ready("a")
