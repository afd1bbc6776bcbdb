"""Costs with packed documents, from those with one document a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planner import made

from hybridpar.config import Config, DataConfig, TrainConfig
from hybridpar.models.cost import document_share
from hybridpar.planner.costs.documents import within_documents
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.assumptions import document_lines
from hybridpar.planner.machines.cluster import estimate, estimated, read_cluster
from hybridpar.planner.measuring.profile import BlockCost, Profile

CLUSTER = """
servers = 1
devices_per_server = 4
device = "a100-80gb"
inner = "nvlink3"
"""


def packed(config: Config, length: float) -> Config:
    return replace(config, data=DataConfig(packing="stream", document_length=length))


def with_attention(profile: Profile, share: float) -> Profile:
    """The profile with so much of the layers' passes in attention."""
    blocks = {
        (kind, tp, b): replace(
            cost, forward_attention=share * cost.forward, backward_attention=share * cost.backward
        )
        if kind == "layer"
        else cost
        for (kind, tp, b), cost in profile.blocks.items()
    }
    return replace(profile, blocks=blocks)


def test_attention_takes_the_share_of_the_pairs() -> None:
    """Rows of 32 tokens have 32 * 33 / 2 pairs, four documents of 8 have 4 * 8 * 9 / 2."""
    share = 9 / 33
    cost = BlockCost(
        4.0, 8.0, 1.0, 2.0, backward_input=5.0, forward_attention=2.0, backward_attention=4.0
    )
    head = BlockCost(3.0, 6.0, 0.0, 0.0)
    costs = {"embedding": head, "layer": cost, "head": head}
    found = within_documents(costs, packed(made.config(), 8.0))
    assert found["head"] == head
    assert found["layer"] == BlockCost(
        pytest.approx(2.0 + 2.0 * share),
        pytest.approx(4.0 + 4.0 * share),
        1.0,
        2.0,
        backward_input=pytest.approx(1.0 + 4.0 * share),
        forward_attention=pytest.approx(2.0 * share),
        backward_attention=pytest.approx(4.0 * share),
    )


def test_a_device_that_waits_for_launches_waits_longer() -> None:
    cost = BlockCost(4.0, 8.0, 0.0, 0.0, forward_idle=1.0, forward_attention=2.0)
    costs = {"embedding": cost, "layer": cost, "head": cost}
    found = within_documents(costs, packed(made.config(), 8.0))["layer"]
    saved = 2.0 * 24 / 33
    assert (found.forward, found.forward_idle) == (4.0, pytest.approx(1.0 + saved))


@pytest.mark.parametrize("pattern", ["1", "01"])
def test_windows_leave_less_for_documents_to_hide(pattern: str) -> None:
    """A window of 6 tokens hides more than documents of 8 do."""
    config = made.config(window=6, window_pattern=pattern)
    cost = BlockCost(1.0, 1.0, 0.0, 0.0, forward_attention=1.0)
    kinds = ["embedding", "layer", *["layer with window"] * (pattern == "01"), "head"]
    found = within_documents(dict.fromkeys(kinds, cost), packed(config, 8.0))
    seen = [sum(min(query + 1, 6) for query in range(n)) / n for n in (8, 32)]
    assert found[kinds[-2]].forward == pytest.approx(seen[0] / seen[1])
    if pattern == "01":
        assert found["layer"].forward == pytest.approx(9 / 33)


def test_a_step_costs_less_by_what_attention_saves() -> None:
    """One stage and 8 micro-batches: forward, and backward of twice the time, of 6 layers."""
    config = made.config(dp=1)
    machine = made.machine(config, 1, made=with_attention(made.profile(config), 0.5))
    plain, shorter = (StepCost(packed(config, n), machine).step_time for n in (0.0, 8.0))
    saved = 8 * 6 * 2 * 3 * 0.5 * (1 - 9 / 33)
    assert plain - shorter == pytest.approx(saved)


def test_estimates_say_how_long_attention_takes(tmp_path: Path) -> None:
    """Half of the causal matrix, at the rate of the device: four times as much for twice the
    tokens, but for shorter kernels at the ends."""
    config = replace(made.config(seq_length=4096), train=TrainConfig(dtype="bf16"))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster = read_cluster(tmp_path / "cluster.toml")
    longer = replace(config, model=replace(config.model, seq_length=8192))
    once, twice = (estimate(one, cluster).block("layer", 1, 1) for one in (config, longer))
    assert 0 < once.forward_attention < once.forward
    assert once.backward_attention > 2 * once.forward_attention
    assert 3.5 < twice.forward_attention / once.forward_attention < 4
    machine = estimated(config, cluster, 1)
    config = replace(config, parallel=replace(config.parallel, dp=1))
    plain, shorter = (StepCost(packed(config, n), machine) for n in (0.0, 64.0))
    assert shorter.step_time < plain.step_time
    assert shorter.tokens_per_s > plain.tokens_per_s
    flops = [cost.mfu * cost.machine.peak_flops / cost.tokens_per_s for cost in (shorter, plain)]
    attention = 6 * config.model.num_layers * config.model.hidden_size * 4096
    share = document_share(4096, 64.0)
    assert flops[1] - flops[0] == pytest.approx(attention * (1 - share), rel=1e-6)


def test_a_plan_says_which_documents_it_assumes() -> None:
    config = made.config()
    profile = made.profile(config)
    assert document_lines(config, profile) == []
    (line,) = document_lines(packed(config, 0.0), profile)
    assert line.startswith("documents fill a row, so attention costs the most")
    (line,) = document_lines(packed(config, 8.0), profile)
    assert "the profile does not say how long attention takes" in line
    (line,) = document_lines(packed(config, 8.0), with_attention(profile, 0.5))
    assert line == "documents of 8 tokens (data.document_length)"
