"""Rows whose first and last module share parameters: one parameter on every grid."""

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
from hybridpar.models.custom_blocks import constructed
from hybridpar.nn.placement import named_placements

WORDS = 12
WIDTH = 8
LENGTH = 5


class Turn(nn.Module):
    def __init__(self, matrix: nn.Parameter):
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Head(nn.Module):
    """Two tied matrices, in another order than the first module's, and a bias of its own."""

    def __init__(self, matrix: nn.Parameter, words: nn.Parameter):
        super().__init__()
        self.project = nn.Linear(WIDTH, WORDS)
        self.project.weight = words
        self.turn = Turn(matrix)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.turn(x))
        return out


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x) @ self.turn
        return out


@dataclass(frozen=True)
class Tied(SequentialSpec):
    """A language model of four modules that predicts each word from the word itself."""

    inputs = "words"
    made_first: bool = False

    def layers(self) -> Iterable[nn.Module]:
        row = self._row()
        return list(row) if self.made_first else row

    def _row(self) -> Iterable[nn.Module]:
        table = Table()
        yield table
        for _ in range(2):
            yield nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        yield Head(table.turn, table.words.weight)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), batch["words"].flatten())

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return {"words": np.random.default_rng([seed, number]).integers(WORDS, size=LENGTH)}


def test_the_first_module_has_the_values_of_what_the_last_one_shares() -> None:
    assert Tied().tie_embeddings
    for model in (Tied(), Tied(made_first=True)):
        places = {
            name: place
            for name, _, place in named_placements(build_blocks(model, Axis("tp"), [3])[3])
        }
        assert {name: place.tied for name, place in places.items()} == {
            "layer.turn.matrix": "blocks.0.layer.turn",
            "layer.project.weight": "blocks.0.layer.words.weight",
            "layer.project.bias": "",
        }
        drawn = places["layer.project.weight"].init.draw(5)
        assert torch.equal(drawn, constructed(model, 0, 5)["layer.words.weight"])
        both = build_blocks(model, Axis("tp"), [0, 3])
        assert both[0].layer.words.weight is both[3].layer.project.weight
    held = build_blocks(Tied(), Axis("tp"), [3], device="cpu")[3]
    assert not any(parameter.is_meta for parameter in held.parameters())


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"pp": 2}, {}),
        ({"pp": 4}, {"pipeline": {"schedule": "2bw"}}),
        ({"dp": 2}, {"parallel": {"zero": 3}}),
        ({"pp": 2, "dp": 2}, {"pipeline": {"schedule": "2bw"}, "parallel": {"zero": 1}}),
    ],
)
def test_tied_rows_train_as_one_process(grid: dict[str, int], sections: dict[str, Any]) -> None:
    pipeline = {"num_microbatches": 4} | sections.get("pipeline", {})
    settings = sections | {
        "pipeline": pipeline,
        "train": {"micro_batch_size": 2},
        "optim": {"lr": 1e-2},
    }
    report = Trainer(Tied(), **settings).verify(grid, num_batches=3)
    assert report.ok, report.first_divergence


def test_a_tied_row_resumes_to_the_bit_and_learns(tmp_path: Path) -> None:
    config = from_mapping(
        {
            "pipeline": {"num_microbatches": 2},
            "train": {"micro_batch_size": 2, "device": "cpu"},
            "optim": {"lr": 1e-2},
            "parallel": {"tp": 1, "pp": 1, "dp": 1},
        },
        Config(model=Tied()),
    )
    through, loader = start(config)
    losses: list[float] = []
    through.train(loader, 20, lambda step: losses.append(step.loss))
    assert losses[-1] < 0.8 * losses[0]
    first, loader = start(config)
    first.train(loader, 10, lambda step: None)
    checkpoint.save(tmp_path, first, "corpus")
    then, loader = start(config)
    assert checkpoint.resume(tmp_path, then, "corpus", pytest.fail) == 10
    then.train(loader, 10, lambda step: None)
    weights = then.state.weights.full_weights()
    assert sum("project.weight" in name or "words.weight" in name for name in weights) == 1, (
        "one parameter"
    )
    for name, weight in through.state.weights.full_weights().items():
        assert torch.equal(weight, weights[name]), name
