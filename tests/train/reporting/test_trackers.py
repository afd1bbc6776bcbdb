"""Numbers of a run at Weights & Biases and MLflow: their own clients, writing to this machine."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.runs import tiny

from hybridpar.config import from_mapping
from hybridpar.train.reporting.log import RunLog
from hybridpar.train.reporting.progress import Reporter
from hybridpar.train.reporting.trackers import NAMES, Trackers
from hybridpar.validate import problems


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.thorough
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
    found = {
        metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")
    }
    assert found == {step: 1 / step for step in range(1, 5)}
    folders = [
        folder for folder in (config.run.folder / "wandb").glob("offline-run-*") if folder.is_dir()
    ]
    assert len(folders) == 2
    assert len({folder.name.rsplit("-", 1)[1] for folder in folders}) == 1, "one identity"


def log_of(folder: Path, resumed_step: int, *trackers: str) -> RunLog:
    config = tiny(folder, run={"trackers": list(trackers), "project": "stones"})
    return RunLog(config.run.folder, resumed_step, Reporter(), writes=True, config=config)


def write(log: RunLog, steps: range, branch: int) -> None:
    for step in steps:
        log.write({"step": step, "loss": step + branch / 10})
        if step % 2 == 0:
            log.write({"step": step, "val_loss": step + branch / 10})


def finish(log: RunLog) -> None:
    log.finish()
    log.close()


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .wandb file: records of LevelDB's log format, in blocks of 32 KiB, behind a
    header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    data = path.read_bytes()
    at = 7
    whole = b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }


@pytest.mark.thorough
@pytest.mark.usefixtures("local")
def test_every_row_is_kept_after_a_run_has_gone_back(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    log = log_of(tmp_path, 0, "wandb", "mlflow")
    write(log, range(1, 6), 0)
    log.cut_back(3)
    write(log, range(4, 7), 1)  # rolled back
    finish(log)
    log = log_of(tmp_path, 2)
    write(log, range(3, 9), 2)  # without a tracker
    finish(log)
    for resumed_step, branch in ((2, 3), (4, 4)):
        log = log_of(tmp_path, resumed_step, "mlflow", "wandb")
        write(log, range(resumed_step + 1, 7), branch)
        finish(log)
    wandb.teardown()  # waits until its files are written
    sent = [
        (step, branch)
        for branch, steps in (
            (0, range(1, 6)),
            (1, range(4, 7)),
            (3, range(3, 7)),
            (4, range(5, 7)),
        )
        for step in steps
    ]
    rows = [row for path in sorted(tmp_path.rglob("*.wandb")) for row in wandb_rows(path)]
    assert [(row["step"], row["loss"]) for row in rows] == [
        (step, step + branch / 10) for step, branch in sent
    ]
    assert [row["step"] for row in rows if "val_loss" in row] == [
        step for step, _ in sent if step % 2 == 0
    ]
    positions = [row["_step"] for row in rows]
    assert positions == sorted(set(positions)), "wandb drops a row that is not behind the last one"
    assert positions[:5] == [1, 2, 3, 4, 5], "the step itself, until the run goes back"
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("stones").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((m.step, m.value) for m in history) == sorted(
        (step, step + branch / 10) for step, branch in sent
    )
    newest = {m.step: m.value for m in sorted(history, key=lambda m: m.timestamp)}
    assert newest == {step: step + branch / 10 for step, branch in sent}


def test_a_tracker_that_is_left_out_or_fails_keeps_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        next_position = 0

        def __init__(self, config: Any, known: str):
            self.id = known or f"new-{len(made)}"
            made.append(self.id)

        def write(self, step: int, position: int, values: dict[str, float]) -> None:
            assert values

        def close(self) -> None:
            pass

    made: list[str] = []
    monkeypatch.setattr(
        "hybridpar.train.reporting.trackers._TRACKERS", {"wandb": Fake, "mlflow": Fake}
    )
    finish(log_of(tmp_path, 0, "wandb"))
    finish(log_of(tmp_path, 2, "mlflow"))
    monkeypatch.setattr(
        "hybridpar.train.reporting.trackers._TRACKERS",
        {"wandb": lambda *given: 1 / 0, "mlflow": Fake},
    )
    log = log_of(tmp_path, 2, "wandb", "mlflow")
    log.write({"step": 3, "anomaly": "x"})  # a row without numbers is not sent
    finish(log)
    monkeypatch.setattr(
        "hybridpar.train.reporting.trackers._TRACKERS", {"wandb": Fake, "mlflow": Fake}
    )
    finish(log_of(tmp_path, 2, "wandb"))
    assert made == ["new-0", "new-1", "new-1", "new-0"]
    names = tiny(tmp_path).run.folder / NAMES
    names.write_text('{"wandb": "of-an-older-version"}')
    finish(log_of(tmp_path, 2, "wandb"))
    assert made[-1] == "of-an-older-version"


def test_a_server_that_has_more_than_this_machine_knows_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        id = "7"
        next_position = 100

        def __init__(self, *given: Any):
            pass

        def write(self, step: int, position: int, values: dict[str, float]) -> None:
            found.append((step, position))

    found: list[tuple[int, int]] = []
    monkeypatch.setattr("hybridpar.train.reporting.trackers._TRACKERS", {"wandb": Server})
    trackers = Trackers(tiny(tmp_path, run={"trackers": ["wandb"]}), print, 4, 4)
    for step in (5, 5, 6):
        trackers.write({"step": step, "loss": 1.0})
    assert found == [(5, 100), (5, 100), (6, 101)]


def test_errors_of_a_tracker_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        id = "7"
        next_position = 0

        def __init__(self, *given: Any):
            pass

        def write(self, step: int, position: int, values: dict[str, float]) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setattr(
        "hybridpar.train.reporting.trackers._TRACKERS",
        {"wandb": Broken, "mlflow": lambda *given: 1 / 0},
    )
    said: list[str] = []
    trackers = Trackers(tiny(tmp_path, run={"trackers": ["wandb", "mlflow"]}), said.append)
    assert trackers.ids == {"wandb": "7"}
    trackers.write({"step": 1, "loss": 2.0})
    trackers.write({"step": 2, "loss": 2.0})
    trackers.close()
    assert said == [
        "run.trackers: mlflow: division by zero; training continues without it",
        "run.trackers: wandb: no route to host; training continues without it",
    ]
    (tmp_path / NAMES).write_text("[")
    assert Trackers(tiny(tmp_path), said.append).ids == {}


def test_missing_trackers_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = from_mapping({"run": {"trackers": ["wandb"]}}, tiny(tmp_path))
    assert "run.trackers = 'wandb': is not installed; try pip install wandb" in "".join(
        map(str, problems(config, 1))
    )
