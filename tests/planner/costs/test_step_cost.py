"""Costs of configurations on machines made by hand, against sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner import made

from hybridpar.config import ParallelConfig, load_toml
from hybridpar.grid import lines_of
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimate, machine_of
from hybridpar.planner.machines.hardware import DEVICES, Cluster, Link, find_device, find_link
from hybridpar.planner.searching.bound import least_time
from hybridpar.planner.searching.plan_report import parts_of
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.state.reduction.partition import BUCKET_BYTES

FIGURE_12 = (
    (1, "all", 31),
    (2, "all", 47),
    (4, "all", 58),
    (8, "all", 63),
    (16, "all", 66),
    (1, "none", 40),
    (2, "none", 57),
    (4, "none", 67),
)
"""GPT 1.3B of PipeDream-2BW's paper (arXiv 2006.09503v3, figure 12a), read by eye: micro-batch,
recomputation, sequences a second."""


def test_one_rank_takes_the_sum_of_its_blocks() -> None:
    config = made.config(m=4, b=2)
    model = StepCost(
        config, made.machine(config, 1, made=made.profile(config, layer=1.0, head=0.5, update=0.25))
    )
    # 6 layers and the head, forward and backward of two samples; three kinds of block update, 8
    # blocks
    assert model.step_time == pytest.approx(4 * 2 * 3 * 6.5 + 7 * 0.25)
    assert least_time(model) == pytest.approx(model.step_time)


def test_a_drained_pipeline_has_its_bubble() -> None:
    config = made.config(pp=2, m=5, b=1, split=(4, 4))
    model = StepCost(
        config, made.machine(config, 2, made=made.profile(config, layer=1.0, head=0.0))
    )
    assert [stage.compute for stage in model.stages] == [9.0, 9.0]
    assert model.step_time == pytest.approx((5 + 2 - 1) * 9.0)
    assert least_time(model) <= model.step_time


def test_2bw_has_none() -> None:
    config = made.config(pp=2, m=5, b=1, split=(4, 4), schedule="2bw")
    model = StepCost(
        config, made.machine(config, 2, made=made.profile(config, layer=1.0, head=0.0))
    )
    assert model.step_time == pytest.approx(5 * 9.0)


def test_recomputation_is_another_forward_where_it_is() -> None:
    config = made.config(pp=2, m=4, b=1, split=(4, 4), recompute="0-1")
    stages = StepCost(config, made.machine(config, 2)).stages
    assert stages[0].backward - 2 * stages[0].forward == pytest.approx(2.0)
    assert stages[1].backward == pytest.approx(2 * stages[1].forward)
    cheap = made.config(pp=2, m=4, b=1, split=(4, 4), recompute="selective")
    for stage in StepCost(
        cheap, made.machine(cheap, 2, made=made.profile(cheap, remake=0.25))
    ).stages:
        assert stage.backward - 2 * stage.forward == pytest.approx(3 * 0.25)


def test_tensor_parallelism_waits_as_measured_and_pays_for_a_slower_link() -> None:
    config = made.config(tp=2, m=1, b=1)
    profile = made.profile(config, wait=0.5)
    here = made.machine(config, 2, made=profile)
    assert StepCost(config, here).waits["layer"] == (0.5, 0.5)
    slow = made.link(latency=0.1, bandwidth=1e4)
    machine = made.machine(config, 2, made=profile, per_server=1, outer=slow)
    one = slow.ring_time(1024, 2) - profile.links["local"].ring_time(1024, 2)
    assert StepCost(config, machine).waits["layer"] == pytest.approx((0.5 + 2 * one,) * 2)


def test_pipelines_that_leave_a_server_share_what_it_has() -> None:
    config = made.config(pp=2, dp=2, m=4, b=1)
    outer = made.link(latency=0.001, bandwidth=1e6)
    machine = made.machine(config, 4, per_server=2, outer=outer)
    model = StepCost(config, machine)
    n = model.message_bytes
    assert sum(model.links[0]) == pytest.approx(outer.transfer_time(n, 2))
    inside = StepCost(config, made.machine(config, 4))
    assert sum(inside.links[0]) == pytest.approx(made.link().transfer_time(n))


def test_ranks_of_tensor_parallelism_send_slices_and_gather_them() -> None:
    config = made.config(tp=2, pp=2, m=4, b=1, split=(4, 4))
    outer = made.link(latency=0.001, bandwidth=1e6)
    inner = made.link(latency=0.01, bandwidth=1e5)
    model = StepCost(config, made.machine(config, 4, per_server=2, inner=inner, outer=outer))
    n = model.message_bytes
    assert n == 4 * 32 * 64
    assert sum(model.links[0]) == pytest.approx(outer.transfer_time(n / 2, 2))
    first, last = model.stages
    gather = inner.ring_time(n, 2) / 2
    layer, head = (model.block_time(number) for number in (1, 7))
    assert (first.forward, first.backward) == pytest.approx((3 * layer[0], 3 * layer[1] + gather))
    assert (last.forward, last.backward) == pytest.approx(
        (3 * layer[0] + head[0] + gather, 3 * layer[1] + head[1])
    )
    assert parts_of(model).tensor == pytest.approx(4 * (3 * sum(model.waits["layer"]) + gather))
    assert model.gathers(range(8)) == (0.0, 0.0), "between no stages"


def test_zero_shares_the_update_and_halves_the_reduction() -> None:
    base, sharded = made.config(dp=2, m=2), made.config(dp=2, m=2, zero=1)
    slow = made.link(latency=0.5)
    plain, shared = (
        StepCost(c, made.machine(c, 2, made=made.profile(c, update=1.0), inner=slow))
        for c in (base, sharded)
    )
    assert shared.stages[0].update == pytest.approx(plain.stages[0].update / 2)
    assert shared.costs.reduce[0] == pytest.approx(plain.costs.reduce[0] / 2)  # type: ignore[index]
    assert shared.costs.gather[0] == pytest.approx(shared.costs.reduce[0])  # type: ignore[index]


def test_tied_weights_are_held_once_on_one_stage_and_reduced_over_both_ends() -> None:
    together = StepCost(made.config(m=2), made.machine(made.config(), 1))
    assert together.stages[0].tied == 0
    config = made.config(pp=2, m=2)
    apart = StepCost(config, made.machine(config, 2))
    assert apart.stages[0].tied == 20000 - 32 * 64  # without the position table
    assert (
        StepCost(made.config(pp=2, m=2, max_positions=50), apart.machine).stages[0].tied
        == 20000 - 50 * 64
    )
    assert apart.costs.tied


def test_ranks_that_share_cores_slow_down_and_waiting_is_no_work() -> None:
    config = made.config(pp=2, dp=2, m=8, b=1, split=(4, 4))
    profile = made.profile(config, head=0.0, cores=2)
    shared = StepCost(config, made.machine(config, 4, made=profile)).step_time
    alone = StepCost(config, made.machine(config, 4, made=made.profile(config, head=0.0))).step_time
    assert shared == pytest.approx(2 * alone, rel=0.2)
    tp = made.config(tp=2, m=8, b=1)
    busy, waiting = (
        StepCost(tp, made.machine(tp, 2, made=made.profile(tp, cores=1, wait=w)))
        for w in (0.0, 1.0)
    )
    assert waiting.costs.cores > busy.costs.cores  # type: ignore[operator]


@pytest.mark.parametrize("latency", [0.0, 400.0, 900.0])
def test_a_reduction_that_more_micro_batches_hide(latency: float) -> None:
    """Few of them all wait for it, so they do not tell what many take."""
    config = made.config(pp=2, dp=2, m=100, b=1, split=(4, 4), schedule="2bw")
    inner = made.link(latency=latency)
    model = StepCost(
        config, made.machine(config, 4, made=made.profile(config, head=0.0), inner=inner)
    )
    exact = predict_timeline(model.schedule_options, model.shape, model.costs).step_time(100)
    assert model.step_time == pytest.approx(exact, rel=1e-6)
    assert least_time(model) <= model.step_time * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_many_micro_batches_take_what_their_simulation_takes(schedule: str) -> None:
    config = made.config(pp=3, m=200, b=1, schedule=schedule)
    model = StepCost(config, made.machine(config, 3))
    exact = predict_timeline(model.schedule_options, model.shape, model.costs).step_time(200)
    assert model.step_time == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("tp", "dp", "links"), [(1, 4, 1), (2, 2, 1), (2, 2, 2), (4, 1, 1)])
def test_tied_weights_are_one_ring_a_tensor_part_over_the_ends_of_all_replicas(
    tp: int, dp: int, links: int
) -> None:
    """Computed by hand: 2 (n - 1) steps of 1 / n of the bytes, n = 2 dp, on a card that the rings
    of tp share."""
    config = made.config(tp=tp, pp=2, dp=dp, m=4, b=1, split=(4, 4))
    outer = Link("outer", 1e6, 1e-3, share=1.0)
    cluster = Cluster(DEVICES["v100-16gb"], 4, 2, Link("inner", 1e12, 0.0), outer, links)
    profile = made.profile(config, degrees=(tp,))
    model = StepCost(config, machine_of(cluster, profile))
    first, last = model.stages
    assert first.tied == last.tied > 0
    ends = lines_of({"pp": 2, "dp": dp, "tp": tp})["embedding_group"]
    assert len(ends) == tp
    assert [*model.ranks_of(0), *model.ranks_of(1)] == ends[0]
    assert all({rank // 4 for rank in ring} == {0, 1} for ring in ends), (
        "each ring takes both servers' cards"
    )
    n = 2 * dp
    share = max(tp / links, 1)
    by_hand = 2 * (n - 1) * (1e-3 + 4 * first.tied / n * share / 1e6)
    assert 4 * first.tied < BUCKET_BYTES
    of_replicas = model._in_buckets(4 * (first.parameters - first.tied), model.ranks_of(0))
    assert model.reduction(first, 0)[0] - of_replicas == pytest.approx(by_hand)


def test_tied_embeddings_of_eight_replicas_cost_their_bytes_over_the_card() -> None:
    """GPT 2.2B, pp=8 dp=8 on 8 servers of 8 V100, 25 Gbit/s: 464 MB in a ring of 16, and not eight
    times that."""
    config = load_toml("scripts/configs/gpt_2b2_paper.toml")
    pipeline = replace(config.pipeline, num_microbatches=8, split=(6, 5, 5, 5, 5, 5, 2, 1))
    config = replace(config, parallel=ParallelConfig(1, 8, 8), pipeline=pipeline)
    cluster = Cluster(
        find_device("v100-16gb"), 8, 8, find_link("nvlink2"), find_link("ethernet-25")
    )
    model = StepCost(config, machine_of(cluster, estimate(config, cluster, (8,))))
    tied = 4 * 50304 * 2304
    card = 0.6 * 25e9 / 8
    assert model.reduction(model.stages[0], 0)[0] == pytest.approx(
        2 * 15 / 16 * tied / card, rel=0.1
    )
    assert 1e3 * model.step_time == pytest.approx(2534, rel=0.02)


@pytest.mark.parametrize(("micro_batch", "recompute", "read"), FIGURE_12)
def test_small_micro_batches_are_as_slow_as_published(
    micro_batch: int, recompute: str, read: float
) -> None:
    """Sequences a second of 2bw on 8 V100s with the paper's equal layers on every stage."""
    assert published_speed(micro_batch, recompute) == pytest.approx(read, rel=0.2)


def published_speed(micro_batch: int, recompute: str) -> float:
    config = load_toml("scripts/configs/gpt_1b3_paper.toml")
    pipeline = replace(
        config.pipeline,
        num_microbatches=256 // micro_batch,
        recompute=recompute,
        split=(4, 3, 3, 3, 3, 3, 3, 4),
    )
    train = replace(config.train, micro_batch_size=micro_batch, device="cuda")
    config = replace(config, parallel=ParallelConfig(pp=8, dp=1), pipeline=pipeline, train=train)
    link = find_link("nvlink2")
    cluster = Cluster(find_device("v100-16gb"), 8, 1, link, link)
    profile = estimate(config, cluster, (micro_batch,))
    return 256 / StepCost(config, machine_of(cluster, profile)).step_time
