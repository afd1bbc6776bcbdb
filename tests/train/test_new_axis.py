"""An axis that nothing uses: its ranks hold copies, which train, count, save, load and are compared
as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from hybridpar import checkpoint
from hybridpar.config import from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.state import find_divergence
from hybridpar.train.engine import Engine, StepResult


def train(
    root: Path, sizes: dict[str, int], zero: int = 0, changed: int = -1
) -> tuple[list[StepResult], str]:
    """Two more batches from the newest checkpoint on; what the audit finds once rank `changed` has
    changed a bit."""
    parallel = {"dp": 1, "zero": zero} | {name: size for name, size in sizes.items() if name != "x"}
    config = from_mapping(
        {
            "model": {
                "num_layers": 3,
                "hidden_size": 12,
                "num_heads": 3,
                "seq_length": 8,
                "vocab_size": 37,
                "dropout": 0.1,
            },
            "parallel": parallel,
            "pipeline": {"num_microbatches": 4 // parallel["dp"], "schedule": "2bw"},
            "train": {"dtype": "fp64", "micro_batch_size": 2},
            "optim": {"lr": 1e-2, "clip_grad": 0.5},
        }
    )
    grid = ProcessGrid(sizes)
    steps = []
    engine = Engine(JobPlan(config), grid, torch.device("cpu"))
    checkpoint.resume(root, engine, "corpus", print)
    engine.train(
        SyntheticLoader(
            config.model, 2, config.pipeline.num_microbatches, grid.dp.rank, grid.dp.size
        ),
        2,
        steps.append,
    )
    assert "x" not in sizes or not grid.axis("x").traffic.calls
    assert not find_divergence(engine.state.placed(), engine.grid)
    checkpoint.save(root, engine, "corpus")
    if grid.rank == changed:
        next(iter(engine.state.weights.leaves_of(engine.batches_done).values())).detach().view(-1)[
            3
        ] += 1e-6
    return steps, find_divergence(engine.state.placed(), engine.grid)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "zero", "files"),
    [
        ({"pp": 2, "x": 2, "tp": 1}, 0, ["pp0-tp0", "pp1-tp0"]),
        ({"x": 2, "dp": 2}, 1, ["pp0-tp0", "pp0-tp0-dp1"]),
    ],
    ids=str,
)
def test_it_is_one_process_with_copies(
    tmp_path: Path, sizes: dict[str, int], zero: int, files: list[str]
) -> None:
    wanted = [step for _ in range(3) for step in run_ranks(train, 1, tmp_path / "alone", {})[0][0]]
    first, alone, last = (
        run_ranks(train, *run)
        for run in (
            (4, tmp_path / "x", sizes, zero),
            (1, tmp_path / "x", {}),
            (4, tmp_path / "x", sizes, zero, 1),
        )
    )
    for steps, _ in first:
        for got, one in zip([*steps, *alone[0][0], *last[0][0]], wanted, strict=True):
            assert (got.loss, got.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-9)
    assert "of rank 1 is not what rank" in last[0][1]
    saved = [path.stem for path in (tmp_path / "x").glob("step_00000006/*.safetensors")]
    assert sorted(saved) == files
