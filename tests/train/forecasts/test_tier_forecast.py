"""The forecast of moves between the tiers of the state is what a run moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import Config, MemoryConfig, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine
from hybridpar.train.forecasts.tier_forecast import forecast, forecasts
from hybridpar.validate import resolve


def make(budget: int, schedule: str, dtype: str, **sections: Any) -> Config:
    return resolve(
        from_mapping(
            {
                "model": {
                    "num_layers": 4,
                    "hidden_size": 48,
                    "num_heads": 6,
                    "seq_length": 14,
                    "vocab_size": 131,
                },
                "pipeline": {"schedule": schedule, "num_microbatches": 4},
                "memory": {"budget": budget},
                "train": {"micro_batch_size": 2, "dtype": dtype, "num_steps": 30},
                **sections,
            }
        ),
        sections.get("parallel", {}).get("dp", 1),
    )


def moved_by_a_run(
    config: Config, num_batches: int, folder: Path, grid: ProcessGrid
) -> tuple[int, int]:
    memory = MemoryConfig(budget=config.memory.budget, folder=str(folder))
    engine = Engine(JobPlan(replace(config, memory=memory)), grid, torch.device("cpu"))
    loader = SyntheticLoader(config.model, 2, 4, grid.dp.rank, grid.dp.size)
    engine.train(loader, num_batches, lambda result: None)
    assert isinstance(engine.state.memory, TieredMemory)
    tiers = engine.state.memory.tiers
    tiers.settle()
    engine.state.memory.close()
    return tiers.traffic.read, tiers.traffic.written


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("schedule", "dtype"), [("1f1b", "bf16"), ("2bw", "fp32"), ("gpipe", "bf16")]
)
def test_bytes_of_a_step_are_those_of_a_run(
    schedule: str, dtype: str, share: float, tmp_path: Path
) -> None:
    plenty = forecast(JobPlan(make(1 << 30, schedule, dtype)))
    assert (plenty.read, plenty.written) == (0, 0)
    config = make(int(plenty.least + share * (plenty.state - plenty.least)), schedule, dtype)
    found = forecast(JobPlan(config))
    few, many = (moved_by_a_run(config, n, tmp_path, ProcessGrid()) for n in (6, 8))
    assert (found.read, found.written) == tuple(
        (b - a) // 2 for a, b in zip(few, many, strict=True)
    )
    assert (found.read > 0) is (share < 1)


def forecast_and_moved(config: Config, folder: Path) -> tuple[tuple[int, int], ...]:
    """Bytes of a step on this rank, that are forecast, and that a run moves."""
    grid = ProcessGrid(dp=2)
    found = forecast(JobPlan(config), grid.rank)
    few, many = (moved_by_a_run(config, n, folder, grid) for n in (8, 10))
    return (found.read, found.written), ((many[0] - few[0]) // 2, (many[1] - few[1]) // 2)


@pytest.mark.thorough
@pytest.mark.ranks
def test_shares_of_replicas(tmp_path: Path) -> None:
    config = make(1 << 30, "1f1b", "fp32", parallel={"dp": 2, "zero": 3})
    plenty = forecast(JobPlan(config))
    config = replace(
        config, memory=MemoryConfig(budget=int(0.7 * plenty.least + 0.3 * plenty.state))
    )
    for forecast_bytes, moved_bytes in run_ranks(forecast_and_moved, 2, config, tmp_path):
        assert forecast_bytes == moved_bytes
        assert min(moved_bytes) > 0


def test_every_stage_is_told_and_the_prediction_leaves_out_what_is_in_the_file() -> None:
    config = replace(make(0, "2bw", "fp32"), memory=MemoryConfig(budget=600_000))
    config = resolve(replace(config, parallel=replace(config.parallel, pp=2, tp=2, dp=2)), 8)
    stages = forecasts(JobPlan(config))
    whole = predict(JobPlan(replace(config, memory=MemoryConfig())))
    assert len(stages) == 2
    for stage, without, found in zip(predict(JobPlan(config)), whole, stages, strict=True):
        assert stage.file == without.state - 600_000
        assert without.total - stage.total == pytest.approx(
            stage.file, rel=0.001
        )  # whose parts peak elsewhere
        assert without.state <= found.state <= without.state + 4096 * 60  # whole pages


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory\.budget = 4096"):
        forecast(JobPlan(make(4096, "1f1b", "fp32")))
