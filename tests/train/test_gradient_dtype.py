"""Gradients in bf16: 2 bytes a parameter, everywhere the same rounding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PIPELINES, Outcome, gpt, train
from ranks import run_ranks

from hybridpar import checkpoint
from hybridpar.config import Config, MemoryConfig
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine
from hybridpar.train.forecasts.tier_forecast import forecast

CPU = torch.device("cpu")
PLENTY = 1 << 30
BF16 = {"dtype": "bf16", "gradient_dtype": "bf16"}


def make(**sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes; three layers, one segment each."""
    train = BF16 | sections.pop("train", {})
    return gpt(
        (3, 48, 6, 14, 131),
        {"parallel": {"dp": 1}, "pipeline": {"num_microbatches": 4}, "train": train},
        sections,
    )


def run(config: Config) -> Outcome:
    if not config.memory.is_limited:
        config = replace(config, memory=MemoryConfig(parts=config.model.num_blocks))
    engine = Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), CPU)
    outcome = train(engine, 2, 1)
    engine.close()
    return outcome


@pytest.mark.thorough
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("host", [True, False])
def test_a_limit_and_a_host_change_nothing(
    pipeline: dict[str, Any], host: bool, tmp_path: Path
) -> None:
    config = make(pipeline=pipeline)
    plenty = MemoryConfig(limit=PLENTY, folder=str(tmp_path), host_optimizer=host)
    least = forecast(JobPlan(replace(config, memory=plenty))).least
    whole = run(config)
    run(replace(config, memory=replace(plenty, limit=least))).check(whole)
    exact = run(make(pipeline=pipeline, train={"gradient_dtype": "fp32"}))
    assert repr(exact.steps) != repr(whole.steps)
    for step, other in zip(whole.steps, exact.steps, strict=True):
        # eight bits of mantissa, four micro-batches
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=0.02)
        assert step.loss == pytest.approx(other.loss, rel=0.01)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [3, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_replicas_agree_and_halve_the_traffic(zero: int, tied: bool) -> None:
    """Two ranks add two numbers, so every ZeRO stage rounds alike. Only a tied weight's gradient
    adds four, which ZeRO-2 and 3 reduce after each of its segments."""
    config = make(
        parallel={"dp": 2, "zero": zero},
        model={"tie_embeddings": tied},
        pipeline={"num_microbatches": 1},
    )
    exact = replace(config, train=replace(config.train, gradient_dtype="fp32"))
    whole = replace(config, parallel=replace(config.parallel, zero=0))
    found, in_fp32, unsharded = (run_ranks(counted, 2, each) for each in (config, exact, whole))
    same_order = not tied or zero == 1
    for (outcome, sent), (_, more), (other, _) in zip(found, in_fp32, unsharded, strict=True):
        assert sent < more
        for step, plain in zip(outcome.steps, other.steps, strict=True):
            assert step.losses == (
                plain.losses if same_order else pytest.approx(plain.losses, rel=1e-3)
            )
            # a norm adds the shards' squares, in another order
            assert step.grad_norm == pytest.approx(
                plain.grad_norm, rel=1e-12 if same_order else 1e-3
            )


def counted(config: Config) -> tuple[Outcome, int]:
    """Train; the bytes that this rank's replicas have exchanged."""
    grid = ProcessGrid(sizes_of(config.parallel))
    memory = MemoryConfig(parts=config.model.num_blocks)
    engine = Engine(JobPlan(replace(config, memory=memory)), grid, CPU)
    outcome = train(engine, 3)
    return outcome, sum(grid.dp.traffic.num_bytes.values())


def test_14_bytes_a_parameter(tmp_path: Path) -> None:
    """bf16 with one micro-batch: a gradient takes its weight's place, beside 12 bytes of master
    copy and moments. Only one segment has both at a time."""
    config = make(model={"tie_embeddings": False}, pipeline={"num_microbatches": 1})
    plenty = MemoryConfig(budget=PLENTY, folder=str(tmp_path))
    probe = Engine(JobPlan(replace(config, memory=plenty)), ProcessGrid(), CPU)
    accesses = probe.moves.accesses
    weights, gradients, masters = (
        [accesses.num_bytes[i] for i in accesses.of(kind)]
        for kind in ("weights/0", "gradients/0", "master")
    )
    assert weights == gradients
    most = accesses.most_bytes
    probe.close()
    assert most / sum(masters) * 4 == pytest.approx(16, rel=0.05)  # items are whole pages
    budget = most - sum(weights) + max(weights)
    tight = replace(config, memory=replace(plenty, budget=budget))
    engine = Engine(JobPlan(tight), ProcessGrid(), CPU)
    outcome = train(engine, 2, 1)
    assert isinstance(engine.state.memory, TieredMemory)
    traffic = engine.state.memory.tiers.traffic
    engine.close()
    assert (traffic.read, traffic.written) == (0, 0)
    outcome.check(run(config))


def test_saved_and_resumed_with_the_other(tmp_path: Path) -> None:
    """Gradients are not in a checkpoint, so a run may go on with either."""
    config = make(train={"num_steps": 10})
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    begun = train(engine, 2)
    checkpoint.save(tmp_path, engine, "corpus")
    expected = train(engine, 2, steps=begun.steps)
    again, other = (
        Engine(JobPlan(replace(config, train=one)), ProcessGrid(), CPU)
        for one in (config.train, replace(config.train, gradient_dtype="fp32"))
    )
    for resumed in (again, other):
        checkpoint.resume(tmp_path, resumed, "corpus", print)
    train(again, 2, steps=begun.steps).check(expected)
    assert repr(train(other, 2, steps=begun.steps).steps) != repr(expected.steps)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"dtype": "fp32"}}, 'requires train.dtype = "bf16", not "fp32"'),
        (
            {"parallel": {"dp": 2}, "compression": {"gradients": "int8"}},
            "adds what was left unsent to gradients in fp32",
        ),
    ],
    ids=["dtype", "compression"],
)
def test_unsupported_combinations(sections: dict[str, dict[str, Any]], message: str) -> None:
    found = str(ConfigError(*conflicts(make(**sections))))
    assert re.search(rf"train\.gradient_dtype = 'bf16': .*{re.escape(message)}.*try .fp32", found)
