"""Whole runs whose ranks share samples: trained, evaluated, stopped, and resumed on another grid."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.forked import supervised
from train.runs import metrics, run_job, steps, write_config

pytestmark = pytest.mark.ranks


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        (["--parallel.cp", "2"], ["--parallel.pp", "2"], 2),
        (["--parallel.cp", "2", "--parallel.zero", "1"], ["--parallel.cp", "3"], 3),
    ],
    ids=str,
)
def test_a_run_resumes_with_another_cp(
    tmp_path: Path, before: list[str], after: list[str], ranks: int
) -> None:
    """Losses of training and of validation are those of one process."""
    path = write_config(tmp_path, "1f1b")
    flags = ["--train.dtype", "fp64", "--train.log_interval", "1", "--train.num_steps", "4"]

    def run(name: str, ranks: int, *more: str) -> None:
        run_job(ranks, "train", path, *flags, "--run.name", name, *more)

    run("whole", 1)
    flags += ["--optim.decay_steps", "4"]
    run("parts", 2, *before, "--train.num_steps", "2")
    run("parts", ranks, *after)
    whole, parts = (metrics(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert [step for step, _, _ in steps(whole)] == [1, 2, 3, 4]
    for a, b in zip(steps(whole), steps(parts), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    losses = [
        [row["val_loss"] for row in rows if row.get("step") == 4 and "val_loss" in row]
        for rows in (whole, parts)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    """Two ranks that share samples recover to the bits of a run that nothing happens to."""
    path = write_config(tmp_path, "1f1b")
    flags = ["--parallel.cp", "2", "--data.packing", "stream", "--train.log_interval", "1"]
    run_job(2, "train", path, *flags, "--run.name", "calm")
    code, out = supervised(
        "train", path, "--ranks", "2", *flags, "--inject", "kill rank 1 at step 4 micro-batch 1"
    )
    assert code == 0, out
    run, calm = (tmp_path / "runs" / name for name in ("run", "calm"))
    assert steps(metrics(run)) == steps(metrics(calm))
    last = "checkpoints/step_00000006"
    files = sorted(file.name for file in (calm / last).glob("*.safetensors"))
    assert files
    for name in files:
        assert (run / last / name).read_bytes() == (calm / last / name).read_bytes()
