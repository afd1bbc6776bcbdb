"""One state of a rank for all who need one: what is trained with, what memory is predicted of, what
is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import Recomputation
from hybridpar.planner.measuring.bench import Unit
from hybridpar.prediction.footprint import Buffers, trace_stage
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")


def make(parallel: dict[str, int] | None = None, **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 24,
                "num_heads": 3,
                "seq_length": 8,
                "vocab_size": 31,
            },
            "parallel": {"dp": 1} | (parallel or {}),
            "pipeline": {"num_microbatches": 3, "schedule": "2bw"},
            "train": {"micro_batch_size": 2},
            **sections,
        }
    )


def trained(config: Config) -> Engine:
    parallel = config.parallel
    grid = ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    engine = Engine(JobPlan(config), grid, CPU)
    engine.train(
        SyntheticLoader(config.model, 2, 3, grid.dp.rank, grid.dp.size), 2, lambda step: None
    )
    return engine


def sizes(config: Config) -> dict[str, int]:
    return trained(config).state.num_bytes()


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optim", [{"staleness": "prediction"}, {"name": "muon"}], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prediction_and_training_build_the_same_state(
    zero: int, optim: dict[str, Any], dtype: str
) -> None:
    config = make(
        {"dp": 2, "tp": 2, "zero": zero}, optim=optim, train={"micro_batch_size": 2, "dtype": dtype}
    )
    predicted = trace_stage(config, range(4), Recomputation(), Buffers(2, 2), CPU)
    there = run_ranks(sizes, 4, config)[0]
    assert there == {name: getattr(predicted, name) for name in there}
    assert (there["master"] > 0) == (dtype == "bf16" or "staleness" in optim)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("optim", [{}, {"name": "muon", "staleness": "extrapolation"}], ids=str)
def test_measurement_and_training_build_the_same_state(optim: dict[str, Any]) -> None:
    config = make(
        optim=optim,
        model={
            "tie_embeddings": False,
            "num_layers": 2,
            "hidden_size": 24,
            "num_heads": 3,
            "seq_length": 8,
            "vocab_size": 31,
        },
    )
    units = [Unit(config, number, Axis("tp"), CPU) for number in range(4)]
    state = trained(config).state
    measured = {key for unit in units for key, tensor in unit.state.tensors().items()}
    assert measured == {
        key.replace("weights/2", "weights/0") for key in state.tensors() if "weights/1" not in key
    }
    assert sum(unit.num_parameters for unit in units) == sum(slot.numel for slot in state.slots)


def test_a_copy_is_waited_for_before_anything_changes() -> None:
    engine = trained(make())
    waits = []
    engine.state.hold(lambda: waits.append(engine.state.weights.newest))
    engine.state.update(2, 0.1, None)
    engine.state.load(engine.state.tensors(), [2, 3], 2)
    with engine.state.unpredicted():
        assert waits == [2, 3, 3]
