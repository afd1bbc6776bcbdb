"""Custom blocks with unusual contents: no parameters, no elements, buffers, random numbers, an
evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import start
from torch import Tensor, nn

from hybridpar import SequentialSpec, Trainer, checkpoint
from hybridpar.config import Config, from_mapping
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks


class Inner(nn.Module):
    """A layer that notes the mode of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training)
        out: Tensor = self.layer(x)
        return out


@dataclass(frozen=True)
class Odd(SequentialSpec):
    """Seven modules, four of them without parameters."""

    def layers(self) -> Iterable[nn.Module]:
        empty = nn.Linear(8, 8)
        empty.none, empty.flat = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 8))
        return [
            nn.Flatten(),
            nn.Linear(3, 8),
            nn.Tanh(),
            Inner(),
            nn.Tanh(),
            empty,
            nn.Linear(8, 1),
        ]

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out[:, 0], batch["y"])

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=3).astype(np.float32)
        return {"x": x, "y": x[0]}


def config_of(**sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "pipeline": {"num_microbatches": 2},
            "train": {"micro_batch_size": 2, "device": "cpu"},
            "parallel": {"tp": 1, "pp": 1, "dp": 1},
            **sections,
        },
        Config(model=Odd()),
    )


def test_a_block_without_parameters_resumes_to_the_bit(tmp_path: Path) -> None:
    through, loader = start(config_of())
    through.train(loader, 4, lambda step: None)
    first, loader = start(config_of())
    first.train(loader, 2, lambda step: None)
    checkpoint.save(tmp_path, first, "corpus")
    then, loader = start(config_of())
    assert checkpoint.resume(tmp_path, then, "corpus", pytest.fail) == 2
    then.train(loader, 2, lambda step: None)
    for name, weight in through.state.weights.full_weights().items():
        assert torch.equal(weight, then.state.weights.full_weights()[name]), name


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("memory", [{"host_optimizer": True}, {"budget": 16384}])
def test_parameters_without_elements_change_no_bit(memory: dict[str, Any]) -> None:
    results = []
    for section in ({}, memory):
        engine, loader = start(config_of(memory=section))
        losses: list[float] = []
        engine.train(loader, 3, lambda step, losses=losses: losses.append(step.loss))
        engine.close()
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"pp": 7}, {"pipeline": {"num_microbatches": 2}}),
        ({"pp": 3}, {"pipeline": {"recompute": "all"}}),
        ({"dp": 2}, {"parallel": {"zero": 3}}),
        ({"pp": 2, "dp": 2}, {"parallel": {"zero": 1}}),
        ({"pp": 2}, {"memory": {"budget": 16384}}),
    ],
)
def test_a_stage_without_parameters_trains_as_one_process(
    grid: dict[str, int], sections: dict[str, Any]
) -> None:
    pipeline = {"num_microbatches": 2} | sections.get("pipeline", {})
    report = Trainer(Odd(), **(sections | {"pipeline": pipeline})).verify(grid, num_batches=3)
    assert report.ok, report.first_divergence


@pytest.mark.parametrize("recompute", ["none", "all", "stage"])
def test_blocks_are_in_evaluation_mode_in_evaluation_alone(recompute: str) -> None:
    engine, loader = start(config_of(pipeline={"num_microbatches": 2, "recompute": recompute}))
    inner = engine.stage.blocks["3"].layer
    for _ in range(2):
        inner.seen.clear()
        engine.train(loader, 1, lambda step: None)
        assert len(inner.seen) == (2 if recompute == "none" else 4)
        assert all(inner.seen)
        inner.seen.clear()
        engine.evaluate(loader, 1)
        assert inner.seen == [False, False]


def test_a_module_that_its_constructor_has_put_into_evaluation_mode_stays_so() -> None:
    class Still(Odd):
        def layers(self) -> Iterable[nn.Module]:
            return [nn.Linear(3, 8), nn.Sequential(Inner().eval(), nn.Tanh()), nn.Linear(8, 1)]

    blocks = build_blocks(Still(), Axis("tp"), [1], device="cpu")
    for key in (object(), None, object()):
        blocks[1](torch.zeros(2, 8), {}, key)
        assert blocks[1].training == (key is not None)
    assert blocks[1].layer[0].seen == [False] * 3
    assert blocks[1].layer[1].training
