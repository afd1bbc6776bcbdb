"""Numbers of a run at Weights & Biases and MLflow: their own clients, writing to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train.runs import tiny

from hybridpar.config import from_mapping
from hybridpar.train.log import RunLog
from hybridpar.train.progress import Reporter
from hybridpar.train.trackers import NAMES, Trackers
from hybridpar.validate import problems


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.usefixtures("local")
def test_a_run_and_its_continuation_are_one_run_there(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    config = tiny(tmp_path, run={"trackers": ["mlflow", "wandb"], "project": "stones"})
    for first in (0, 2):
        log = RunLog(config.run.folder, first, Reporter(), writes=True, config=config)
        for step in (first + 1, first + 2):
            log.write({"step": step, "loss": 1 / step, "losses": {"a": 1.0}})
        log.finish()
        log.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("stones").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.num_steps"] == "8"
    found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert found == {step: 1 / step for step in range(1, 5)}
    folders = [folder for folder in (config.run.folder / "wandb").glob("offline-run-*") if folder.is_dir()]
    assert len(folders) == 2
    assert len({folder.name.rsplit("-", 1)[1] for folder in folders}) == 1, "one identity"


def test_what_a_tracker_raises_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        id = "7"

        def __init__(self, *given: Any):
            pass

        def write(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr("hybridpar.train.trackers._TRACKERS", {"wandb": Broken, "mlflow": lambda *given: 1 / 0})
    said: list[str] = []
    trackers = Trackers(tiny(tmp_path, run={"trackers": ["wandb", "mlflow"]}), said.append)
    assert trackers.ids == {"wandb": "7"}
    trackers.write({"step": 1, "loss": 2.0})
    trackers.write({"step": 2, "loss": 2.0})
    trackers.close()
    assert said == ["run.trackers: mlflow: division by zero; training goes on without it",
                    "run.trackers: wandb: no route to host; training goes on without it"]
    (tmp_path / NAMES).write_text("[")
    assert Trackers(tiny(tmp_path), said.append).ids == {}


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = from_mapping({"run": {"trackers": ["wandb"]}}, tiny(tmp_path))
    assert "run.trackers = 'wandb': is not installed; try pip install wandb" in "".join(map(str, problems(config, 1)))
