"""Experiment trackers that are sent the numbers of a run: Weights & Biases and MLflow (`run.trackers`).

They are set up by their own environment variables: WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI. What they raise is
said once, and training goes on without them.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hybridpar.config import Config, from_plain, to_mapping
from hybridpar.reading import parse_json, read_limited, to_json

NAMES = "trackers.json"
"""The identities of a run at its trackers, so that a resumed run goes on there."""


class Tracker(Protocol):
    """A run at a tracker. id: its identity there."""

    id: str

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """All of a run, on the rank that keeps its files. No method raises an error of a tracker; `say` is told of it.

    ids: the identities of those that have begun.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._say, self.ids = say, dict[str, str]()
        self._open: dict[str, Tracker] = {}
        known = _known(config.run.folder / NAMES)
        for name in config.run.trackers:
            def begin(name: str = name) -> None:
                self._open[name] = _TRACKERS[name](config, known.get(name, ""))
                self.ids[name] = self._open[name].id
            self._try(name, begin)

    def write(self, row: Mapping[str, Any]) -> None:
        """Sends the numbers of a row of metrics.jsonl."""
        values = {name: float(value) for name, value in row.items()
                  if isinstance(value, int | float) and name not in ("step", "skipped")}
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.write(row["step"], values))  # type: ignore[misc]

    def close(self) -> None:
        """Waits until all is sent."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def names(self) -> str:
        """The text of trackers.json."""
        return to_json(self.ids)

    def _try(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever a server, a network or a disk has
            self._open.pop(name, None)
            self._say(f"run.trackers: {name}: {error or type(error).__name__}; training goes on without it")


def _known(path: Path) -> dict[str, str]:
    """The identities that are kept in a run folder; none where the file is missing or damaged."""
    try:
        return from_plain(dict[str, str], parse_json(read_limited(path, 1 << 16)), NAMES)
    except (OSError, ValueError):
        return {}


class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: Config, known: str):
        wandb = importlib.import_module("wandb")
        config.run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=config.run.project, name=config.run.name, dir=str(config.run.folder),
                               config=to_mapping(config), id=known or None, resume="allow" if known else None)
        self.id = str(self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow, whose numbers are sent by a thread of its own."""

    def __init__(self, config: Config, known: str):
        mlflow = importlib.import_module("mlflow")
        self._entities, self._client = importlib.import_module("mlflow.entities"), mlflow.MlflowClient()
        self.id = known or self._new_run(config)
        self._last: Any = None

    def _new_run(self, config: Config) -> str:
        found = self._client.get_experiment_by_name(config.run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(config.run.project)
        run: str = self._client.create_run(experiment, run_name=config.run.name).info.run_id
        flat = [self._entities.Param(f"{section}.{key}", json.dumps(value)[:500])
                for section, table in to_mapping(config).items() for key, value in table.items()]
        for first in range(0, len(flat), 100):  # the most that one call may have
            self._client.log_batch(run, params=flat[first : first + 100])
        return run

    def write(self, step: int, values: dict[str, float]) -> None:
        now = time.time_ns() // 10**6
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._last = self._client.log_batch(self.id, metrics=metrics, synchronous=False)

    def close(self) -> None:
        if self._last is not None:
            self._last.wait()
        self._client.set_terminated(self.id)


_TRACKERS: dict[str, Callable[[Config, str], Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow}
