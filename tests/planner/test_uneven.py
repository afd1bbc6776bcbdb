"""Machines whose devices differ, whose links carry one way at a time; small kernels that wait for
launches."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from planner import made

from hybridpar.config import Config, ParallelConfig, TrainConfig
from hybridpar.errors import ConfigError
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimate, estimated, machine_of, read_cluster
from hybridpar.planner.machines.hardware import Cluster, Link, find_device, find_link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.machines.stragglers import spread
from hybridpar.planner.measuring.links import MeasuredLink
from hybridpar.planner.searching import plan_report as report
from hybridpar.planner.searching.candidates import Candidate, Request, balanced
from hybridpar.planner.searching.scale_down import as_fast_on_fewer, least_work
from hybridpar.planner.searching.search import search

CLUSTER = """
servers = 1
devices_per_server = 2
device = "v100-16gb"
inner = "nvlink2"
outer = { gbit_per_s = 100, latency_us = 7, half_duplex = true }
stragglers = 0.1
[[others]]
servers = 1
device = "a100-80gb"
"""


def described(tmp_path: Path, text: str = CLUSTER) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def config(pp: int = 4, m: int = 16, b: int = 4) -> Config:
    made_config = made.config(
        pp=pp, m=m, b=b, num_layers=22, hidden_size=1024, num_heads=16, seq_length=512
    )
    return replace(
        made_config,
        parallel=ParallelConfig(pp=pp),
        train=TrainConfig(dtype="bf16", micro_batch_size=b, device="cuda"),
    )


def test_a_stage_costs_what_its_device_costs(tmp_path: Path) -> None:
    """Two V100 and two A100: each stage is that of a cluster of its device, and the faster ones
    have more layers."""
    cluster = described(tmp_path)
    assert (cluster.num_devices, cluster.outer.half_duplex) == (4, True)
    cost = balanced(config(), estimated(config(), cluster)).cost
    for rank, name in enumerate(["v100-16gb"] * 2 + ["a100-80gb"] * 2):
        alike = replace(cluster, device=find_device(name), others=())
        same = StepCost(cost.config, machine_of(alike, estimate(cost.config, alike)))
        assert same.stages[rank] == cost.stages[rank]
        assert cost.limits[rank] == same.limits[rank]
    sizes = cost.config.pipeline.split
    assert sizes[1] < sizes[2]
    assert sum(sizes) == 24
    evenly = StepCost(
        replace(cost.config, pipeline=replace(cost.config.pipeline, split=(6, 6, 6, 6))),
        cost.machine,
    )
    assert cost.step_time < 0.75 * evenly.step_time


def test_no_other_split_of_mixed_devices_is_faster(tmp_path: Path) -> None:
    cluster = replace(described(tmp_path), stragglers=0.0)
    small = replace(config(m=8), model=replace(config().transformer, num_layers=8))
    on = estimated(small, cluster)
    best = balanced(small, on).cost
    slowest = [
        max(
            stage.compute
            for stage in StepCost(
                replace(small, pipeline=replace(small.pipeline, split=(*sizes, 10 - sum(sizes)))),
                on,
            ).stages
        )
        for sizes in product(range(1, 8), repeat=3)
        if sum(sizes) < 10
    ]
    assert max(stage.compute for stage in best.stages) <= min(slowest) * (1 + 1e-9)


@pytest.mark.thorough
def test_each_device_has_its_own_memory(tmp_path: Path) -> None:
    """A model whose even shares overfill the smaller devices goes to the larger ones."""
    cluster = replace(described(tmp_path), stragglers=0.0)
    large = replace(
        config(m=8, b=1), model=replace(config().transformer, num_layers=90, hidden_size=2048)
    )
    request = Request(
        keep={"pp": 4, "tp": 1},
        micro_batches=(1,),
        schedules=("1f1b",),
        split_backward=False,
        top=1,
    )
    (best,) = search(large, estimated(large, cluster), request).ranked
    totals = [stage.total for stage in best.memory or ()]
    assert all(total <= limit for total, limit in zip(totals, best.cost.limits, strict=True))
    assert max(totals) > min(best.cost.limits)
    assert best.peak <= best.cost.machine.memory_limit == min(best.cost.limits)
    alone = replace(cluster, others=(), num_servers=2)
    assert not search(large, estimated(large, alone), request).ranked


def test_stragglers_are_drawn_again_alike_and_the_slowest_counts(tmp_path: Path) -> None:
    alone = made.config(m=8, b=1)
    on = replace(made.machine(alone, 4, memory=1e11), stragglers=0.2)
    one = StepCost(alone, on)
    found = spread(one)
    assert found is not None
    assert found == spread(one)
    assert found != spread(one, seed=1)
    drawn = sorted(1 + random.Random(i).expovariate(5.0) for i in range(40))
    assert one.step_time * drawn[19] <= found.median <= one.step_time * drawn[20]
    assert one.step_time * drawn[36] <= found.late <= one.step_time * drawn[38]
    replicas = spread(StepCost(replace(alone, parallel=ParallelConfig(dp=4)), on))
    assert replicas is not None
    assert replicas.median > found.median
    assert spread(StepCost(alone, replace(on, stragglers=0.0))) is None
    result = search(alone, on, Request(keep={"tp": 1}, top=2))
    assert all("with stragglers" in line for line in report.reasons(result))
    assert len(report.reasons(result)) == 2
    medians = [candidate.spread.median for candidate in result.ranked if candidate.spread]
    assert medians == sorted(medians)


def linked(
    half_duplex: bool, device_type: str = "cuda", split: tuple[int, ...] = (4, 4)
) -> StepCost:
    """Stages with messages of 1 s each way, a layer of 0.01 s, and many micro-batches in flight."""
    base = replace(
        made.config(pp=len(split), m=12, b=1, split=split, schedule="2bw"),
        train=TrainConfig(micro_batch_size=1, device=device_type, dtype="fp32"),
    )
    base = replace(base, pipeline=replace(base.pipeline, warmup="bandwidth"))
    link = Link("wire", 4 * 32 * 64, 0.0, 1.0, half_duplex=half_duplex)
    profile = made.profile(base, layer=0.01, head=0.0, cores=4 * (device_type == "cpu"))
    return StepCost(base, Machine(profile, len(split), 1, link, link, 1e9, measured=False))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_link_that_carries_one_way_at_a_time_takes_both_ways_time(device: str) -> None:
    """12 messages of 1 s each way take 12 s at once, by turns 24; with a server between, which
    passes them on, 48."""
    both = linked(False, device).step_time
    turns = linked(True, device).step_time
    assert both == pytest.approx(12, rel=0.05)
    assert turns == pytest.approx(24, rel=0.05)
    assert linked(True, "cpu", (3, 3, 2)).step_time == pytest.approx(48, rel=0.05)


def test_rings_on_such_links_take_twice_the_time() -> None:
    device = find_device("v100-16gb")
    wire = Link("wire", 1e9, 0.0)
    for size, inner, outer in ((4, wire, wire), (1, wire, wire)):
        full = Cluster(device, size, 4 // size, inner, outer)
        half = replace(
            full, inner=replace(inner, half_duplex=True), outer=replace(outer, half_duplex=True)
        )
        assert half.all_reduce(1e6, range(4)) == pytest.approx(2 * full.all_reduce(1e6, range(4)))
    assert not MeasuredLink.half_duplex


def test_launches_are_said_where_graphs_do_not_hide_them() -> None:
    """Layers of 64 features: one stage is recorded as a CUDA graph, two are bound by launches."""
    tiny = replace(
        made.config(m=8, b=1), train=TrainConfig(dtype="bf16", micro_batch_size=1, device="cuda")
    )
    link = find_link("nvlink4")
    on = estimated(tiny, Cluster(find_device("h200-141gb"), 2, 1, link, link))

    def said(config: Config) -> tuple[float, str]:
        one = Candidate(config, StepCost(config, on), memory=None)
        parts = report.parts_of(one.cost)
        assert sum(parts.seconds.values()) == pytest.approx(one.cost.step_time, rel=0.01)
        return parts.launches / one.cost.step_time, report.bound_by(one, 1e9)

    share, text = said(tiny)
    assert share == 0
    assert "launches" not in text
    share, text = said(replace(tiny, train=replace(tiny.train, cuda_graphs=False)))
    assert share > 0.5
    assert "train.cuda_graphs = false" in text
    share, text = said(replace(tiny, parallel=ParallelConfig(pp=2)))
    assert share > 0.3
    assert "larger micro-batches hide launches" in text
    assert "train.graph_grids = true" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('servers = 1\ndevice = "a100-80gb"', 'device = "a100-80gb"'),
            r"others\[0\].servers = None: is missing",
        ),
        (("half_duplex = true", "half_duplex = 1"), "outer.half_duplex = 1: has the wrong type"),
        (("stragglers = 0.1", "stragglers = 2"), "stragglers = 2: must be at most 1"),
        (("stragglers = 0.1", "stragglers = true"), "stragglers = True: has the wrong type"),
        (("[[others]]", "[[other]]"), "other = .*unknown key"),
    ],
)
def test_mistakes_are_named(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        described(tmp_path, CLUSTER.replace(*change))


def test_fewer_devices_are_proposed_where_the_rest_only_wait() -> None:
    """Two servers over a slow link: one is as fast for two samples; over a fast link both are
    needed."""
    base = replace(made.config(m=2, b=1), parallel=ParallelConfig(dp=0))
    slow = Link("slow", 1e5, 1.0, 1.0)
    fast = Link("fast", 1e12, 0.0, 1.0)
    request = Request(schedules=("1f1b",), split_backward=False, top=1)
    for inner, outer, number in ((fast, slow, 2), (fast, fast, None)):
        on = Machine(made.profile(base, degrees=(1, 2)), 4, 2, inner, outer, 1e11, measured=False)
        best = search(base, on, request).ranked[0]
        found = as_fast_on_fewer(base, on, request, best)
        assert (found and found.cost.machine.num_devices) == number
        assert least_work(base, on) == pytest.approx(3 * (6 + 1))
    kept = replace(request, keep={"pp": 4})
    assert as_fast_on_fewer(base, on, kept, search(base, on, kept).ranked[0]) is None
