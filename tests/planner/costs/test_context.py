"""Costs with context parallelism, from those without; and plans that have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from custom_models import CustomGPT
from planner import made

from hybridpar.config import Config, ModelConfig, ParallelConfig
from hybridpar.job import JobPlan
from hybridpar.nn.attention import HeadLayout
from hybridpar.planner.costs.context import context_bytes, split_tokens
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.plan_report import describe, failures, parts_of, table
from hybridpar.planner.searching.remedies import Fitting
from hybridpar.planner.searching.search import search
from hybridpar.prediction import predict


def shared(config: Config, cp: int) -> Config:
    return replace(config, parallel=replace(config.parallel, cp=cp))


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 3), (3, 2), (2, 4)])
def test_received_bytes_are_the_formulas(tp: int, cp: int) -> None:
    """A rank receives (c - 1) / c of keys and values, 2 s n_kv d elements of a sample, forward and
    backward; only layers receive any."""
    model = ModelConfig(
        num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, seq_length=24, vocab_size=64
    )
    first, last = HeadLayout(48, 6, 2, tp).group_range(0)
    received = 2 * (cp - 1) * (24 // cp) * (last - first) * 8 * 2
    assert context_bytes(model, ParallelConfig(tp=tp, cp=cp, dp=1), "bf16") == {
        "embedding": (0, 0),
        "layer": (received, received),
        "head": (0, 0),
    }


def test_bytes_of_a_custom_model_are_counted() -> None:
    found = context_bytes(CustomGPT(), ParallelConfig(cp=2, dp=1), "bf16")
    # the first rank has 19 of 37 tokens: it receives the other 18, and gradients of its own
    assert [sizes for sizes in found.values() if any(sizes)] == [(2 * 18 * 24 * 2, 2 * 19 * 24 * 2)]


def test_a_rank_computes_for_its_tokens() -> None:
    cost = BlockCost(
        4.0,
        8.0,
        1.0,
        2.0,
        0.4,
        0.8,
        (100,),
        (200,),
        backward_input=5.0,
        remake=0.5,
        parameters=7,
        kept=96,
        forward_idle=1.0,
    )
    config = shared(made.config(), 2)
    assert split_tokens({"layer": cost}, config)["layer"] == BlockCost(
        2.5,
        4.0,
        1.0,
        2.0,
        0.2,
        0.4,
        (50,),
        (100,),
        backward_input=2.5,
        remake=0.25,
        parameters=7,
        kept=48,
        forward_idle=1.0,
    )
    uneven = shared(made.config(seq_length=33), 2)
    assert split_tokens({"layer": cost}, uneven)["layer"].backward == pytest.approx(8 * 17 / 33)


def test_a_step_with_cp() -> None:
    """Half the compute, the gathers of each layer, half of each message, and a reduction over dp
    and cp."""
    config = made.config(pp=2, dp=2, m=8)
    machine = made.machine(config, 8, inner=made.link(latency=0.01, bandwidth=1e6), memory=1e11)
    plain = StepCost(config, replace(machine, num_devices=4))
    half = StepCost(shared(config, 2), machine)
    assert (half.replicas, half.config.parallel.num_ranks) == (4, 8)
    # 2 samples of 32 tokens, 64 features of keys and values in float32; a ring passes half of them
    full = 2 * 2 * 32 * 64 * 4
    gather = machine.half_ring("gather", full, range(2), 4)[0]
    scatter = machine.half_ring("scatter", full, range(2), 4)[0]
    assert gather > 0
    assert half.context_waits["layer"] == pytest.approx((gather, scatter))
    assert plain.context_waits == {}
    for mine, whole in zip(half.stages, plain.stages, strict=True):
        layers = sum(half.kind(n) == "layer" for n in mine.blocks)
        assert mine.forward == pytest.approx(whole.forward / 2 + layers * gather)
        assert mine.backward == pytest.approx(whole.backward / 2 + layers * scatter)
    assert 2 * half.message_bytes == plain.message_bytes
    assert [*half.ranks_of(1)] == [4, 5, 6, 7]
    assert half.reduction(half.ranks[0], 0) > plain.reduction(plain.ranks[0], 0)
    assert parts_of(half).context == pytest.approx(8 * 4 * (gather + scatter), rel=0.5)
    assert parts_of(plain).context == 0


LONG = {"num_layers": 4, "hidden_size": 64, "seq_length": 2048}


@pytest.mark.thorough
def test_a_plan_shares_samples_that_do_not_fit_otherwise() -> None:
    config = replace(made.config(m=4, b=1, **LONG), parallel=made.ParallelConfig(dp=0))

    def peak(**axes: int) -> float:
        pipeline = replace(config.pipeline, recompute="all")
        on = replace(config, pipeline=pipeline, parallel=made.ParallelConfig(**axes))
        return max(stage.needed for stage in predict(JobPlan(on)))

    shared_peak = peak(cp=2, dp=1)
    least = peak(dp=2, zero=3)
    assert shared_peak < 0.8 * least
    room = (shared_peak + least) / 2
    times = made.profile(config, degrees=(1,), sizes=(1,), cores=2)
    machine = made.machine(config, 2, made=times, memory=room / 0.9)
    request = Request({"pp": 1, "tp": 1}, schedules=("1f1b",), split_backward=False, top=1)
    result = search(config, machine, request)
    best = result.ranked[0]
    assert best.config.parallel.cp == 2
    assert describe(best.config).startswith("tp=1 cp=2 pp=1 dp=1, ")
    assert [column.header for column in table(result).columns][1:5] == ["tp", "cp", "pp", "dp"]
    assert any("parallel.cp=2 would fit" in line for line in failures(result))
    plenty = replace(machine, memory=1e11)
    result = search(config, plenty, request)
    assert {one.config.parallel.cp for one in result.ranked} == {1}
    assert "cp" not in [column.header for column in table(result).columns]
    kept = search(shared(config, 2), plenty, replace(request, keep={"cp": 2, "tp": 1}))
    assert {one.config.parallel.cp for one in kept.ranked} == {2}


@pytest.mark.thorough
def test_the_longest_sequence_fits_and_grows_with_cp() -> None:
    """In proportion, as a ring keeps no keys but a rank's own; those that travel are one layer's."""
    base = made.config(m=1, b=1, **{**LONG, "num_layers": 10, "position": "rotary"})
    device = made.machine(base, 1).device
    limit = 1e8
    lengths = []
    for cp in (1, 2):
        config = replace(base, parallel=replace(base.parallel, cp=cp, cp_comm="ring"))
        fitting = Fitting(limit, device)
        longest = fitting.longest(config)

        def sized(length: int, config: Config = config) -> Config:
            return replace(config, model=replace(config.model, seq_length=length))

        assert fitting.peak(sized(longest)) <= limit < fitting.peak(sized(int(1.02 * longest)))
        lengths.append(longest)
    assert lengths[1] >= 0.95 * 2 * lengths[0]
    assert Fitting(1000.0, device).longest(base) == 0
