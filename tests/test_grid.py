"""The process grid: rank order, axes, neighbours, and errors before any process group exists."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks

from hybridpar.config import ParallelConfig
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis, ProcessGrid, Traffic, describe, lines_of, place_of, sizes_of

AXES = ("tp", "dp", "pp", "pp_reverse", "embedding_group", "world")


def test_one_process_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    grid = ProcessGrid()
    for name in AXES:
        axis = getattr(grid, name)
        assert (axis.name, axis.size, axis.rank, axis.group) == (name, 1, 0, None)
        assert axis.is_first
        assert axis.is_last
        assert axis.next == 0
    assert grid.rank == 0
    assert grid.describe() == "rank 0 (stage 0, replica 0, tensor part 0)"
    place = {"pp": 1, "dp": 0, "tp": 1}
    assert (
        describe(5, range(1, 6, 2), place) == "rank 5 (stages 1, 3 and 5, replica 0, tensor part 1)"
    )


def test_axes_count_separately() -> None:
    grid = ProcessGrid()
    grid.tp.traffic.add("send", 8)
    grid.tp.traffic.add("send", 4)
    assert grid.tp.traffic.calls == {"send": 2}
    assert grid.tp.traffic.num_bytes == {"send": 12}
    assert grid.dp.traffic == Traffic()
    grid.tp.traffic.clear()
    assert grid.tp.traffic == Traffic()


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": -1}, {"tp": "2"}])
def test_sizes_that_are_none(sizes: Any) -> None:
    ((name, value),) = sizes.items()
    with pytest.raises(
        ConfigError,
        match=rf"parallel\.{name} = {value!r}: must be a whole " rf"number of at least 1",
    ):
        ProcessGrid(**sizes)
    with pytest.raises(
        ConfigError, match=r"sizes = 5: must map names of axes to their sizes; try \{"
    ):
        ProcessGrid(5)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"axis = 'ep': must be pp, dp, cp or tp; .*; try ProcessGrid"
    ):
        ProcessGrid(tp=1, ep=1)


def test_more_ranks_than_processes() -> None:
    with pytest.raises(
        ConfigError, match=r"pp \* dp \* tp = 6 does not match the job's 1 processes; try torchrun"
    ):
        ProcessGrid(tp=3, pp=2)


def test_axis_checks_itself() -> None:
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        Axis("tp", 2, (0, 1), group=object())
    with pytest.raises(AssertionError, match="needs a group"):
        Axis("tp", 0, (0, 1))


def describe_axes(tp: int, pp: int, dp: int) -> dict[str, Any]:
    grid = ProcessGrid(tp=tp, pp=pp, dp=dp)
    out = {}
    for name in AXES:
        axis = getattr(grid, name)
        x = torch.tensor([2**grid.rank])
        if axis.group is not None:  # the group is made of the ranks it says
            assert dist.get_rank(axis.group) == axis.rank
            dist.all_reduce(x, group=axis.group)
        assert x.item() == sum(2**r for r in axis.ranks)
        assert axis.ranks[axis.rank] == grid.rank == dist.get_rank()
        out[name] = axis.ranks
    assert grid.pp.group is not grid.pp_reverse.group or pp == 1
    assert grid.pp.next == grid.pp.ranks[(grid.pp.rank + 1) % pp]
    return out


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(2, 3, 1), (1, 3, 2), (2, 2, 2), (3, 1, 1), (1, 2, 1)]
)
def test_rank_order(tp: int, pp: int, dp: int) -> None:
    """tp fastest, then dp, then pp; every axis holds the ranks that differ in its coordinate
    only."""
    axes = run_ranks(describe_axes, tp * pp * dp, tp, pp, dp)
    for s, d, t in product(range(pp), range(dp), range(tp)):
        rank = (s * dp + d) * tp + t
        line = tuple((i * dp + d) * tp + t for i in range(pp))
        ends = tuple((i * dp + j) * tp + t for i in (0, pp - 1) for j in range(dp))
        assert axes[rank] == {
            "tp": tuple((s * dp + d) * tp + i for i in range(tp)),
            "dp": tuple((s * dp + i) * tp + t for i in range(dp)),
            "pp": line,
            "pp_reverse": line,
            "embedding_group": ends if pp > 1 and s in (0, pp - 1) else (rank,),
            "world": tuple(range(tp * pp * dp)),
        }


def test_any_axes_and_lines_joined_of_them() -> None:
    sizes = {"pp": 2, "ep": 2, "dp": 3, "tp": 1}
    lines = lines_of(sizes, [("dp", "ep")])
    assert list(lines) == [
        "tp",
        "dp",
        "ep",
        "pp",
        "pp_reverse",
        "embedding_group",
        "dp x ep",
        "world",
    ]
    assert lines["ep"] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert lines["dp x ep"] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert lines["embedding_group"] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    grid = ProcessGrid.imagined(sizes, 10, lambda *_: object())
    assert grid.place == place_of(10, sizes) == {"pp": 1, "ep": 1, "dp": 1, "tp": 0}
    assert grid.axis("ep").ranks == (7, 10)
    assert grid.axis("dp") is grid.dp
    assert grid.describe() == "rank 10 (stage 1, ep 1, replica 1, tensor part 0)"
    assert not grid.is_first_copy
    assert ProcessGrid.imagined(sizes, 8, lambda *_: object()).is_first_copy
    assert ProcessGrid({"ep": 1}, joined=[("dp", "ep")]).axis("dp", "ep").size == 1


def test_the_axis_of_context_parallelism() -> None:
    """Its ranks are neighbours but for tp, and hold the same parameters as those of dp."""
    sizes = sizes_of(ParallelConfig(tp=2, cp=3, pp=2, dp=2))
    assert list(sizes) == ["pp", "dp", "cp", "tp"]
    grid = ProcessGrid.imagined(sizes, 9, lambda *_: object())
    assert grid.cp.ranks == (7, 9, 11)
    assert grid.dp.ranks == (3, 9)
    assert grid.dp_cp.ranks == (1, 3, 5, 7, 9, 11)
    assert grid.embedding_group.ranks == (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23)
    assert (grid.replica, grid.num_replicas) == (1, 2)
    assert grid.describe() == "rank 9 (stage 0, replica 1, context part 1, tensor part 1)"
    assert [
        rank
        for rank in range(24)
        if ProcessGrid.imagined(sizes, rank, lambda *_: object()).is_first_copy
    ] == list(range(0, 24, 2))
    without = ProcessGrid()
    assert without.cp.size == 1
    assert without.dp_cp is without.dp
    assert ProcessGrid(cp=1).place == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}


@pytest.mark.parametrize(
    ("parallel", "names", "experts", "same"),
    [
        ({"dp": 4, "ep": 2}, ["pp", "dp", "experts", "tp"], (4, 5), (5, 7)),
        ({"cp": 4, "dp": 1, "ep": 2}, ["pp", "dp", "cp", "context_experts", "tp"], (4, 5), (5, 7)),
        (
            {"cp": 2, "dp": 2, "ep": 4},
            ["pp", "dp", "experts", "cp", "context_experts", "tp"],
            (4, 5, 6, 7),
            (5,),
        ),
        (
            {"cp": 4, "dp": 3, "ep": 3},
            ["pp", "dp", "experts", "cp", "tp"],
            (13, 17, 21),
            (12, 13, 14, 15),
        ),
        (
            {"cp": 4, "dp": 3, "ep": 6},
            ["pp", "dp", "experts", "cp", "context_experts", "tp"],
            (12, 13, 16, 17, 20, 21),
            (13, 15),
        ),
    ],
    ids=str,
)
def test_experts_are_divided_within_cp_first(
    parallel: dict[str, int],
    names: list[str],
    experts: tuple[int, ...],
    same: tuple[int, ...],
) -> None:
    """dp and cp keep their ranks, whatever ep is; every expert is on dp * cp / ep ranks."""
    setting = ParallelConfig(pp=2, **parallel)
    sizes = sizes_of(setting)
    assert list(sizes) == names
    first = setting.dp_cp + 1  # the second rank of the second stage
    grid = ProcessGrid.imagined(sizes, first, lambda *_: object())
    plain = ProcessGrid.imagined(sizes_of(replace(setting, ep=1)), first, lambda *_: object())
    assert grid.experts.ranks == experts
    assert grid.experts.size == setting.ep
    assert grid.expert_dp.ranks == same
    assert grid.expert_dp.size * setting.ep == setting.dp_cp
    for axis in ("dp", "cp", "dp_cp", "pp", "embedding_group"):
        assert getattr(grid, axis).ranks == getattr(plain, axis).ranks
    assert (grid.replica, grid.num_replicas) == (plain.replica, plain.num_replicas)


def test_sites_are_outermost_and_each_has_all_lines_of_a_grid() -> None:
    sizes = sizes_of(ParallelConfig(pp=2, tp=2, dp=1, sites=2))
    lines = lines_of(sizes)
    one = lines_of(sizes_of(ParallelConfig(pp=2, tp=2, dp=1)))
    assert lines["site"] == [[rank, rank + 4] for rank in range(4)]
    assert lines["site_group"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not {"site", "site_group"} & set(one)
    for name in ("pp", "tp", "dp", "embedding_group"):
        of_both = [[rank + first for rank in line] for first in (0, 4) for line in one[name]]
        assert sorted(lines[name]) == sorted(of_both)
    grid = ProcessGrid.imagined(sizes, 5, lambda name, ranks: name)
    assert (grid.site.rank, grid.site_group.ranks, grid.replica, grid.num_replicas) == (
        1,
        (4, 5, 6, 7),
        1,
        2,
    )
    alone = ProcessGrid()
    assert alone.site_group is alone.world
    assert alone.site.size == 1


def wrong_size_and_two_grids() -> None:
    with pytest.raises(ConfigError, match="= 3 does not match the job's 2"):
        ProcessGrid(tp=3)
    a = ProcessGrid(tp=2)
    b = ProcessGrid(dp=2)
    assert (a.tp.size, a.dp.size, b.tp.size, b.dp.size) == (2, 1, 1, 2)
    alone = ProcessGrid()  # a grid of one's own, inside a job
    assert alone.tp.ranks == (dist.get_rank(),)
    assert alone.describe() == f"rank {dist.get_rank()} (stage 0, replica 0, tensor part 0)"


@pytest.mark.ranks
def test_wrong_size_and_two_grids() -> None:
    run_ranks(wrong_size_and_two_grids, 2)


def one_thread_and_one_timeout_for_all_groups() -> None:
    before = socket_threads()
    grid = ProcessGrid(pp=2)
    dist.all_reduce(torch.ones(1), group=grid.pp.group)
    assert before == socket_threads() == 1
    for axis in (grid.pp, grid.pp_reverse, grid.embedding_group, grid.world):
        assert axis.group is not None
        assert axis.group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
        assert axis.group.group_desc == axis.name


def socket_threads() -> int:
    return sum(
        path.read_text().startswith("gloo_tcp") for path in Path("/proc/self/task").glob("*/comm")
    )


@pytest.mark.ranks
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads the way Linux shows them"
)
def test_one_thread_and_one_timeout_for_all_groups() -> None:
    run_ranks(one_thread_and_one_timeout_for_all_groups, 2)
