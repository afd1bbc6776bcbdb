"""ZeRO-2 and 3: the same training as ZeRO-1, with less of it on each rank, and as many messages as there must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.train.engine import Engine

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


def make(model: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A GPT of odd sizes with dropout; four layers, one part each."""
    return from_mapping({
        "model": {"num_layers": 4, "hidden_size": 48, "num_heads": 6, "seq_length": 14, "vocab_size": 131,
                  "dropout": 0.1, **(model or {})},
        "parallel": {"dp": 2, **sections.pop("parallel", {})},
        "pipeline": {"num_microbatches": 4, **sections.pop("pipeline", {})},
        "train": {"micro_batch_size": 2, **sections.pop("train", {})}, **sections})


def with_zero(config: Config, zero: int) -> Config:
    return replace(config, parallel=replace(config.parallel, zero=zero))


@dataclass
class Run:
    """The outcome of a training on one rank."""

    steps: list[tuple[float, float]]
    evaluated: dict[str, float]
    weights: dict[str, Tensor]
    traffic: dict[str, Any]

    def differs_from(self, other: Run) -> list[str]:
        """Of what training has made, what is not equal to the bit."""
        return [name for name in ("steps", "evaluated") if getattr(self, name) != getattr(other, name)] + [
            name for name, tensor in self.weights.items() if not torch.equal(tensor, other.weights[name])]


def build(config: Config) -> Engine:
    parallel = config.parallel
    return Engine(config, ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), CPU)


def train(config: Config, stretches: tuple[int, ...] = (3, 1)) -> Run:
    engine = build(config)
    dp = engine.grid.dp
    loader = SyntheticLoader(config.model, 2, config.pipeline.num_microbatches, dp.rank, dp.size)
    steps: list[tuple[float, float]] = []
    for num_batches in stretches:
        engine.train(loader, num_batches, lambda result: steps.append((result.loss, result.grad_norm)))
    traffic = {op: (count.calls, count.bytes) for op, count in dp.traffic.items()} if False else {}
    weights = {name: tensor.clone() for name, tensor in engine.state.weights.full_weights().items()}
    return Run(steps, engine.evaluate(loader, 2), weights, traffic)


PIPELINES = ({"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "2bw"}, {"schedule": "pipedream"},
             {"schedule": "naive"}, {"schedule": "1f1b", "split_backward": True},
             {"schedule": "2bw", "recompute": "stage", "gradient_buffers": 1})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: "-".join(map(str, p.values())))
def test_every_schedule(pipeline: dict[str, Any], dtype: str) -> None:
    config = make(pipeline=pipeline, train={"dtype": dtype})
    first, second, third = (run_ranks(train, 2, with_zero(config, zero)) for zero in (1, 2, 3))
    for runs in zip(first, second, third, strict=True):
        assert not runs[1].differs_from(runs[2])
        print([abs(a[0]-b[0]) for a,b in zip(runs[0].steps, runs[1].steps)], [abs(a[1]-b[1]) for a,b in zip(runs[0].steps, runs[1].steps)])
