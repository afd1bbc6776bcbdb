"""Costs with expert parallelism, from those without; and plans that have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner import made

from hybridpar.config import Config, ModelConfig, ParallelConfig
from hybridpar.planner.costs.experts import expert_bytes, held_parameters, split_experts
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.measuring.profile import BlockCost
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.plan_report import describe, parts_of, table
from hybridpar.planner.searching.search import search
from hybridpar.prediction.work import KINDS

EXPERTS = {
    "num_experts": 6,
    "router_topk": 2,
    "expert_ffn_hidden_size": 16,
    "activation": "swiglu",
    "bias": False,
}


def shared(config: Config, ep: int, **axes: int) -> Config:
    return replace(config, parallel=replace(config.parallel, ep=ep, **axes))


@pytest.mark.parametrize(("cp", "ep"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)])
def test_sent_bytes_are_the_formula(cp: int, ep: int) -> None:
    """A rank sends the rows of its tokens and the outputs of others': k h numbers a token each, of
    which 1 / ep stay; and loads of 8 bytes."""
    model = ModelConfig(num_layers=2, hidden_size=48, num_heads=6, seq_length=24, **EXPERTS)
    tokens = 24 // cp
    rows = 2 * 2 * tokens * 48 * 2
    found = expert_bytes(model, ParallelConfig(cp=cp, dp=max(ep // cp, 1), ep=ep), "bf16")
    forward, backward = found["layer"]
    sent = (rows * (ep - 1) // ep, (rows + 6 * 8) * (ep - 1) // ep)
    # 6 experts over 4 ranks are 2, 2, 1, 1: the first one computes more rows than it has
    if 6 % ep:
        assert forward > sent[1]
    else:
        assert (backward, forward) == sent
    assert found["embedding"] == found["head"] == (0, 0)


def test_a_rank_has_a_share_of_the_experts() -> None:
    """Four ranks have 2, 2, 1 and 1 of 6 experts; the first counts."""
    model = ModelConfig(num_layers=2, hidden_size=48, num_heads=6, seq_length=24, **EXPERTS)
    held = held_parameters(model, ParallelConfig(ep=4, dp=4))["layer"]
    one = 3 * 48 * 16
    assert held.own == 2 * one
    assert held.all == held.others + 6 * one
    config = made.config(dp=4, **EXPERTS)
    held = held_parameters(config.model, ParallelConfig(ep=4, dp=4))["layer"]
    cost = BlockCost(4.0, 8.0, 1.0, 2.0, parameters=held.all)
    share = (held.others + held.own) / held.all
    costs = dict.fromkeys(KINDS, cost)
    split = split_experts(costs, shared(config, 4))["layer"]
    assert split.parameters == held.others + held.own
    assert (split.norm, split.update) == pytest.approx((share, 2 * share))
    assert (split.forward, split.backward) == (4.0, 8.0)
    zero = split_experts(costs, shared(config, 4, zero=1))["layer"]
    assert zero.update == pytest.approx(2 * (held.others + 4 * held.own) / held.all)


def test_a_step_with_ep() -> None:
    """The exchanges of each layer, and a reduction of what is not an expert's over all replicas, of
    an expert over those that have it."""
    config = made.config(pp=2, dp=4, m=8, **EXPERTS)
    machine = made.machine(config, 8, inner=made.link(latency=0.01, bandwidth=1e6), memory=1e11)
    plain = StepCost(config, machine)
    split = StepCost(shared(config, 2), machine)
    forward, backward = expert_bytes(config.model, ParallelConfig(ep=2, dp=2), "fp32")["layer"]
    times = [
        machine.half_ring("gather", 2 * 2 * sent, range(2), 8)[0] for sent in (forward, backward)
    ]
    assert times[1] > 0
    assert split.expert_waits["layer"] == pytest.approx(tuple(times))
    assert plain.expert_waits == {}
    for mine, whole in zip(split.stages, plain.stages, strict=True):
        layers = sum(split.kind(n) == "layer" for n in mine.blocks)
        assert mine.forward == pytest.approx(whole.forward + layers * times[0])
        assert mine.backward == pytest.approx(whole.backward + layers * times[1])
        assert mine.parameters < whole.parameters
        assert mine.experts == layers * 3 * 3 * 64 * 16
        assert whole.experts == 0
    alone = StepCost(shared(config, 4), machine)
    reduced = [one.reduction(one.ranks[0], 0)[0] for one in (plain, split, alone)]
    assert reduced == sorted(reduced, reverse=True), "fewer bytes, over fewer ranks"
    assert parts_of(split).experts > 0
    assert parts_of(plain).experts == 0


@pytest.mark.thorough
def test_a_plan_shares_experts_that_do_not_fit_otherwise() -> None:
    model = EXPERTS | {"num_experts": 16, "expert_ffn_hidden_size": 256}
    config = replace(made.config(m=4, b=1, **model), parallel=ParallelConfig(dp=0))
    times = made.profile(config, degrees=(1,), sizes=(1,), cores=2)
    request = Request({"pp": 1, "tp": 1, "cp": 1}, schedules=("1f1b",), split_backward=False, top=1)
    plenty = made.machine(config, 4, made=times, memory=1e11)
    roomy = search(config, plenty, request).ranked[0]
    assert roomy.memory is not None
    least = min(
        max(stage.needed for stage in one.memory or ())
        for one in search(shared(config, 4), plenty, request).ranked
    )
    machine = replace(plenty, memory=1.2 * least / 0.9)
    result = search(config, machine, replace(request, top=3))
    assert result.ranked
    assert {one.config.parallel.ep for one in result.ranked} <= {2, 4}
    assert "ep=" in describe(result.ranked[0].config)
    assert "ep" in [column.header for column in table(result).columns]
    kept = search(config, plenty, replace(request, keep={**request.keep, "ep": 1}))
    assert {one.config.parallel.ep for one in kept.ranked} == {1}
