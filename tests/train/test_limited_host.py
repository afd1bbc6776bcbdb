"""The optimizer on the host in limited memory: one group at a time, with the same bits."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PIPELINES, Outcome, gpt, samples, train
from ranks import run_ranks
from train.runs import must_be_killed, poison_gradients

from hybridpar import checkpoint
from hybridpar.config import Config, MemoryConfig
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.prediction.meter import measure
from hybridpar.prediction.predict import predict
from hybridpar.schedules.action import PER_ITEM, Action, Kind
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.state.host import HostWork
from hybridpar.state.residency.device_tier import DeviceTieredMemory
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine, Residency
from hybridpar.train.forecasts.ghost_rank import GhostRank
from hybridpar.train.forecasts.tier_forecast import forecast
from hybridpar.verify.run import Disturbance, verify

CPU = torch.device("cpu")
PLENTY = 1 << 30


def make(**sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes with dropout; three layers, one segment each."""
    return gpt(
        (3, 48, 6, 14, 131),
        {"model": {"dropout": 0.1}, "parallel": {"dp": 1}, "pipeline": {"num_microbatches": 4}},
        sections,
    )


def limited(
    config: Config, folder: Path, share: float = 0.0, field: str = "budget", *, host: bool = True
) -> Config:
    """The configuration with a host and the least memory that works and a share of the rest."""
    plenty = MemoryConfig(folder=str(folder), host_optimizer=host, **{field: PLENTY})
    job = JobPlan(replace(config, memory=plenty))
    ranks = range(0, config.parallel.num_ranks, config.parallel.num_ranks // config.parallel.pp)
    found = [forecast(job, rank) for rank in ranks]
    least = max(one.least for one in found)
    most = max(one.state for one in found)
    if field == "limit":
        most = max(stage.total for stage in predict(job))
    return replace(config, memory=replace(plenty, **{field: int(least + share * (most - least))}))


def build(config: Config, **of_engine: Any) -> Engine:
    return Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), CPU, **of_engine)


def run(config: Config, *stretches: int, **of_engine: Any) -> Outcome:
    """Train with a limit, or without one in equal segments; note the bytes moved."""
    if not config.memory.is_limited:
        config = replace(config, memory=MemoryConfig(parts=config.model.num_blocks))
    engine = build(config, **of_engine)
    outcome = train(engine, *(stretches or (2, 1)))
    if config.memory.is_limited:
        outcome.moved = moved(engine)
    return outcome


def moved(engine: Engine) -> int:
    assert isinstance(engine.state.memory, TieredMemory)
    tiers = engine.state.memory.tiers
    assert tiers.traffic.peak <= engine.state.memory.budget
    engine.close()
    return tiers.traffic.read + tiers.traffic.written


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_any_budget_gives_the_same_bits(
    pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(pipeline=pipeline, train={"dtype": dtype})
    whole = run(config)
    for field, share in (("budget", 0.0), ("budget", 0.2), ("limit", 0.1)):
        tight = run(limited(config, tmp_path, share, field))
        tight.check(whole)
        assert tight.moved > 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_optimizers_and_skipped_steps(
    optimizer: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_gradients(monkeypatch, {1})
    config = make(pipeline={"schedule": "2bw"}, train={"dtype": dtype}, optim={"name": optimizer})
    tight = run(limited(config, tmp_path), 4)
    tight.check(run(config, 4))
    assert [step.step for step in tight.steps if step.skipped] == [2]


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "schedule", "dtype", "field"),
    [
        ({"dp": 2, "zero": 3}, "2bw", "fp32", "limit"),
        ({"pp": 2, "dp": 2, "zero": 1}, "2bw", "bf16", "budget"),
        ({"dp": 2, "zero": 2}, "1f1b", "bf16", "budget"),
        ({"tp": 2, "pp": 2}, "interleaved", "fp32", "limit"),
    ],
    ids=str,
)
def test_grids(
    parallel: dict[str, Any], schedule: str, dtype: str, field: str, tmp_path: Path
) -> None:
    config = make(parallel=parallel, pipeline={"schedule": schedule}, train={"dtype": dtype})
    ranks = config.parallel.num_ranks
    tight = limited(config, tmp_path, 0.1, field)
    outcomes, wholes = (run_ranks(run, ranks, each) for each in (tight, config))
    for outcome, whole in zip(outcomes, wholes, strict=True):
        outcome.check(whole)
    assert any(outcome.moved for outcome in outcomes)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_grids_agree_with_one_process(zero: int, schedule: str) -> None:
    """In float64, with a skipped batch, and resumed."""
    config = make(
        model={"dropout": 0.0},
        parallel={"zero": zero},
        pipeline={"schedule": schedule, "num_microbatches": 3},
        memory={"host_optimizer": True, "budget": 1 << 20},
    )
    disturbance = Disturbance(frozenset({1}), 2)
    report = verify(config, {"tp": 2, "pp": 2, "dp": 2}, 4, disturbance)
    assert max(worst.error for worst in report.worst.values()) < 1e-9


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("method", ["powersgd", "int8", "bf16", "int4", "dct", "sbpca"])
def test_compressed_gradients(method: str, schedule: str, tmp_path: Path) -> None:
    """Unsent gradients move, too: they are needed at a segment's last backward of a batch."""
    config = make(
        model={"num_layers": 2},
        parallel={"dp": 2, "zero": 1},
        pipeline={"schedule": schedule},
        compression={"gradients": method, "gradients_smallest": 100},
        train={"dtype": "bf16" if schedule == "2bw" else "fp32"},
    )
    tight = limited(config, tmp_path, 0.1, host=schedule == "2bw")
    outcomes, wholes = (run_ranks(run, 2, each) for each in (tight, config))
    for outcome, whole in zip(outcomes, wholes, strict=True):
        outcome.check(whole)
        assert outcome.moved > 0
        unsent = [key for key in outcome.tensors if key.startswith("feedback/")]
        assert bool(unsent) == (method != "sbpca")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"dp": 2, "zero": 2}}, "all of them are needed until its update.*try none"),
        ({"parallel": {"dp": 2}, "train": {"dtype": "fp16"}}, "rescales all unsent gradients"),
    ],
    ids=["zero", "fp16"],
)
def test_room_that_compression_needs_at_once(sections: dict[str, Any], message: str) -> None:
    compression = {"gradients": "int8"}
    config = make(**sections, compression=compression, memory={"budget": PLENTY})
    assert re.search(
        rf"compression\.gradients = 'int8'.*{message}", str(ConfigError(*conflicts(config)))
    )


class DeviceBesideAHost(DeviceTieredMemory):
    """The memory of a GPU, whose host has copies of its own; the device here is a CPU."""

    is_of_host = False

    def __init__(self, budget: int):
        super().__init__(budget, CPU)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_and_weights_are_copied_group_by_group(dtype: str, tmp_path: Path) -> None:
    """A GPU's: the host keeps master copy and moments, and the tiers weights and gradients alone."""
    config = make(pipeline={"schedule": "2bw"}, train={"dtype": dtype})
    probe = replace(config, memory=MemoryConfig(budget=PLENTY, host_optimizer=True))
    engine = build(probe, residency=Residency(DeviceBesideAHost(PLENTY)))
    accesses = engine.moves.accesses
    budget = accesses.least_budget()
    kinds = {item.kind.partition("/")[0] for item in accesses.moving.values()}
    engine.close()
    assert kinds == {"weights", "gradients"}
    tight = replace(probe, memory=replace(probe.memory, budget=budget))
    found = run(tight, residency=Residency(DeviceBesideAHost(budget)))
    found.check(run(config))
    assert found.moved > 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_memory_never_exceeds_the_limit(schedule: str, tmp_path: Path) -> None:
    """State that is resident, and what the allocator counts besides, while a slow host works."""
    config = make(pipeline={"schedule": schedule}, model={"dropout": 0.1, "seq_length": 40})
    config = limited(config, tmp_path, 0.2, "limit")
    held: list[int] = []
    actions: list[Action] = []

    def watched(plan: Any) -> Any:
        for action in plan:
            if actions and actions[-1].kind not in PER_ITEM:
                held.append(meter.read().peak + tiers.budget)
            meter.restart_peak()
            actions.append(action)
            yield action

    engine = build(config, wrap_plan=watched, residency=Residency(host_work=Slow()))
    assert isinstance(engine.state.memory, TieredMemory)
    tiers = engine.state.memory.tiers
    loader = samples(engine)
    with measure(CPU) as meter:
        engine.train(loader, 3, lambda result: None)
    assert moved(engine) > 0
    assert 0.9 * config.memory.limit < max(held) <= 1.001 * config.memory.limit


class Slow(HostWork):
    """Takes a while for each group."""

    def step(self, step: Callable[[], None], numel: int) -> None:
        time.sleep(2e-3)
        step()


class Deadly(HostWork):
    """Ends the process in the third batch: some groups are made, and the next ones are not."""

    num_steps = 0

    def step(self, step: Callable[[], None], numel: int) -> None:
        self.num_steps += 1
        if self.num_steps == 5 * 2 + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        step()


def killed(config: Config, folder: Path) -> None:
    engine = build(config, residency=Residency(host_work=Deadly()))
    train(engine, 2)
    checkpoint.save(folder, engine, "corpus")
    train(engine, 3)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_kill_is_gone_on_from_to_the_bit(tmp_path: Path) -> None:
    config = make(pipeline={"schedule": "2bw"}, train={"num_steps": 10, "dtype": "bf16"})
    tight = limited(config, tmp_path / "state")
    must_be_killed(partial(killed, tight, tmp_path / "saved"))
    whole = run(config, 2, 3)
    for resumed in (tight, replace(config, memory=MemoryConfig(parts=config.model.num_blocks))):
        engine = build(resumed)
        checkpoint.resume(tmp_path / "saved", engine, "corpus", print)
        train(engine, 3, steps=whole.steps[:2]).check(whole)
        engine.close()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("fetch", [0.5, 2.0])
def test_under_2bw_it_costs_no_more_than_the_budget_alone(
    fetch: float, dtype: str, tmp_path: Path
) -> None:
    """Simulated steps, from a tenth above the least budget on: two groups are held at a time."""
    base = make(
        model={"num_layers": 6, "tie_embeddings": False},
        pipeline={"schedule": "2bw"},
        train={"dtype": dtype},
    )
    hosted = limited(base, tmp_path, 0.1)
    alone = replace(hosted, memory=replace(hosted.memory, host_optimizer=False))
    assert simulated_step(hosted, fetch) <= 1.02 * simulated_step(alone, fetch)


def simulated_step(config: Config, fetch: float) -> float:
    """A steady step on a rank that updates alone, or waits for its host, in forwards."""
    job = JobPlan(config)
    rank = GhostRank.of(job, 0)
    pools = {0: rank.pools(job.shape)}
    plan = {0: tuple(rank.moved(ScheduleOptions.of(config), job.shape, 8))}
    costs = Costs(
        1.0,
        3.0,
        0.0 if rank.hosted else 1.0,
        fetch=fetch,
        release=fetch,
        host=1.0,
        host_shares=[rank.hosted] if rank.hosted else (),
    )
    starts = simulate(plan, costs, pools).batch_starts(job.shape.num_microbatches)
    return (starts[-2] - starts[2]) / (len(starts) - 4)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_a_plan_is_proved_and_simulated(schedule: str, tmp_path: Path) -> None:
    """Each group has a HOST, one ahead of its UPDATE; a slow host delays forwards by its time."""
    config = limited(make(pipeline={"schedule": schedule}), tmp_path, 0.5)
    job = JobPlan(config)
    ghost = GhostRank.of(job, 0)
    pools = {0: ghost.pools(job.shape)}
    plan = {0: tuple(ghost.moved(ScheduleOptions.of(config), job.shape, 4))}
    check(plan, job.shape, job.schedule, pools=pools)
    groups = len(ghost.hosted)
    order = [str(action) for action in plan[0] if action.kind in (Kind.HOST, Kind.UPDATE)]
    assert len(order) == 4 * 2 * groups
    assert order[:5] == ["HOST0@0", "HOST0@0.1", "UPDATE0@0", "HOST0@0.2", "UPDATE0@0.1"]
    quick, slow = (
        simulate(plan, Costs(1.0, 2.0, host=host, host_shares=[ghost.hosted]), pools)
        for host in (0.0, 2.0)
    )
    late = slow.makespan - quick.makespan
    assert 0.5 * 4 * 2.0 < late < 4 * 2.0, "some of it is beside forwards of earlier segments"
