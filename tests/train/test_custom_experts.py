"""Custom models with layers of experts: what they must say of them, and what a run then reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from custom_models import CustomExperts
from ranks import run_ranks
from torch import nn
from verify.test_ep import loads_of

import hybridpar as hp
from hybridpar.config import Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.models.build import build_blocks

LOADS = 4 * 37 * 2
"""Choices of a batch of four samples in a layer: two of each token."""


def test_a_run_reports_its_loads(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    samples = []
    for _ in range(12):
        text = random.integers(0, 61, 38)
        samples.append({"tokens": text[:-1], "labels": text[1:]})
    hp.Trainer(
        CustomExperts(),
        datasets={"train": samples, "valid": None},
        train={"num_steps": 3, "micro_batch_size": 2, "log_interval": 1},
        pipeline={"num_microbatches": 2},
        run={"name": "experts", "dir": str(tmp_path)},
    ).fit()
    folder = tmp_path / "experts"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads: list[dict[str, list[int]]] = [r["expert_loads"] for r in rows if "expert_loads" in r]
    assert all(load.keys() == {"2", "3"} for load in loads)
    assert sum(sum(load["2"]) for load in loads) == 3 * LOADS
    violations = [row["max_vio"] for row in rows if "max_vio" in row]
    assert len(violations) == 3
    assert all(violation > 0 for violation in violations)
    picture = (folder / "expert_loads.svg").read_text()
    assert picture.count("<title>block 3, expert 1: ") == 1


def config(**parallel: int) -> Config:
    sections: dict[str, Any] = {
        "train": {"micro_batch_size": 4 // parallel["dp"], "dtype": "fp64", "num_steps": 5},
        "pipeline": {"num_microbatches": 1},
        "parallel": parallel,
    }
    return replace(from_mapping(sections), model=CustomExperts())


@pytest.mark.ranks
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "grid",
    [{"dp": 2, "ep": 2}, {"dp": 1, "cp": 2, "ep": 2}, {"dp": 1, "pp": 2}, {"dp": 1, "tp": 2}],
    ids=str,
)
def test_loads_are_equal_on_every_grid(grid: dict[str, int]) -> None:
    expected = loads_of(config(dp=1))
    counted = [[sum(load) for load in step.values()] for step in expected]
    assert all(len(set(loads)) == 1 and 0 < loads[0] < LOADS for loads in counted), "padding"
    assert all(found == expected for found in run_ranks(loads_of, 2, config(**grid)))


@dataclass(frozen=True)
class Silent(CustomExperts):
    routed_experts = None


@dataclass(frozen=True)
class Wrong(CustomExperts):
    routed_experts = hp.RoutedExperts(5, bias_rate=0.01, has_losses=True, blocks=(2, 3))


@dataclass(frozen=True)
class TooMany(CustomExperts):
    routed_experts = hp.RoutedExperts(4, bias_rate=0.01, has_losses=True, blocks=(1, 2, 3))


@dataclass(frozen=True)
class Several(CustomExperts):
    def block(self, number: int, build: hp.Build) -> nn.Module:
        made = [CustomExperts().block(number, build) for _ in range(2)]
        return nn.ModuleList(made)


@pytest.mark.parametrize(
    ("model", "number", "rule", "works"),
    [
        (
            Silent(),
            2,
            "routed_experts must describe the layer of experts in block 2",
            "routed_experts = hybridpar.RoutedExperts(number=4, bias_rate=0.01, has_losses=True, "
            "blocks=(2,))",
        ),
        (
            Wrong(),
            3,
            "must describe",
            "hybridpar.RoutedExperts(number=4, bias_rate=0.01, has_losses=True, blocks=(2, 3))",
        ),
        (TooMany(), 1, "names block 1, which has no layer of experts", "blocks=(2, 3)"),
        (Several(), 2, "has 2 layers of experts in block 2", "a block of its own"),
    ],
    ids=["nothing", "another number", "another block", "two layers"],
)
def test_a_model_must_describe_its_experts(
    model: CustomExperts, number: int, rule: str, works: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        build_blocks(model, hp.Axis("tp"), [number])
    (problem,) = raised.value.problems
    assert rule in problem.rule
    assert works in problem.suggestion
