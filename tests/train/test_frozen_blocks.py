"""Frozen parameters of tensor-parallel layers, tied ones among them, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.errors import ConfigError

WIDTH = 16
WORDS = 32
LENGTH = 4


class First(nn.Module):
    def __init__(self, build: Any):
        super().__init__()
        self.words = hp.VocabParallelEmbedding(
            WORDS, WIDTH, build.axis, tied="words", **build.factory
        )

    def forward(self, x: None, batch: dict[str, Tensor], key: Any) -> Tensor:
        out: Tensor = self.words(batch["tokens"])
        return out


class Layer(nn.Module):
    def __init__(self, build: Any):
        super().__init__()
        self.up = hp.ColumnParallelLinear(WIDTH, 2 * WIDTH, build.axis, **build.factory)
        self.down = hp.RowParallelLinear(2 * WIDTH, WIDTH, build.axis, **build.factory)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> Tensor:
        out: Tensor = self.plain(x + self.down(self.up(x).tanh()))
        return out


class Last(nn.Module):
    def __init__(self, build: Any):
        super().__init__()
        self.out = hp.ColumnParallelLinear(
            WIDTH, WORDS, build.axis, bias=False, gather_output=True, tied="words", **build.factory
        )

    def forward(self, x: Tensor, batch: dict[str, Tensor], key: Any) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(
            self.out(x).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        return {"loss": loss / (LENGTH * batch["num_samples"])}


@dataclass(frozen=True)
class Words(hp.ModelSpec):
    """frozen: how names of frozen parameters begin, after "blocks."."""

    frozen: tuple[str, ...] = ()
    max_tp = 2
    num_blocks = 4

    def activation_shape(self, number: int) -> tuple[int, ...]:
        return LENGTH, WIDTH

    def block(self, number: int, build: Any) -> nn.Module:
        block = (First, Layer, Layer, Last)[number](build)
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not f"{number}.{name}".startswith(self.frozen))
        return block

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        tokens = np.random.default_rng([seed, number]).integers(0, WORDS, LENGTH + 1)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "frozen", [("1.up", "2.down.weight", "2.plain.bias"), ("0.", "3.", "1.down")]
)
@pytest.mark.parametrize(
    ("grid", "sections"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2, "dp": 2}, {"parallel": {"zero": 3}}),
        (
            {"pp": 2},
            {
                "optim": {"staleness": "prediction"},
                "pipeline": {"schedule": "2bw", "num_microbatches": 2},
            },
        ),
        ({"pp": 2}, {"parallel": {"sites": 2}, "outer": {"every": 1}}),
    ],
)
def test_grids(grid: dict[str, int], sections: dict[str, Any], frozen: tuple[str, ...]) -> None:
    assert hp.Trainer(Words(frozen), **sections).verify(grid, num_batches=3).ok


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("frozen", ["0.words", "3.out"])
def test_a_tied_parameter_is_frozen_in_both_blocks_or_refused(frozen: str) -> None:
    with pytest.raises(ConfigError, match="the tied parameter 'words' is frozen in one block"):
        hp.Trainer(Words((frozen,))).verify({"pp": 2}, num_batches=1)
