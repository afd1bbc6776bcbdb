"""The comparison at the end of a run, and what `hybridpar check` says before one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from train.runs import write_config

from hybridpar.cli import main
from hybridpar.config import Launch, from_mapping, load_toml, to_toml
from hybridpar.job import JobPlan
from hybridpar.prediction import Comparison, predict, table
from hybridpar.train import job as loop
from hybridpar.validate import resolve

MODEL = {"hidden_size": 128, "num_heads": 4, "seq_length": 64}


@pytest.mark.thorough
def test_a_run_ends_with_measured_beside_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through evaluations and checkpoints, whose memory is not that of training."""
    config = from_mapping(
        {"train": {"measure_memory": True, "num_steps": 12}, "model": MODEL},
        load_toml(write_config(tmp_path)),
    )
    loop.train(config, Launch(0, 0, 1, 1))
    (line,) = re.findall(
        r"peak memory of a process: ([\d.]+) MiB measured, ([\d.]+) MiB predicted \(([-+][\d.]+) "
        r"%\)",
        capsys.readouterr().err,
    )
    measured, predicted, error = map(float, line)
    assert predicted == pytest.approx(
        predict(JobPlan(resolve(config, 1)))[0].total / 2**20, abs=0.05
    )
    assert measured == pytest.approx(predicted, rel=0.05)
    assert error == pytest.approx(100 * (measured / predicted - 1), abs=0.5)


def test_a_comparison_names_the_stage_that_takes_the_most() -> None:
    mib = 2**20
    text = str(Comparison(measured=(90 * mib, 300 * mib), predicted=(100 * mib, 303 * mib)))
    assert text == (
        "peak memory of a process on stage 1: 300.0 MiB measured, 303.0 MiB predicted (-1.0 %); "
        "stages are off by at most 10.0 %"
    )
    text = str(Comparison((90 * mib, 300 * mib), (100 * mib, 303 * mib), "rank"))
    assert "a process on rank 1: " in text
    assert "; ranks are off by" in text


def test_check_tells_the_peak_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    config = from_mapping({"parallel": {"pp": 2}, "model": MODEL}, load_toml(path))
    path.write_text(to_toml(config))
    assert main(["check", str(path), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["peak_memory"]
    expected = predict(JobPlan(resolve(config, 2)))
    assert stages == [stage.as_json() for stage in expected]
    for stage in stages:
        parts = (
            "weights",
            "master",
            "gradients",
            "optimizer",
            "checkpoint",
            "activations",
            "communication",
            "transient",
        )
        assert stage["total"] == sum(stage[part] for part in parts)
        assert stage["checkpoint"] == stage["weights"] + stage["optimizer"], (
            "written while training continues"
        )
    for waits in ({"checkpoint": {"asynchronous": False}}, {"train": {"save_interval": 0}}):
        assert not any(
            stage.checkpoint for stage in predict(JobPlan(resolve(from_mapping(waits, config), 2)))
        )
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "with train.device = cpu" in out
    assert table(expected) in out


@pytest.mark.thorough
def test_check_for_gpus_counts_the_copy_for_checkpoints_as_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    assert main(["check", str(path), "--train.device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "with train.device = cuda" in out
    assert "in host memory" in out
    assert main(["check", str(path), "--train.device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (stage,) = found["peak_memory"]
    assert found["device"] == "cuda"
    assert stage["checkpoint"] == 0
    assert stage["host"] == stage["weights"] + stage["master"] + stage["optimizer"]
    assert stage["total"] == sum(
        stage[name]
        for name in (
            "weights",
            "master",
            "gradients",
            "optimizer",
            "activations",
            "communication",
            "transient",
        )
    )
