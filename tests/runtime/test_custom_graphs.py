"""CUDA graphs of custom models: replayed where the forward is the same each time, refused where
Python decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar import SequentialSpec
from hybridpar.config import from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.runtime.graphs import MicroBatchGraphs, unsupported
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")
CALLS = count()
"""A value that no module has as an attribute."""


class Counts(nn.Linear):
    """Changes a number of its own in each forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls)


class Looks(nn.Linear):
    """Does what the numbers say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if not x.is_meta and x.sum().item() > 0 else 1)


class Global(nn.Linear):
    """Takes another number from Python in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(CALLS))


LAYERS = {"plain": nn.Linear, "counts": Counts, "looks": Looks, "global": Global}


@dataclass(frozen=True)
class Net(SequentialSpec):
    what: str = "plain"
    inputs = "numbers"

    def layers(self) -> Iterable[nn.Module]:
        return nn.Linear(3, 8), LAYERS[self.what](8, 8), nn.Linear(8, 5)

    def loss(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(out, batch["label"])

    def metrics(self, out: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (out.argmax(-1) == batch["label"]).double().mean()}

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng([seed, number])
        return {"numbers": random.normal(size=3).astype(np.float32), "label": random.integers(5)}


def train(
    what: str, replay: bool
) -> tuple[list[tuple[float, dict[str, float]]], MicroBatchGraphs | None]:
    """Train 6 batches of 3 micro-batches; return the loss and the metrics of each."""
    global CALLS
    CALLS = count()
    config = replace(
        from_mapping(
            {
                "parallel": {"dp": 1},
                "pipeline": {"num_microbatches": 3},
                "train": {"micro_batch_size": 2, "num_steps": 20},
                "optim": {"lr": 1e-2},
            }
        ),
        model=Net(what),
    )
    assert unsupported(JobPlan(config)) is None
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    if replay:
        engine.executor.graphs = MicroBatchGraphs(
            engine.job, {0: engine.stage}, engine.state.gradients, CPU, (), engine.grid
        )
    numbers: list[tuple[float, dict[str, float]]] = []
    engine.train(
        SyntheticLoader(config.model, 2, 3),
        6,
        lambda step: numbers.append((step.loss, step.metrics)),
    )
    return numbers, engine.executor.graphs


@pytest.mark.parametrize("what", ["plain", "counts", "looks"])
def test_a_custom_model_trains_as_without_graphs(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit, whether its forward can be captured or not; why not is logged."""
    expected, _ = train(what, False)
    fake_cuda.install(monkeypatch)
    numbers, graphs = train(what, True)
    assert numbers == expected
    assert len({found["accuracy"] for _, found in numbers}) > 1
    assert graphs is not None
    reasons = {
        "plain": "",
        "counts": "changes blocks.1.layer.calls",
        "looks": "aten::_local_scalar_dense",
    }
    assert (graphs.num_replayed == 16) == (what == "plain")
    assert bool(caplog.text) == bool(reasons[what])
    assert reasons[what] in caplog.text.replace("aten.", "aten::")


def test_values_from_python_are_found_at_the_first_replay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_cuda.install(monkeypatch)
    _, graphs = train("global", True)
    assert graphs is not None
    assert graphs.num_replayed == graphs.num_captures / 2 == 2, "those for which they were captured"
    assert "gives other numbers replayed than run kernel by kernel" in caplog.text
    assert "start again" not in caplog.text, "no step was computed with what was captured"


def test_late_changes_are_found_late_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Comparisons come at powers of two: training may have gone wrong meanwhile."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(
        Global, "forward", lambda self, x: nn.Linear.forward(self, x) * (1 + (next(CALLS) > 9))
    )
    train("global", True)
    assert "start again from an earlier checkpoint, with train.cuda_graphs = false" in caplog.text
