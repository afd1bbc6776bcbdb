"""Custom models whose blocks or stages have no parameters, or parameters without elements, train,
save and resume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import start
from ranks import run_ranks
from torch import Tensor, nn

from hybridpar import SequentialSpec, checkpoint
from hybridpar.config import (
    CompressionConfig,
    Config,
    DataConfig,
    MemoryConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.train.engine import StepResult
from hybridpar.verify.run import verify


class WithEmpty(nn.Linear):
    """A linear layer beside parameters without elements."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.empty = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 16))


@dataclass(frozen=True)
class Net(SequentialSpec):
    """Blocks 1 and 4 have no parameters, blocks 2 and 3 some without elements; `empty` False: of no
    block."""

    empty: bool = True

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(3, 16)
        yield nn.Tanh()
        for _ in range(2):
            yield WithEmpty() if self.empty else nn.Linear(16, 16)
        yield nn.Tanh()
        yield nn.Linear(16, 1)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out[:, 0], batch["y"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=3).astype(np.float32)
        return {"x": x, "y": x[0]}


CONFIG = Config(
    Net(),
    ParallelConfig(dp=1),
    PipelineConfig("1f1b", 3),
    OptimConfig(lr=1e-2),
    TrainConfig(6, 2),
    DataConfig(split=0.0),
)
MEMORY = {
    "plain": MemoryConfig(),
    "host": MemoryConfig(host_optimizer=True),
    "budget": MemoryConfig(budget=24576),
}

Trained = tuple[list[StepResult], dict[str, Tensor]]


def trained(config: Config, root: Path, *stretches: int) -> Trained:
    """Train, save and load by stretches; the steps, and the state at the end."""
    steps: list[StepResult] = []
    for number, num_batches in enumerate(stretches):
        engine, loader = start(config)
        assert checkpoint.resume(root, engine, "", print) == sum(stretches[:number])
        engine.train(loader, num_batches, steps.append)
        checkpoint.save(root, engine, "")
    memory = engine.state.memory
    state = {key: memory.read(tensor).clone() for key, tensor in engine.state.tensors().items()}
    engine.close()
    return steps, state


def same_after_a_resume(config: Config, folder: Path) -> list[StepResult]:
    steps, state = trained(config, folder / "whole", 4)
    again, resumed = trained(config, folder / "parts", 2, 2)
    assert repr(again) == repr(steps)
    assert resumed.keys() == state.keys()
    assert all(torch.equal(resumed[key], tensor) for key, tensor in state.items())
    return steps


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", MEMORY)
def test_resumed_to_the_bit(memory: str, dtype: str, schedule: str, tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        memory=MEMORY[memory],
        train=replace(CONFIG.train, dtype=dtype),
        pipeline=PipelineConfig(schedule, 3),
    )
    steps = same_after_a_resume(config, tmp_path / "a")
    without, _ = trained(replace(config, model=Net(empty=False)), tmp_path / "b", 4)
    assert [step.loss for step in steps] == [step.loss for step in without]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["lamb", "muon", "sgd"])
def test_every_optimizer_takes_parameters_without_elements(name: str, tmp_path: Path) -> None:
    same_after_a_resume(replace(CONFIG, optim=replace(CONFIG.optim, name=name)), tmp_path)


def on_other_grids(config: Config, folder: Path) -> list[float]:
    """Two steps more from a checkpoint of another grid."""
    engine, loader = start(config)
    assert checkpoint.resume(folder, engine, "", print) == 2
    steps: list[StepResult] = []
    engine.train(loader, 2, steps.append)
    return [step.loss for step in steps]


@pytest.mark.ranks
def test_a_stage_without_parameters_is_saved_and_resharded(tmp_path: Path) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, dtype="fp64"))
    staged = replace(
        config,
        parallel=ParallelConfig(pp=3, dp=1),
        pipeline=PipelineConfig("1f1b", 3, split=(1, 1, 4)),
    )
    expected, _ = trained(config, tmp_path / "whole", 4)
    run_ranks(trained, 3, staged, tmp_path / "staged", 2)
    assert on_other_grids(config, tmp_path / "staged") == pytest.approx(
        [s.loss for s in expected[2:]], rel=1e-9
    )
    trained(config, tmp_path / "alone", 2)
    for losses in run_ranks(on_other_grids, 3, staged, tmp_path / "alone"):
        assert losses == pytest.approx([s.loss for s in expected[2:]], rel=1e-9)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_share_parameters_without_elements(zero: int, tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        train=replace(CONFIG.train, micro_batch_size=1, dtype="fp64"),
        parallel=ParallelConfig(dp=2, zero=zero),
    )
    expected, _ = trained(
        replace(CONFIG, train=replace(CONFIG.train, dtype="fp64")), tmp_path / "one", 4
    )
    for steps, _ in run_ranks(trained, 2, config, tmp_path / "two", 2, 2):
        assert [s.loss for s in steps] == pytest.approx([s.loss for s in expected], rel=1e-9)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("gradients", ["int8", "dct", "powersgd"])
def test_compressed_gradients_without_elements(gradients: str, tmp_path: Path) -> None:
    compression = CompressionConfig(gradients=gradients, gradients_smallest=0)  # type: ignore[arg-type]
    config = replace(CONFIG, parallel=ParallelConfig(dp=2), compression=compression)
    (steps, _), _ = run_ranks(trained, 2, config, tmp_path, 2, 2)
    assert len(steps) == 4


@pytest.mark.ranks
def test_verified_with_a_stage_without_parameters() -> None:
    assert verify(
        replace(CONFIG, pipeline=PipelineConfig("2bw", 3, split=(1, 1, 4))), {"pp": 3}, 3
    ).ok
