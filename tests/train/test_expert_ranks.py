"""A whole run whose ranks share experts: evaluations, audits and checkpoints are those of one
process, and generation reads what it has saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint.exchange import same_bits
from train.runs import run_job, write_config

from hybridpar import checkpoint
from hybridpar.cli import main

pytestmark = pytest.mark.ranks

TOKENS = 8 * 16
"""Tokens of a batch, which all count."""
MODEL = ("--model.num_experts=3", "--model.router_bias_rate=0.01")


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_of_two_ranks_is_the_run_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1e-4: fp32, sums in another order."""
    config = write_config(tmp_path, "1f1b")
    common = ("train", config, *MODEL, "--anomalies.audit_interval=2")
    two = ("--parallel.dp=2", "--parallel.ep=2", "--run.name=two")
    assert "ep=2" in run_job(2, *common, *two)
    run_job(1, *common, "--pipeline.num_microbatches=4", "--run.name=one")
    found, expected = (rows(tmp_path / "runs" / name) for name in ("two", "one"))
    for key in ("loss", "val_loss", "grad_norm", "max_vio"):
        wanted = {row["step"]: row[key] for row in expected if key in row}
        assert wanted
        got = {row["step"]: row[key] for row in found if key in row}
        assert got == pytest.approx(wanted, rel=1e-4)
    for found_rows in (found, expected):
        loads = {row["step"]: row["expert_loads"] for row in found_rows if "expert_loads" in row}
        assert sum(sum(load["1"]) for load in loads.values()) == 6 * TOKENS * 2
        assert all(load.keys() == {"1", "2"} for load in loads.values())
    picture = (tmp_path / "runs" / "two" / "expert_loads.svg").read_text()
    assert picture.count("<title>block 2, expert 2: ") == 1
    folder = tmp_path / "runs" / "two" / "checkpoints" / "step_00000006"
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == ["pp0-tp0-experts1.safetensors", "pp0-tp0.safetensors"]
    _, weights = checkpoint.load_full(folder)
    folder.rename(tmp_path / "whole")
    assert "resuming after step 4" in run_job(2, *common, *two)
    same_bits(checkpoint.load_full(folder)[1], weights)
    assert {name.split(".")[4] for name in weights if ".experts." in name} == {"0", "1", "2"}
    capsys.readouterr()
    prompt = ("--prompt", "the river", "--max_tokens", "4")
    assert main(["generate", "--checkpoint", str(folder), *prompt]) == 0
    assert capsys.readouterr().out.startswith("the river")
