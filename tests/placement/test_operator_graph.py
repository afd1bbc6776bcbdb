"""Operator graphs of our own models: their sums are the planner's, and so are the loads of the
planner's split."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from planner import made

from hybridpar.config import Config
from hybridpar.errors import ConfigError
from hybridpar.models.build import Recomputation
from hybridpar.placement import (
    Options,
    is_contiguous,
    make_workload,
    place,
    placement_report,
    score,
)
from hybridpar.placement import operator_graph as module
from hybridpar.placement.operator_graph import operator_graph
from hybridpar.placement.operators import Operator, block_operators
from hybridpar.planner.machines.cluster import count_parameters, estimate, machine_of
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.searching.split import BlockCosts, best_split
from hybridpar.prediction.footprint import Buffers, trace_stage
from hybridpar.prediction.work import KINDS
from hybridpar.validate import problems

_exported: dict[str, tuple[Operator, ...]] = {}


@pytest.fixture(autouse=True)
def _exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is exported once for all tests: half a second each. test_operators is about what
    comes out."""

    def once(config: Config, number: int) -> tuple[Operator, ...]:
        key = f"{config.model} {config.train} {number}"
        if key not in _exported:
            _exported[key] = block_operators(config, number)
        return _exported[key]

    monkeypatch.setattr(module, "block_operators", once)


def measured(config: Config, devices: int = 4) -> Machine:
    return made.machine(
        config, devices, made=made.profile(config, layer=0.011, head=0.017), memory=1e12
    )


def estimated(config: Config, devices: int = 4) -> Machine:
    link = find_link("nvlink3")
    cluster = Cluster(find_device("a100-80gb"), devices, 1, link, link)
    return machine_of(cluster, estimate(config, cluster))


def kind_of(config: Config, number: int) -> str:
    return (
        KINDS[0] if number == 0 else KINDS[2] if number == config.model.num_blocks - 1 else KINDS[1]
    )


def block_times(config: Config, machine: Machine) -> list[tuple[float, float]]:
    """Milliseconds of every block, forward and backward."""
    costs = [
        machine.profile.block(kind_of(config, n), 1, config.train.micro_batch_size)
        for n in range(config.model.num_blocks)
    ]
    return [(1e3 * cost.forward, 1e3 * cost.backward) for cost in costs]


def planned(
    config: Config, machine: Machine, stages: int, training: bool
) -> tuple[list[int], list[float]]:
    """The planner's split: the stage of each block, and what each stage takes of a micro-batch."""
    times = block_times(config, machine)
    backward = [b * training for _, b in times]
    costs = BlockCosts([f for f, _ in times], backward, [0.0] * len(times))
    split = best_split(costs, stages)
    assert split is not None
    ends = list(accumulate(split.sizes))
    stage_of = [sum(number >= end for end in ends) for number in range(len(times))]
    loads = np.bincount(stage_of, [f + b for (f, _), b in zip(times, backward, strict=True)])
    return stage_of, loads.tolist()


CONFIGS = {
    "gpt": made.config(),
    "llama": made.config(position="rotary", norm="rms_norm", activation="swiglu"),
    "bert": made.config(kind="bert", dropout=0.1),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "machine_for"), [(name, measured) for name in CONFIGS] + [("gpt", estimated)]
)
def test_nodes_of_a_block_add_up_to_the_block(name: str, machine_for: Any, training: bool) -> None:
    config = CONFIGS[name]
    if machine_for is estimated:
        config = replace(config, train=replace(config.train, dtype="bf16"))
    machine = machine_for(config)
    document = operator_graph(config, machine, training=training)
    assert document["about"]["estimated"] == machine.profile.estimated
    make_workload(document)  # acyclic, and all that it checks
    for number, times in enumerate(block_times(config, machine)):
        for backward, time in zip((False, True), times, strict=True):
            rows = [
                n
                for n in document["nodes"]
                if (n["layerId"], n["isBackwardNode"]) == (number, backward)
            ]
            assert sum(n["fpgaLatency"] for n in rows) == pytest.approx(
                time * (training or not backward), rel=1e-9
            )
            assert bool(rows) == (training or not backward)


def test_backward_nodes_mirror_forward_ones() -> None:
    config = made.config()
    document = operator_graph(config, measured(config), training=True)
    w = make_workload(document)
    n = int((~w.backward).sum())
    assert not w.backward[:n].any()
    assert w.colour[:n].tolist() == w.colour[n : 2 * n].tolist() == list(range(n))
    assert w.accelerator_time[n : 2 * n] == pytest.approx(
        2 * w.accelerator_time[:n]
    )  # as the profile's backward is
    edges = {tuple(e) for e in w.edges.tolist()}
    forward = {(u, v) for u, v in edges if v < n}
    assert all(u < v for u, v in forward)
    assert {(u, v) for u, v in edges if u < n <= v} == {(n - 1, 2 * n - 1)}  # the loss
    for u in range(n):
        readers = [v for x, v in sorted(forward) if x == u]
        back = [x for x, y in edges if y == n + u and x >= n]
        if len(readers) > 1:  # of the two halves of a layer, whose input goes around them too
            (total,) = back
            assert (w.colour[total], w.accelerator_time[total], w.size[total]) == (
                min(readers),
                0,
                0,
            )
            back = [x for x, y in edges if y == total]
        assert sorted(back) == [n + v for v in readers]
    assert w.num_nodes == 2 * n + 2 * config.model.num_layers


def test_edges_cost_the_bytes_over_the_link() -> None:
    config = made.config()
    link = made.link(latency=1e-3, bandwidth=1e9)
    machine = made.machine(config, 2, inner=link)
    document = operator_graph(config, machine, training=True)
    b = 2
    s = 32
    h = 64
    name = {n["id"]: n["name"] for n in document["nodes"]}
    cost = {(name[e["sourceId"]], name[e["destId"]]): e["cost"] for e in document["edges"]}
    wide = "blocks.1.attention.qkv.linear", "blocks.1.scaled_dot_product_attention"
    assert cost[wide] == pytest.approx(1e3 * link.transfer_time(4 * 3 * b * s * h))
    # the gradients of queries, keys and values go back
    assert cost[f"{wide[1]}.backward", f"{wide[0]}.backward"] == pytest.approx(cost[wide])
    between = "blocks.1.mlp.down.add", "blocks.2.attention_norm.layer_norm"
    assert cost[between] == pytest.approx(1 + 4 * b * s * h / 1e6)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sizes_are_what_memory_predicts(dtype: str) -> None:
    config = made.config(schedule="2bw")
    config = replace(config, train=replace(config.train, dtype=dtype))
    machine = measured(config)
    for training in (False, True):
        document = operator_graph(config, machine, training=training)
        assert document["maxSizePerFPGA"] == int(machine.memory_limit)
        for number in (0, 1, config.model.num_blocks - 1):
            rows = [n for n in document["nodes"] if n["layerId"] == number]
            size = sum(n["size"] for n in rows)
            weights = (
                count_parameters(config.model, 1)[kind_of(config, number)]
                * {"fp32": 4, "bf16": 2}[dtype]
            )
            if training:
                found = trace_stage(
                    config,
                    range(number, number + 1),
                    Recomputation(),
                    Buffers(2, 2),
                    torch.device(machine.profile.hardware.device_type),
                )
                expected = (
                    found.weights + found.master + found.gradients + found.optimizer + found.kept
                )
                assert found.weights == 2 * weights
                assert size == pytest.approx(
                    expected, abs=len(rows)
                )  # each node's is rounded to a byte
            else:
                assert size > weights


# -- placed


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_cut_between_blocks_loads_are_the_planners(stages: int, training: bool) -> None:
    config = made.config()
    machine = measured(config, stages)
    w = make_workload(operator_graph(config, machine, training=training))
    stage_of, loads = planned(config, machine, stages, training)
    devices = np.array([stage_of[extra["layerId"]] for extra in w.node_extra])
    found = score(w, devices)
    assert found.loads - found.transfers == pytest.approx(loads, rel=1e-9)
    one = (
        1e3 * machine.inner.transfer_time(4 * 2 * 32 * 64) * (1 + training)
    )  # to or from a neighbour
    assert found.transfers == pytest.approx([one] + [2 * one] * (stages - 2) + [one])
    assert is_contiguous(w, devices)


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_best_pipeline_is_near_the_planners_split(stages: int, training: bool) -> None:
    """Links are free. Moving every cut to the next border of a block adds less than a block to any
    device."""
    config = made.config(num_layers=3)
    machine = measured(config, stages)
    w = make_workload(operator_graph(config, machine, training=training))
    period = max(planned(config, machine, stages, training)[1])
    block = max(f + b * training for f, b in block_times(config, machine))
    free = 1e-3  # of a terabyte a second
    for solver in ("dp", "dpl", "milp-contiguous"):
        found = place(w, solver)
        assert found.contiguous
        assert found.objective == score(w, found.devices).objective
        assert period - block <= found.objective <= period + free
    assert place(w, "dp").objective == pytest.approx(
        place(w, "milp-contiguous").objective, rel=1e-5
    )
    assert place(w, "milp", Options(time_limit=0.5)).objective <= place(w, "dp").objective * (
        1 + 1e-9
    )


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
def test_whole_blocks_are_the_split_of_a_run(training: bool) -> None:
    """Links are free. The best stages of whole blocks take what the planner's take; chunks may take
    less."""
    config = made.config(num_layers=5)
    machine = measured(config, 3)
    w = make_workload(operator_graph(config, machine, training=training)).in_blocks()
    period = max(planned(config, machine, 3, training)[1])
    best = place(w, "dp")
    assert best.objective == pytest.approx(period, rel=1e-4)
    sizes = tuple(placement_report.split(best))
    assert sum(sizes) == config.model.num_blocks
    assert f"--parallel.pp 3 --pipeline.split {' '.join(map(str, sizes))}" in "\n".join(
        placement_report.lines(best, [])
    )
    run = replace(
        config,
        parallel=replace(config.parallel, pp=3, dp=1),
        pipeline=replace(config.pipeline, split=sizes),
    )
    assert problems(run, 3) == []
    free = place(w, "milp")
    assert free.proven
    assert free.objective <= best.objective
    assert w.blocks is not None
    for block in range(config.model.num_blocks):
        assert len(set(free.devices[w.blocks == block].tolist())) == 1


@pytest.mark.parametrize(
    ("turns", "sizes"),
    [
        ("0012012", [2, 1, 1, 1, 1, 1]),
        ("1001100", [1, 2, 2, 2]),
        ("0001111", [3, 4]),  # the last is a pipeline
        ("0101201", []),
        ("0120210", []),
        ("0120100", []),
    ],
    ids=str,
)
def test_chunks_of_whole_blocks_that_go_round_are_those_of_a_run(
    turns: str, sizes: list[int]
) -> None:
    """The device of each block: as many turns each, always in one order."""
    config = made.config(num_layers=5)
    w = make_workload(operator_graph(config, measured(config, 3), training=True)).in_blocks()
    assert w.blocks is not None
    placed = place(w, "expert", Options(split=np.array([int(turns[block]) for block in w.blocks])))
    assert placement_report.split(placed) == sizes
    told = "\n".join(placement_report.lines(placed, []))
    pp = len(set(turns))
    assert ("hybridpar train" in told and "--parallel.pp" in told) == bool(sizes)
    if len(sizes) > pp:
        chunks = len(sizes) // pp
        assert (
            f"--parallel.pp {pp} --pipeline.schedule interleaved --pipeline.virtual_stages {chunks} "
            "--pipeline.split "
            f"{' '.join(map(str, sizes))}"
        ) in told
        run = replace(
            config,
            parallel=replace(config.parallel, pp=pp, dp=1),
            pipeline=replace(
                config.pipeline, schedule="interleaved", virtual_stages=chunks, split=tuple(sizes)
            ),
        )
        assert problems(run, pp) == []


def test_inputs_that_are_no_graph() -> None:
    config = made.config(tp=2)
    with pytest.raises(ConfigError, match=r"parallel.tp = 2: operators are placed whole; try 1"):
        operator_graph(config, measured(config), training=False)
    config = made.config()
    with pytest.raises(
        ConfigError, match="accelerators = 1: with one there is nothing to place; try 2"
    ):
        operator_graph(config, measured(config, 1), training=False)
    only_split = made.machine(config, 2, made=made.profile(config, degrees=(2,)))
    with pytest.raises(
        ConfigError, match=r"parallel.tp = 1: the profile has only the tp degrees 2"
    ):
        operator_graph(config, only_split, training=False)
