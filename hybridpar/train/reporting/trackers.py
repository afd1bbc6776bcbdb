"""Send the numbers of a run to experiment trackers: Weights & Biases and MLflow (`run.trackers`).

Their own environment variables configure them: WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI. An
error is reported once, and training continues without the tracker.

A run may go back: it resumes from an earlier checkpoint, or rolls back. Every row after that is
sent too, with its step. Weights & Biases drops a row whose position does not exceed all others. So
a row's position is its step plus an offset, which grows when the run goes back, and the step is a
separate metric, the x-axis of all others:

    step        1 2 3 4 5 | 3 4 5 6     resumed after step 2
    offset      0 0 0 0 0 | 3 3 3 3
    position    1 2 3 4 5 | 6 7 8 9
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridpar.config import Config, Whole, from_plain, to_mapping
from hybridpar.reading import parse_json, read_limited, to_json

NAMES = "trackers.json"
"""File with a run's ids at its trackers, with which a resumed run continues there."""
_STEP = "step"
"""Metric of Weights & Biases that holds a row's step."""


@dataclass(frozen=True)
class _Known:
    """Content of trackers.json.

    Attributes:
        ids: Ids by the names of trackers.
        offset: Difference between positions and steps.
    """

    ids: dict[str, str] = field(default_factory=dict)
    offset: Whole = 0


class Trackers:
    """All trackers of a run, on the rank that writes its files. Errors are reported, not raised.

    Args:
        last_step: Last step that the run has reached before; -1 if none.

    Attributes:
        ids: Ids at all trackers that the run has ever had, even if this job does not use them.
    """

    def __init__(
        self, config: Config, say: Callable[[str], None], resumed_step: int = 0, last_step: int = -1
    ):
        self._say = say
        self._open: dict[str, _Wandb | _Mlflow] = {}
        known = _known(config.run.folder / NAMES)
        self.ids = dict(known.ids)
        self._offset = known.offset
        self._next_position = last_step + known.offset + 1 if known.ids else 0
        for name in config.run.trackers:
            self._try(name, partial(self._begin, name, config))
        # an evaluation comes before the first step
        self.go_back(resumed_step + 1 if resumed_step else 0)

    def _begin(self, name: str, config: Config) -> None:
        tracker = _TRACKERS[name](config, self.ids.get(name, ""))
        self._open[name] = tracker
        self.ids[name] = tracker.id
        self._next_position = max(self._next_position, tracker.next_position)

    def go_back(self, first_step: int) -> None:
        """Place rows from `first_step` on after all rows that were sent already."""
        self._offset = max(self._offset, self._next_position - first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of a row of metrics.jsonl."""
        values = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "skipped")
        }
        if not values:
            return
        step = row["step"]
        position = row["step"] + self._offset
        self._next_position = max(self._next_position, position + 1)
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.write, step, position, values))

    def close(self) -> None:
        """Wait until all numbers are sent."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def names(self) -> str:
        """Return the text of trackers.json."""
        return to_json(asdict(_Known(self.ids, self._offset)))

    def _try(self, name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # any error of a server, a network or a disk
            self._open.pop(name, None)
            said = error or type(error).__name__
            self._say(f"run.trackers: {name}: {said}; training continues without it")


def _known(path: Path) -> _Known:
    """Read a trackers.json; empty if the file is missing or damaged."""
    try:
        found = parse_json(read_limited(path, 1 << 16, within=path.parent))
        if isinstance(found, dict) and "ids" not in found:
            found = {"ids": found}  # an older version stored the ids only
        known: _Known = from_plain(_Known, found, NAMES)
        return known
    except (OSError, ValueError):
        return _Known()


class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: Config, known: str):
        wandb = importlib.import_module("wandb")
        config.run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.run.project,
            name=config.run.name,
            dir=str(config.run.folder),
            config=to_mapping(config),
            id=known or None,
            resume="allow" if known else None,
        )
        self.id = str(self._run.id)
        self.next_position = int(self._run.step)
        """First position that its server lacks; 0 for a new run and without a connection."""
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, position: int, values: dict[str, float]) -> None:
        self._run.log(values | {_STEP: step}, step=position)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow, which sends numbers from its own thread and keeps all values of a step."""

    next_position = 0
    """It accepts any position."""

    def __init__(self, config: Config, known: str):
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self.id = known or self._new_run(config)
        if known:
            self._client.update_run(known, status="RUNNING")
        self._last: Any = None

    def _new_run(self, config: Config) -> str:
        found = self._client.get_experiment_by_name(config.run.project)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(config.run.project)
        )
        run: str = self._client.create_run(experiment, run_name=config.run.name).info.run_id
        flat = [
            self._entities.Param(f"{section}.{key}", json.dumps(value)[:500])
            for section, table in to_mapping(config).items()
            for key, value in table.items()
        ]
        for first in range(0, len(flat), 100):  # a call accepts at most 100
            self._client.log_batch(run, params=flat[first : first + 100])
        return run

    def write(self, step: int, position: int, values: dict[str, float]) -> None:
        now = time.time_ns() // 10**6
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._last = self._client.log_batch(self.id, metrics=metrics, synchronous=False)

    def close(self) -> None:
        if self._last is not None:
            self._last.wait()
        self._client.set_terminated(self.id)


_TRACKERS: dict[str, type[_Wandb | _Mlflow]] = {"wandb": _Wandb, "mlflow": _Mlflow}
