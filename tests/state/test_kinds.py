"""The registry of kinds of state, and that a new kind needs an entry in it and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint.grids import differing, load_all, save_all
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.build import Recomputation
from hybridpar.prediction.footprint import Buffers, trace_stage
from hybridpar.state import RankState, find_divergence, kinds
from hybridpar.state.kind import StateKind
from hybridpar.state.kinds import parse_key
from hybridpar.train.engine import Engine
from hybridpar.verify.run import Disturbance, verify

CPU = torch.device("cpu")


def make(parallel: dict[str, int], schedule: str = "2bw") -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 12,
                "num_heads": 3,
                "seq_length": 8,
                "vocab_size": 23,
            },
            "parallel": {"dp": 1} | parallel,
            "pipeline": {"num_microbatches": 3, "schedule": schedule},
            "train": {"micro_batch_size": 1},
        }
    )


class Residual(StateKind):
    """A number for each element that this rank updates, as error feedback would keep."""

    name = "residual"

    def __init__(self, holder: RankState):
        super().__init__(holder)
        self.residuals = {
            name: torch.zeros_like(x, dtype=holder.weights.master_dtype)
            for name, x in holder.weights.parameters_of_optimizer().items()
        }

    def tensors(self) -> dict[str, Tensor]:
        return {self.key(name): tensor for name, tensor in self.residuals.items()}


@pytest.fixture
def _with_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Residual))


def test_keys_are_read_as_they_are_written() -> None:
    for kind, parameter, what in (
        (kinds.WeightVersions, "blocks.0.w", "12"),
        (kinds.Master, "blocks.0.w", ""),
        (kinds.OptimizerState, "blocks.0.w", "exp_avg"),
    ):
        assert parse_key(kind.key(parameter, what)) == (kind, parameter, what)
    for key in ("weights/x/blocks.0.w", "gradients/0/blocks.0.w", "residual/blocks.0.w", "w"):
        with pytest.raises(ValueError, match=f"{key!r} is not the name of a checkpoint's tensor"):
            parse_key(key)


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("_with_residuals")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tp": 3, "pp": 2, "zero": 1}, {"pp": 3, "dp": 2}),
        ({"dp": 3, "zero": 1}, {"tp": 2, "dp": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_new_kind_goes_to_another_grid(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    folder = save_all(tmp_path, make(before))
    for engine in load_all(folder, make(after)):
        assert any(key.startswith("residual/") for key in engine.state.tensors())
        assert not differing(engine), engine.grid.describe()


def test_a_new_kind_begins_as_zero_where_a_checkpoint_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_all(tmp_path, make({"tp": 2}))
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Residual))
    for engine in load_all(folder, make({"pp": 2})):
        assert all(key.startswith("residual/") for key in differing(engine))
        assert not any(
            tensor.any()
            for key, tensor in engine.state.tensors().items()
            if key.startswith("residual/")
        )


@pytest.mark.ranks
@pytest.mark.usefixtures("_with_residuals")
def test_a_new_kind_is_verified_through_a_resume() -> None:
    assert verify(make({}), {"tp": 2, "dp": 2}, 4, Disturbance(resume_at=2)).ok


def spoiled(config: Config) -> str:
    parallel = config.parallel
    engine = Engine(
        JobPlan(config), ProcessGrid(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), CPU
    )
    assert find_divergence(engine.state.placed(), engine.grid) == ""
    if engine.grid.rank == 1:
        next(
            tensor for key, tensor in engine.state.tensors().items() if key.startswith("residual/")
        ).view(-1)[0] = 1.0
    return find_divergence(engine.state.placed(), engine.grid)


@pytest.mark.ranks
@pytest.mark.usefixtures("_with_residuals")
def test_a_new_kind_is_audited() -> None:
    assert all(
        said.startswith("residual/") and "of rank 1 is not what rank 0 has" in said
        for said in run_ranks(spoiled, 2, make({"dp": 2}, "1f1b"))
    )


def test_a_new_kind_is_in_the_predicted_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make({})
    plain = trace_stage(config, range(1, 2), Recomputation(), Buffers(1, 1), CPU)
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Residual))
    more = trace_stage(config, range(1, 2), Recomputation(), Buffers(1, 1), CPU)
    assert plain.weights == plain.gradients
    assert 0.9 * plain.weights < more.optimizer - plain.optimizer <= plain.weights
