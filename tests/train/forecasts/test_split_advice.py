"""A stage that idles is named, with the split that would be faster by what the steps have cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from engines import start
from torch import Tensor, nn

from hybridpar import SequentialSpec
from hybridpar.comm.ranks import run_on_ranks
from hybridpar.config import Config, ModelConfig, ModelSpec, from_mapping
from hybridpar.job import JobPlan
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.train.engine import StepResult
from hybridpar.train.forecasts import split_advice
from hybridpar.train.forecasts.split_advice import EarlyAdvice, better_split
from hybridpar.train.reporting.costs_file import RunCosts
from hybridpar.train.reporting.measure import Measured
from hybridpar.train.reporting.trace import Recorder


@dataclass(frozen=True)
class Row(SequentialSpec):
    """Eight layers, the last of which also has the loss."""

    def layers(self) -> Iterable[nn.Module]:
        for _ in range(8):
            yield nn.Linear(16, 16)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return out.square().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"x": np.zeros(16, np.float32)}


def measured_by(
    model: ModelSpec,
    split: list[int],
    blocks: list[float],
    *,
    update: list[float] | None = None,
    **pipeline: Any,
) -> tuple[JobPlan, RunCosts]:
    """A run of a pipeline whose blocks take these seconds forward, and twice as long backward."""
    config = from_mapping(
        {
            "parallel": {"pp": len(split), "dp": 1},
            "pipeline": {"split": split, "num_microbatches": 4, **pipeline},
        },
        Config(model=model),
    )
    ends = np.cumsum(split)
    stages = [sum(blocks[end - size : end]) for end, size in zip(ends, split, strict=True)]
    costs = Costs(stages, [2 * seconds for seconds in stages], update or 0.0)
    job = JobPlan(config)
    step, idle = predict_timeline(job.options, job.shape, costs).steady_step(4)
    return job, RunCosts(job.options, job.shape, Measured(costs, 5, step, tuple(idle), ()))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "gpipe"])
def test_an_uneven_split_of_equal_layers_is_noticed(schedule: str) -> None:
    job, run = measured_by(Row(), [6, 2], [1.0] * 8, schedule=schedule)
    line = better_split(job, run)
    assert line.startswith("stage 1 idles ")
    assert "pipeline.split = [4, 4] instead of [6, 2]" in line
    found, best = (
        measured_by(Row(), split, [1.0] * 8, schedule=schedule)[1].measured.step_time
        for split in ([6, 2], [4, 4])
    )
    assert f"would be {100 * (found / best - 1):.0f} % faster" in line, (
        "what the other split is measured to take"
    )


def test_an_even_split_and_one_that_nothing_improves_are_not_mentioned() -> None:
    assert better_split(*measured_by(Row(), [4, 4], [1.0] * 8, schedule="2bw")) == ""
    uneven = [9.0, *[1.0] * 7]
    assert better_split(*measured_by(Row(), [1, 7], uneven, schedule="2bw")) == "", (
        "a block is not divided"
    )


def test_an_embedding_without_products_counts_by_what_was_measured() -> None:
    model = ModelConfig(num_layers=6, hidden_size=32, num_heads=4, seq_length=32, vocab_size=300)
    job, run = measured_by(model, [5, 3], [4.0, *[1.0] * 6, 0.7], schedule="2bw")
    assert "pipeline.split = [2, 6]" in better_split(job, run)


def test_the_update_counts() -> None:
    """The time that a stage takes once a batch grows with its parameters."""
    job, run = measured_by(Row(), [5, 3], [1.0] * 8, update=[40.0, 24.0], schedule="2bw")
    assert "pipeline.split = [4, 4]" in better_split(job, run)


def test_steps_that_equal_layers_do_not_explain_are_no_basis() -> None:
    job, run = measured_by(Row(), [3, 3, 2], [*[1.0] * 3, *[6.0] * 3, *[1.0] * 2], schedule="2bw")
    assert better_split(job, run) == ""


def test_four_stages() -> None:
    job, run = measured_by(Row(), [2, 4, 1, 1], [1.0] * 8, schedule="1f1b")
    assert "pipeline.split = [2, 2, 2, 2]" in better_split(job, run)
    memory = replace(job.config.memory, budget=1 << 30)
    assert better_split(JobPlan(replace(job.config, memory=memory)), run) == ""


def _steps_with_advice(config: Config) -> list[tuple[int, str]]:
    """Train without a drain; return the advice that this rank gives, with the step."""
    engine, loader = start(config)
    recorder, early = Recorder(engine.executor, 0, 14), EarlyAdvice(engine.job, engine.grid)
    said: list[tuple[int, str]] = []
    has_ended = False

    def on_step(result: StepResult) -> None:
        nonlocal has_ended
        recorder.after_step(result.step)
        if not has_ended:
            has_ended = early.has_ended(recorder, lambda line: said.append((result.step, line)))

    engine.train(loader, 80, on_step)
    return said


@pytest.mark.ranks
def test_the_advice_comes_while_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        split_advice, "better_split", lambda job, run: f"costs of {run.shape.num_ranks} ranks"
    )
    config = from_mapping(
        {
            "parallel": {"pp": 2, "dp": 1},
            "pipeline": {"num_microbatches": 2, "split": [6, 2]},
            "train": {"micro_batch_size": 2, "device": "cpu", "num_steps": 80},
        },
        Config(model=Row()),
    )
    first, second = run_on_ranks(_steps_with_advice, 2, config)
    ((step, line),) = first
    assert 14 <= step < 80
    assert line == "costs of 2 ranks"
    assert second == []
