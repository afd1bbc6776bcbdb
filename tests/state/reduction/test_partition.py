"""ZeRO-1: every element has one owner, whole parameters stay whole, and what the owners make
reaches everyone."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from state.plain_reducer import plain_reducer
from torch import Tensor

from hybridpar.comm import all_gather_async, all_reduce, reduce_scatter_async
from hybridpar.config import from_mapping
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.nn import Init, ParallelModule, Placement, named_placements, reduce_shared_gradients
from hybridpar.nn.init import initialize
from hybridpar.optim import ParameterSlot
from hybridpar.optim.norm import counted, sums_of_squares
from hybridpar.state import Partition, Route
from hybridpar.state.layout import FlatLayout
from hybridpar.state.reduction.partition import make_routes

Shapes = list[tuple[int, ...]]


def rank_of(num_ranks: int, rank: int) -> Axis:
    """An axis that nothing is sent over."""
    group: Any = object() if num_ranks > 1 else None
    return Axis("dp", rank, tuple(range(num_ranks)), group)


def numbered(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {f"p{i}": shape for i, shape in enumerate(shapes)}


def partitions(
    shapes: Shapes, num_ranks: int, whole: set[int], alone: set[int], bucket_bytes: int
) -> list[Partition]:
    """The partition of every rank; parameters in `alone` are not sharded."""
    layout = FlatLayout(numbered(shapes), torch.float32)
    return [
        Partition(
            layout,
            {
                f"p{i}": Route(
                    rank_of(num_ranks, rank),
                    group=i in alone,
                    sharded=i not in alone,
                    whole=prod(shape) if i in whole else 0,
                )
                for i, shape in enumerate(shapes)
            },
            bucket_bytes,
        )
        for rank in range(num_ranks)
    ]


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=10),
    num_ranks=st.integers(1, 5),
    data=st.data(),
    bucket_bytes=st.sampled_from([1, 500, 10**9]),
)
def test_every_element_has_one_owner(
    sizes: list[int], num_ranks: int, data: st.DataObject, bucket_bytes: int
) -> None:
    indices = st.sets(st.integers(0, len(sizes) - 1))
    whole = data.draw(indices)
    alone = data.draw(indices)
    ranks = partitions([(size,) for size in sizes], num_ranks, whole, alone, bucket_bytes)
    layout = ranks[0].layout
    owners = torch.zeros(layout.numel, dtype=torch.int64)
    for partition in ranks:
        assert partition.parts == ranks[0].parts
        starts = [owned.start for owned in partition.owned]
        assert starts == sorted(starts)
        for owned in partition.owned:
            i = int(owned.name[1:])
            offset, _ = layout.ranges[owned.name]
            assert owned.shared == (i in alone or num_ranks == 1)
            assert owned.part is None or (offset + owned.part[0], offset + owned.part[1]) == (
                owned.start,
                owned.stop,
            )
            assert (owned.part is None) == (owned.stop - owned.start == sizes[i])
            if i in whole:
                assert owned.part is None
            owners[owned.start : owned.stop] += 1
    for i, size in enumerate(sizes):
        count = num_ranks if i in alone else 1
        start, _ = layout.ranges[f"p{i}"]
        assert (owners[start : start + size] == count).all()


def test_the_work_is_balanced() -> None:
    for whole in (set(), set(range(24))):
        ranks = partitions([(64, 64), (64, 16), (40,)] * 8, 4, whole, set(), 10**9)
        loads = [sum(o.stop - o.start for o in partition.owned) for partition in ranks]
        assert max(loads) - min(loads) <= (64 * 64 if whole else 64 * 3)


def test_uneven_tensor_parts_of_one_replica_own_the_same_whole_parameters() -> None:
    """Local sizes differ; who owns follows from the global ones."""

    def owned_by(rows: int) -> list[list[str]]:
        shapes: Shapes = [(rows + i, 8) for i in range(6)]
        layout = FlatLayout(numbered(shapes), torch.float32)
        return [
            [
                o.name
                for o in Partition(
                    layout,
                    {
                        f"p{i}": Route(rank_of(3, rank), sharded=True, whole=100 * (i + 1))
                        for i in range(6)
                    },
                ).owned
            ]
            for rank in range(3)
        ]

    assert owned_by(3) == owned_by(1) == owned_by(0)


def exchange(bucket_bytes: int) -> bool:
    """Gradients are summed on their owners; what owners write is everywhere after the gather;
    twice, overlapping."""
    axis = ProcessGrid(dp=torch.distributed.get_world_size()).dp
    shapes: Shapes = [(7, 9), (33,), (5, 5), (2, 100), (3,)]
    layout = FlatLayout(numbered(shapes), torch.float64)
    routes = {
        f"p{i}": Route(axis, group=i == 2, sharded=i != 2, whole=25 if i == 3 else 0)
        for i in range(5)
    }
    partition = Partition(layout, routes, bucket_bytes)
    reducer = plain_reducer(partition)
    assert partition.is_sharded
    for batch in range(3):
        generators = [torch.Generator().manual_seed(10 * batch + r) for r in range(axis.size)]
        all_flat = [torch.randn(layout.numel, generator=g, dtype=torch.float64) for g in generators]
        flat = all_flat[axis.rank].clone()
        total = torch.stack(all_flat).sum(0)
        reducer.arm(flat)
        reducer.flush()
        reducer.wait()
        for owned in partition.owned:
            torch.testing.assert_close(
                flat[owned.start : owned.stop], total[owned.start : owned.stop]
            )
        weights = torch.full_like(flat, float("nan"))
        for owned in partition.owned:
            weights[owned.start : owned.stop] = flat[owned.start : owned.stop] * 2
        partition.gather(weights).wait()
        for view, wanted in zip(
            layout.views(weights).values(), layout.views(total * 2).values(), strict=True
        ):
            torch.testing.assert_close(view, wanted)
    return True


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "bucket_bytes"), [(2, 1), (2, 10**9), (3, 1000)])
def test_owners_get_sums_and_all_get_what_owners_make(num_ranks: int, bucket_bytes: int) -> None:
    assert all(run_ranks(exchange, num_ranks, bucket_bytes))


class PerToken(ParallelModule):
    """Scales and shifts the tokens that each rank of the axis has, so gradients are partial sums
    over the axis."""

    def __init__(self, axis: Axis):
        super().__init__(axis)
        for name, hidden in (("scale", 5), ("bias", 13)):
            placement = Placement((hidden,), Init("normal", 1.0), partial=(axis.name,))
            self.add_parameter(name, placement, device="cpu", dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :5] * self.scale).square().sum() + (x + self.bias).square().sum()


def partial_gradients(zero: int) -> list[Tensor]:
    """On tp 2 x dp 2 each rank has tokens of its own; the sums are those of one process, counted
    once in the norm."""
    grid = ProcessGrid(tp=2, dp=2)
    tokens = torch.randn(4, 3, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    modules = [PerToken(axis) for axis in (Axis("tp"), grid.tp)]
    for module, x in zip(modules, (tokens.flatten(0, 1), tokens[grid.rank]), strict=True):
        initialize(named_placements(module), 1, grid.place)
        module(x).backward()
    wanted, mine = ({name: p.grad for name, p in module.named_parameters()} for module in modules)
    layout = FlatLayout({name: x.shape for name, x in mine.items()}, torch.float64)
    config = from_mapping({"parallel": {"tp": 2, "dp": 2, "zero": zero}})
    policy = JobPlan(config).state_policy(num_versions=1, num_gradient_buffers=1)
    partition = Partition(layout, make_routes(policy, modules[1].placements, grid))
    flat = layout.zeros()
    for name, view in layout.views(flat).items():
        view.copy_(mine[name])
    reducer = plain_reducer(partition)
    reducer.arm(flat)
    reducer.flush()
    reducer.wait()
    places = modules[1].placements
    slots = [
        ParameterSlot(o.name, places[o.name], grid.place, o.part, o.shared) for o in partition.owned
    ]
    gradients = [flat[o.start : o.stop] for o in partition.owned]
    reduce_shared_gradients(
        zip(gradients, (slot.placement for slot in slots), strict=True), grid.tp
    )
    assert grid.tp.traffic.calls == {"all_reduce": 1}
    for gradient, slot in zip(gradients, slots, strict=True):
        expected = wanted[slot.name][slice(*slot.part) if slot.part else slice(None)]
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)
    norm = all_reduce(sums_of_squares(counted(gradients, slots)).sum().view(1), grid.world)
    torch.testing.assert_close(
        norm[0], sum(g.square().sum() for g in wanted.values()), rtol=1e-13, atol=0.0
    )
    partition.gather(flat).wait()
    return list(layout.views(flat).values())


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_are_partial_over_tp(zero: int) -> None:
    first, *others = run_ranks(partial_gradients, 4, zero)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), (
            "replicas differ by a bit"
        )


def collectives() -> bool:
    axis = ProcessGrid(dp=2).dp
    x = torch.arange(6.0) + axis.rank
    parts = [(0, 0, 1), (1, 1, 1), (1, 1, 6)]
    reduce_scatter_async(x, parts, axis).wait()
    mine = slice(0, 1) if axis.rank == 0 else slice(1, 6)
    assert torch.equal(x[mine], (2 * torch.arange(6.0) + 1)[mine])
    assert (axis.traffic.calls["reduce"], axis.traffic.num_bytes["reduce"]) == (2, 24), (
        "an empty part is not sent"
    )
    x[mine] = axis.rank
    all_gather_async(x, parts, axis).wait()
    assert x.tolist() == [0, 1, 1, 1, 1, 1]
    alone = Axis("dp")
    reduce_scatter_async(x, [(0, 0, 6)], alone).wait()
    all_gather_async(x, [(0, 0, 6)], alone).wait()
    assert not alone.traffic.calls
    return True


@pytest.mark.ranks
def test_collectives_over_parts() -> None:
    assert all(run_ranks(collectives, 2))
