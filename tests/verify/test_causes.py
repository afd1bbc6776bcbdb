"""A grid that is not the training of one process: the report says what differs first, and which
block is at fault."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from hybridpar import SequentialSpec, Trainer
from hybridpar.config import Config, ModelConfig
from hybridpar.verify.causes import likely_causes


class Odd(nn.Module):
    """A layer that does not do the same on every grid."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return {
            "draws": lambda: x * np.random.rand(),
            "counts": lambda: x * self.calls,
            "mixes": lambda: x - x.mean(0),
            "nothing": lambda: x,
        }.get(self.what, lambda: x)()


@dataclass(frozen=True)
class Row(SequentialSpec):
    what: str = "nothing"

    def layers(self) -> Iterable[nn.Module]:
        yield nn.Linear(4, 4)
        yield Odd(self.what)
        last = nn.Linear(4, 1)
        if self.what == "starts":
            nn.init.constant_(last.weight, random.random())
        yield last

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        out = out[:, 0] - batch["y"]
        return out.square().sum() if self.what == "sum" else out.square().mean()

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        x = np.random.default_rng([seed, number]).normal(size=4).astype(np.float32)
        return {"x": x, "y": x[0]}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (
            "draws",
            r"block 1 \(Odd\) returns different values when it is called again.*numpy, " r"random",
        ),
        ("counts", r"block 1 \(Odd\) returns different values when it is called again"),
        (
            "mixes",
            r"block 1 \(Odd\) returns different values for a sample if the micro-batch has "
            r"other samples",
        ),
        ("sum", r"block 2 \(Linear\) returns losses of two samples that are not the sum"),
        ("nothing", "the forward differs"),
    ],
)
def test_the_block_at_fault_is_named(what: str, cause: str) -> None:
    (found,) = likely_causes(Config(model=Row(what)), "loss")
    assert re.match(cause, found), found


def test_without_blocks_of_ones_own_the_first_difference_speaks() -> None:
    assert "the update does not" in likely_causes(Config(model=ModelConfig()), "weight")[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "grid", "first", "cause"),
    [("draws", {"dp": 2}, "loss", "block 1 (Odd)"), ("starts", {"pp": 2}, "init", "constructor")],
)
def test_a_report_as_text_has_the_cause(
    what: str, grid: dict[str, int], first: str, cause: str
) -> None:
    report = Trainer(
        Row(what), train={"micro_batch_size": 2}, pipeline={"num_microbatches": 2}
    ).verify(grid, 1)
    assert not report.ok
    line, likely = str(report).splitlines()
    assert f": {first} of " in line
    assert likely.startswith("likely: ")
    assert cause in likely
    assert report.as_json()["causes"] == report.causes
