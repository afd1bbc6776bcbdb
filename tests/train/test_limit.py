"""memory.limit: state gets at each action what activations leave; the same bits, and never more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PIPELINES, Outcome, gpt, samples, train
from ranks import run_ranks
from train.runs import poison_gradients

from hybridpar import checkpoint
from hybridpar.config import Config, MemoryConfig
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.prediction.meter import measure
from hybridpar.prediction.predict import predict
from hybridpar.schedules.action import PER_ITEM, Action
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine
from hybridpar.train.equal_plans import require_equal_plans
from hybridpar.train.forecasts.tier_forecast import (
    forecast,
    forecasts,
    search_segments,
    segments_line,
)

CPU = torch.device("cpu")
PLENTY = 1 << 30


def make(**sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes whose activations take as much memory as its state."""
    model = {"dropout": 0.1, "seq_length": 40, **sections.pop("model", {})}
    train = {"micro_batch_size": 2, **sections.pop("train", {})}
    pipeline = {"num_microbatches": 4, **sections.pop("pipeline", {})}
    parallel = {"dp": 1, **sections.pop("parallel", {})}
    return gpt(
        (3, 48, 6, 40, 131),
        {"model": model, "train": train, "pipeline": pipeline, "parallel": parallel},
        sections,
    )


def limited(config: Config, folder: Path, share: float) -> Config:
    """The configuration with the least limit that works and a share of what is beyond."""
    plenty = replace(config, memory=MemoryConfig(limit=PLENTY, folder=str(folder)))
    ranks = range(0, config.parallel.num_ranks, config.parallel.num_ranks // config.parallel.pp)
    least = max(forecast(JobPlan(plenty), rank).least for rank in ranks)
    most = max(stage.total for stage in predict(JobPlan(plenty)))
    limit = int(least + share * (most - least))
    return replace(config, memory=MemoryConfig(limit=limit, folder=str(folder)))


def run(config: Config, *stretches: int) -> Outcome:
    """Train with memory.limit, or without one in equal segments; note the bytes moved."""
    if not config.memory.limit:
        config = replace(config, memory=MemoryConfig(parts=config.model.num_blocks))
    engine = Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), CPU)
    outcome = train(engine, *(stretches or (2, 1)))
    if config.memory.limit:
        outcome.moved = moved(engine)
    return outcome


def moved(engine: Engine) -> int:
    assert isinstance(engine.state.memory, TieredMemory)
    traffic = engine.state.memory.tiers.traffic
    engine.close()
    return traffic.read + traffic.written


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_any_limit_gives_the_same_bits(
    pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(pipeline=pipeline, train={"dtype": dtype})
    whole, tight, roomy = (
        run(config),
        run(limited(config, tmp_path, 0.0)),
        run(limited(config, tmp_path, 0.3)),
    )
    tight.check(whole)
    roomy.check(whole)
    assert tight.moved > roomy.moved > 0
    assert run(replace(config, memory=MemoryConfig(limit=PLENTY))).moved == 0


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "pipeline", "dtype"),
    [
        ({"pp": 2, "dp": 2, "zero": 3}, {"schedule": "interleaved"}, "fp32"),
        ({"tp": 2, "sequence": True}, {}, "fp32"),
        ({"dp": 2, "zero": 2}, {"schedule": "1f1b"}, "bf16"),
        ({"pp": 2, "dp": 2, "zero": 1}, {"schedule": "2bw"}, "bf16"),
    ],
    ids=str,
)
def test_grids(
    parallel: dict[str, Any], pipeline: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    config = make(parallel=parallel, pipeline=pipeline, train={"dtype": dtype})
    ranks = config.parallel.num_ranks
    tight = limited(config, tmp_path, 0.1)
    outcomes, wholes = (run_ranks(run, ranks, each) for each in (tight, config))
    for outcome, whole in zip(outcomes, wholes, strict=True):
        outcome.check(whole)
    assert any(outcome.moved for outcome in outcomes)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe"])
def test_memory_never_exceeds_the_limit(schedule: str, share: float, tmp_path: Path) -> None:
    """The state that is resident, and what the allocator counts besides, action by action."""
    config = limited(make(pipeline={"schedule": schedule}), tmp_path, share)
    held: list[int] = []
    actions: list[Action] = []

    def watched(plan: Any) -> Any:
        for action in plan:
            if actions and actions[-1].kind not in PER_ITEM:
                held.append(meter.read().peak + tiers.budget)
            meter.restart_peak()
            actions.append(action)
            yield action

    engine = Engine(JobPlan(config), ProcessGrid(), CPU, wrap_plan=watched)
    assert isinstance(engine.state.memory, TieredMemory)
    tiers = engine.state.memory.tiers
    loader = samples(engine)
    with measure(CPU) as meter:
        engine.train(loader, 3, lambda result: None)
    assert moved(engine) > 0
    assert 0.95 * config.memory.limit < max(held) <= 1.001 * config.memory.limit


def test_a_gradient_takes_the_place_of_its_weight(tmp_path: Path) -> None:
    """bf16 with one micro-batch: 16 bytes a parameter instead of 18, without any move.

    After a segment's backward its weights are dropped, as its update makes them again from the
    master copy. So only one segment has weights and gradients at a time.
    """
    config = make(
        model={"tie_embeddings": False},
        pipeline={"num_microbatches": 1},
        train={"dtype": "bf16"},
    )
    plenty = replace(config, memory=MemoryConfig(budget=PLENTY, folder=str(tmp_path)))
    probe = Engine(JobPlan(plenty), ProcessGrid(), CPU)
    accesses = probe.moves.accesses
    weights = [accesses.num_bytes[i] for i in accesses.of("weights/0")]
    most = accesses.most_bytes
    probe.close()
    budget = most - sum(weights) + max(weights)
    tight = MemoryConfig(budget=budget, folder=str(tmp_path))
    engine = Engine(JobPlan(replace(config, memory=tight)), ProcessGrid(), CPU)
    outcome = train(engine, 3)
    assert moved(engine) == 0
    outcome.check(run(config, 3))
    slightly_less = MemoryConfig(budget=budget - max(weights), folder=str(tmp_path))
    engine = Engine(JobPlan(replace(config, memory=slightly_less)), ProcessGrid(), CPU)
    train(engine, 3).check(outcome)
    assert moved(engine) > 0


@pytest.mark.thorough
@pytest.mark.ranks
def test_whole_parameters_on_unequal_replicas(tmp_path: Path) -> None:
    """LAMB's shards differ in size, so three replicas move unlike items; collectives are equal."""
    config = make(model={"num_layers": 2}, parallel={"dp": 3, "zero": 3}, optim={"name": "lamb"})
    tight = limited(config, tmp_path, 0.5)
    for outcome in run_ranks(digest_and_run, 3, tight):
        outcome.check(outcome)


def digest_and_run(config: Config) -> Outcome:
    engine = Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), CPU)
    require_equal_plans(engine)
    outcome = train(engine, 2)
    engine.close()
    return outcome


@pytest.mark.thorough
def test_saved_killed_and_resumed(tmp_path: Path) -> None:
    """A run saved with a limit resumes without one, and back, to the bit."""
    config = make(pipeline={"schedule": "2bw"}, train={"num_steps": 10})
    tight = limited(config, tmp_path / "state", 0.1)
    plain = replace(config, memory=MemoryConfig(parts=config.model.num_blocks))
    whole = Engine(JobPlan(plain), ProcessGrid(), CPU)
    first = train(whole, 2)
    expected = train(whole, 3)
    for before, after in ((tight, plain), (plain, tight)):
        folder = tmp_path / before.memory.folder.replace("/", "_") / "saved"
        engine = Engine(JobPlan(before), ProcessGrid(), CPU)
        train(engine, 2).check(first)
        checkpoint.save(folder, engine, "corpus")
        engine.close()
        engine = Engine(JobPlan(after), ProcessGrid(), CPU)
        checkpoint.resume(folder, engine, "corpus", print)
        train(engine, 3).check(expected)
        engine.close()


def test_a_limit_that_is_too_small_names_the_least(tmp_path: Path) -> None:
    config = make()
    least = limited(config, tmp_path, 0.0).memory.limit
    small = MemoryConfig(limit=least - 4096, folder=str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"memory\.limit = {least - 4096}: too small.*try {least}"
    ):
        run(replace(config, memory=small))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parallel", [{"pp": 2, "dp": 1}, {"tp": 2, "pp": 2, "dp": 2, "zero": 2}, {"dp": 2, "zero": 3}]
)
def test_the_least_limit_is_that_of_all_stages_however_small_the_limit(
    parallel: dict[str, int], tmp_path: Path
) -> None:
    config = make(parallel=parallel)
    least = limited(config, tmp_path, 0.0).memory.limit
    for limit in (1, least - 1):
        with pytest.raises(ConfigError, match=rf"memory\.limit = {limit}: too small.*try {least}$"):
            forecasts(JobPlan(replace(config, memory=MemoryConfig(limit=limit))))
    found = forecasts(JobPlan(replace(config, memory=MemoryConfig(limit=least))))
    assert max(one.least for one in found) == least


@pytest.mark.thorough
def test_the_best_segments_are_found_and_said(tmp_path: Path) -> None:
    """Segments of two blocks hold more weights at a time, and leave less room for what stays."""
    config = make(model={"num_layers": 6, "tie_embeddings": False})
    job = JobPlan(limited(config, tmp_path, 0.4))
    found = search_segments(job)
    assert sorted(one.parts for one in found) == [2, 3, 4, 8]
    moved = [one.moved for one in found]
    assert moved == sorted(moved)
    assert moved[0] < moved[-1]
    by_block = next(one for one in found if one.parts == config.model.num_blocks)
    said = forecast(job)
    assert by_block.moved == said.read + said.written
    assert by_block.least == said.least
    assert by_block.padding > found[-1].padding or by_block is found[-1]
    line = segments_line(job, [said])
    assert line.startswith(f"segments of a stage (memory.parts): best {found[0].parts} (moves")
    assert segments_line(job, [replace(said, read=0, written=0)]) == ""


def test_a_limit_moves_no_more_than_the_best_budget(tmp_path: Path) -> None:
    """gpipe's activations rise and fall, so a constant budget is far from what they leave."""
    config = make(pipeline={"schedule": "gpipe", "num_microbatches": 4})
    tight = limited(config, tmp_path, 0.3)
    peak = predict(JobPlan(replace(config, memory=MemoryConfig(limit=PLENTY))))[0]
    budget = tight.memory.limit - (peak.total - peak.state)
    constant = replace(config, memory=MemoryConfig(budget=budget))
    with_limit, with_budget = (forecast(JobPlan(each)) for each in (tight, constant))
    assert with_limit.read + with_limit.written < 0.85 * (with_budget.read + with_budget.written)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_skipped_step_keeps_the_weights(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2BW's next version is another buffer: it gets the weights of a version that is in the file."""
    poison_gradients(monkeypatch, {1})
    config = make(pipeline={"schedule": "2bw"}, train={"dtype": dtype})
    tight = run(limited(config, tmp_path, 0.0), 4)
    tight.check(run(config, 4))
    assert [step.step for step in tight.steps if step.skipped] == [2]
    assert tight.moved > 0


@pytest.mark.thorough
def test_a_skipped_step_makes_dropped_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are dropped between backward and update with one version and one micro-batch."""
    poison_gradients(monkeypatch, {1})
    config = make(
        model={"tie_embeddings": False},
        pipeline={"num_microbatches": 1},
        train={"dtype": "bf16"},
    )
    tight = run(limited(config, tmp_path, 0.1), 4)
    tight.check(run(config, 4))
    assert [step.step for step in tight.steps if step.skipped] == [2]
