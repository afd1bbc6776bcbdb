"""Costs with sequence parallelism, from those without; and plans that have it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planner import made

from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from hybridpar.job import JobPlan
from hybridpar.planner.costs.sequence import split_rows, with_split_rows
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimated
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.machines.kernel_times import HALF
from hybridpar.planner.measuring.bench import Bench
from hybridpar.planner.measuring.profile import BlockCost, check_settings
from hybridpar.planner.searching.candidates import Request, candidates
from hybridpar.planner.searching.search import search
from hybridpar.prediction import predict
from hybridpar.prediction.fake_neighbours import silent_axis


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_messages_are_those_that_the_blocks_send(kind: str) -> None:
    """Large all-reduces are replaced; sums of the loss stay, and sums of the rows that have a
    label, all that BERT's head has."""
    config = made.config(tp=2, num_layers=2, kind=kind)
    sent = {}
    for one in (config, with_split_rows(config)):
        blocks: dict[str, dict[str, tuple[int, ...]]] = {}
        for what, kind, sizes in Bench(
            one, 2, silent_axis("tp", 2), torch.device("cpu")
        ).messages():
            blocks.setdefault(kind, {})[f"{what}_messages"] = sizes
        sent[one.parallel.sequence] = {
            kind: BlockCost(1.0, 2.0, 0.0, 0.0, 0.3, 0.3, **messages)
            for kind, messages in blocks.items()
        }
    for kind, cost in split_rows(sent[False], config).items():
        for of in ("forward_messages", "backward_messages"):
            assert sum(getattr(cost, of)) == sum(getattr(sent[True][kind], of)), (kind, of)
        if kind == "layer":
            assert (cost.forward_wait, cost.backward_wait) == pytest.approx((0.3, 0.45))


def servers(number: int = 1) -> tuple[Config, Cluster]:
    model = ModelConfig(
        num_layers=8, hidden_size=4096, num_heads=32, seq_length=2048, vocab_size=51200
    )
    config = Config(
        model=model,
        parallel=ParallelConfig(8, 1, 1),
        pipeline=PipelineConfig("1f1b", num_microbatches=4),
        train=TrainConfig(dtype="bf16", micro_batch_size=4, device="cuda"),
    )
    nvlink = find_link("nvlink3")
    return config, Cluster(find_device("a100-80gb"), 8, number, nvlink, find_link("infiniband-hdr"))


def test_norms_take_a_part_of_their_time() -> None:
    """Two norms and what is added before them read and write 18 h numbers of a token in both
    passes, 8 and 10."""
    config, cluster = servers()
    machine = estimated(config, cluster)
    (plain, back), (split, split_back) = (
        (cost.block(1).forward, cost.block(1).backward)
        for cost in (StepCost(config, machine), StepCost(with_split_rows(config), machine))
    )
    norms = cluster.device.memory_time(HALF * 4 * 2048 * 4096 * 7 / 8)
    assert (plain - split, back - split_back) == pytest.approx((8 * norms, 10 * norms))


@pytest.mark.parametrize("fast", [True, False])
def test_it_is_chosen_where_norms_save_more_than_another_gather_takes(fast: bool) -> None:
    config, cluster = servers()
    config = replace(config, parallel=ParallelConfig(dp=0))
    link = cluster.inner if fast else replace(cluster.inner, bandwidth=cluster.inner.bandwidth / 20)
    machine = estimated(config, replace(cluster, inner=link))
    found = candidates(
        config, machine, Request(keep={"tp": 8}, micro_batches=(4,), split_backward=False)
    )
    assert {one.config.parallel.sequence for one in found} == {fast}
    asked = candidates(
        with_split_rows(config), machine, Request(keep={"tp": 8}, micro_batches=(4,))
    )
    assert all(one.config.parallel.sequence for one in asked)


@pytest.mark.thorough
def test_it_is_tried_before_layers_are_computed_twice() -> None:
    """On a machine where it is a little slower, with room for it and not for what there is
    without."""
    config = made.config(tp=2, m=8, b=2, num_layers=4, hidden_size=96, seq_length=256)
    plain, split = (
        max(stage.total for stage in predict(JobPlan(one)))
        for one in (config, with_split_rows(config))
    )
    profile, request = (
        made.profile(config, wait=0.7, remake=0.3, sizes=(2,)),
        Request(keep={"tp": 2, "pp": 1}, micro_batches=(2,), split_backward=False),
    )

    def ranked(memory: float) -> list[tuple[bool, str]]:
        on = made.machine(config, 2, made=profile, memory=memory / 0.96 + 1.5 * 2**30)
        found = [one.config for one in search(config, on, request).ranked]
        return [(one.parallel.sequence, one.pipeline.recompute) for one in found]

    assert ranked(1e11) == [(False, "none")]
    assert 1.04 * split < plain
    tight = ranked(1.04 * split)
    assert tight.index((True, "none")) < tight.index((False, "all"))
    assert (False, "none") not in tight


def test_a_plan_with_it_may_be_simulated_from_the_profile_it_came_from() -> None:
    config = made.config(tp=2)
    profile = made.profile(config)
    check_settings(profile, with_split_rows(config))
    cost = StepCost(with_split_rows(config), made.machine(config, 2, made=profile))
    assert len(cost.block(1).backward_messages) == 6
