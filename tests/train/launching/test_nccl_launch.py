"""`hybridpar train --ranks 2` trains as one process does on the same device, step by step.

This is NCCL as users get it: the launcher passes `device_id` to init_process_group, so
communicators are connected at once, those of the axes are split from the job's own, and all
transfers of a group share one communicator and one stream (the tests in test_gpu.py use
communicators that are made at first use). The same tests run on the CPU over Gloo.

Two ranks share one GPU here, which takes turns between them: 9 to 17 ms a collective. So models are
tiny and steps few.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from train.one_gpu import hybridpar
from train.runs import metrics, steps, write_config

pytest.importorskip("tyro")

STEPS = 5
MICROBATCHES = 4
TOLERANCE = 1e-4
"""Relative, of fp32 losses and gradient norms: the sums have another order."""
LIMIT_S = {"cpu": 120.0, "cuda": 35.0}
"""Limit of each command. A test runs two at most."""

GRIDS: dict[str, tuple[str, ...]] = {
    "pp": ("--parallel.pp", "2"),
    "tp": ("--parallel.tp", "2", "--parallel.sequence", "True"),
    "dp-zero1": ("--parallel.dp", "2", "--parallel.zero", "1"),
}
GRAPHS = ("--train.graph_grids", "True")
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))

Step = tuple[int, float, float]


def train(
    folder: Path, name: str, device: str, *flags: str
) -> tuple[list[Step], list[dict[str, Any]], str]:
    """Train a GPT of 2 layers with 2bw, and audit its replicas after every other step.

    Returns:
        Number, loss and gradient norm of each step; all rows of metrics.jsonl; what the command
        printed.
    """
    printed = hybridpar(
        folder,
        "train",
        str(write_config(folder)),
        "--run.name",
        name,
        "--train.device",
        device,
        "--train.num_steps",
        str(STEPS),
        "--train.eval_interval",
        str(STEPS),
        "--train.save_interval",
        "0",
        "--anomalies.audit_interval",
        "2",
        "--model.num_heads",
        "4",
        "--model.dropout",
        "0.1",
        "--optim.decay",
        "constant",
        *flags,
        timeout_s=LIMIT_S[device],
    )
    rows = metrics(folder / "runs" / name)
    return steps(rows), rows, printed


@cache
def alone(device: str, folder: Path) -> tuple[list[Step], float]:
    """Train on one process; returns the steps and the last loss on held-out samples."""
    found, rows, _ = train(
        folder, "alone", device, "--pipeline.num_microbatches", str(MICROBATCHES)
    )
    return found, last_evaluation(rows)


def last_evaluation(rows: list[dict[str, Any]]) -> float:
    return [row["val_loss"] for row in rows if "val_loss" in row][-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("device", "grid", "graphs"),
    [
        *(pytest.param("cpu", grid, False, id=f"cpu-{grid}") for grid in GRIDS),
        *(
            pytest.param("cuda", grid, False, id=grid, marks=(*ON_GPU, pytest.mark.timeout(60)))
            for grid in GRIDS
        ),
        *(
            pytest.param(
                "cuda", grid, True, id=f"{grid}-graphs", marks=(*ON_GPU, pytest.mark.timeout(60))
            )
            for grid in ("pp", "tp")
        ),
    ],
)
def test_two_ranks_train_as_one_process_does(
    tmp_path: Path, folder: Path, device: str, grid: str, graphs: bool
) -> None:
    expected, expected_evaluation = alone(
        device, folder
    )  # first: it compiles, while no rank waits for another
    replicas = 2 if "dp" in grid else 1
    flags = (
        "--ranks",
        "2",
        *GRIDS[grid],
        "--pipeline.num_microbatches",
        str(MICROBATCHES // replicas),
    )
    found, rows, printed = train(tmp_path, "grid", device, *flags, *(GRAPHS if graphs else ()))
    reports = re.findall(
        r"rank (\d) talks over (\w+), bound to (\S+), replayed (\d+), audited (\d+)", printed
    )
    newest = {
        rank: (backend, bound, int(replayed), int(audits))
        for rank, backend, bound, replayed, audits in reports
    }
    group = ("nccl", "cuda:0") if device == "cuda" else ("gloo", "None")
    assert set(newest) == {"0", "1"}, printed
    for backend, bound, replayed, audits in newest.values():
        assert (backend, bound) == group, printed
        assert (replayed > 0) is graphs, printed
        assert audits == STEPS // 2, printed
    assert (
        [step for step, _, _ in found]
        == list(range(1, STEPS + 1))
        == [step for step, _, _ in expected]
    )
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    assert last_evaluation(rows) == pytest.approx(expected_evaluation, rel=TOLERANCE)
