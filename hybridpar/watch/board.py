"""What the page shows of a run, from its folder alone; all of it may be missing, or unfinished."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridpar import flight
from hybridpar.config import Config, read_run_config, unloaded_code
from hybridpar.errors import HybridparError, config_error
from hybridpar.reading import nearest_path
from hybridpar.train.costs import read_costs
from hybridpar.train.folder import CHANGES, CONFIG, COSTS, FAILURES, FLIGHT, METRICS, NOTES
from hybridpar.watch.tail import Curve, Tail

CURVES = ("loss", "val_loss", "tokens_per_s", "step_ms", "grad_norm", "lr", "memory_mib", "mfu")
"""Numbers of metrics.jsonl that are drawn over the steps."""
PICTURES = ("executed.svg", "plan.svg")
"""Pictures of the schedule, the best first."""
_EVENTS = 50
"""Failures, notes and changes that are kept, of each the newest."""
_MOST_RANKS = 256
_STALE_S = 60.0
"""A rank that has noted nothing for so long is not training."""
_ENDED = (flight.FAILED, flight.LOST, flight.REFUSED, "finished")
_KINDS = ("weights", "master", "gradients", "optimizer", "checkpoint", "activations", "communication", "transient")


class Board:
    """The state of a run as plain data, read on at every look. A look takes time by what is new, not by the run's
    length, and memory is bounded. It imports no code that the run folder names, unless `trust` says so.

    Raises: ConfigError where there is no such folder.
    """

    def __init__(self, folder: Path, *, trust: bool = False):
        if not folder.is_dir():
            raise config_error("run", str(folder), "does not exist", nearest_path(folder) or "runs/NAME")
        self.folder = folder
        self._trust = trust
        self._lock = threading.Lock()
        self._metrics = Tail(folder / METRICS)
        self._events = {name: (Tail(folder / name), deque[dict[str, Any]](maxlen=_EVENTS))
                        for name in (FAILURES, NOTES, CHANGES)}
        self._begins = 0
        self._memory: list[dict[str, Any]] | None = None
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: Curve() for name in CURVES}
        self._latest: dict[str, Any] = {}

    def look(self, most_bytes: int = 1 << 62) -> dict[str, Any]:
        """All that the page shows, as JSON has it. `most_bytes`: of metrics, read now; the next look goes on."""
        with self._lock:
            self._read_metrics(most_bytes)
            for tail, kept in self._events.values():
                kept.extend(tail.rows())
            config, ranks = self._config(), self._ranks()
            return {
                "name": self.folder.name, "running": any(not r["ended"] and r["age_s"] < _STALE_S for r in ranks),
                "steps": config.train.num_steps if config else 0, "configuration": _summary(config) if config else "",
                "counts": config.model.counts if config else "tokens", "latest": self._latest,
                "eta_s": self._eta(config),
                "curves": {name: curve.shown() for name, curve in self._curves.items()},
                "ranks": ranks, "time_goes": self._time_goes(), "memory": self._memory_of(config),
                "failures": _lines(self._events[FAILURES][1]), "notes": _lines(self._events[NOTES][1]),
                "changes": _lines(self._events[CHANGES][1]),
                "anomalies": sorted(path.name for path in self.folder.glob("anomalies/*.json"))[-_EVENTS:],
                "picture": (picture := next((name for name in PICTURES if (self.folder / name).is_file()), "")),
                "drawn": "as executed" if picture == PICTURES[0] else "simulated"}

    def _read_metrics(self, most_bytes: int) -> None:
        for row in self._metrics.rows(most_bytes):
            if self._metrics.begins != self._begins:
                self._begins = self._metrics.begins
                self._forget()
            step = row.get("step")
            if not isinstance(step, int) or isinstance(step, bool):
                continue
            for name, curve in self._curves.items():
                if isinstance(value := row.get(name), int | float):
                    curve.add(step, value)
            self._latest |= {name: value for name, value in row.items() if isinstance(value, int | float)}

    def _config(self) -> Config | None:
        try:
            return read_run_config(self.folder / CONFIG, trust=self._trust)
        except (HybridparError, OSError):  # not there yet, or damaged
            return None

    def _eta(self, config: Config | None) -> float | None:
        """Seconds left, at the pace of the last step."""
        ms, step = self._latest.get("step_ms"), self._latest.get("step")
        if config is None or not isinstance(ms, int | float) or not isinstance(step, int):
            return None
        return max(config.train.num_steps - step, 0) * ms / 1e3

    def _ranks(self) -> list[dict[str, Any]]:
        """What each rank is doing, by its flight record."""
        found = []
        for path in sorted(self.folder.glob(f"{FLIGHT}/rank_[0-9]*"))[:_MOST_RANKS]:
            record = flight.read(path) if path.name[5:].isdecimal() else None  # else of a thread
            if record is not None:
                ended = record.phase in _ENDED
                does = f"{record.phase} {record.error}" if ended else record.situation()
                found.append({"rank": int(path.name[5:]), "does": does.strip(), "ended": ended,
                              "age_s": time.time() - record.time})
        return found

    def _time_goes(self) -> list[dict[str, float]]:
        """Seconds of a batch on each rank of a pipeline, as measured; empty before the run has."""
        try:
            measured = read_costs(self.folder / COSTS).measured
        except HybridparError:
            return []
        return [asdict(parts) | {"step": measured.step_time} for parts in measured.parts]

    def _memory_of(self, config: Config | None) -> list[dict[str, Any]]:
        """The predicted peak of each rank of a pipeline by kind, in MiB; predicted once.

        Empty where that needs code of a custom model that is not imported.
        """
        if self._memory is None and config is not None:
            from hybridpar.memory import predict

            stages = []
            if unloaded_code(config) is None:
                with contextlib.suppress(HybridparError):
                    stages = [stage.as_json() for stage in predict(config)]
            self._memory = [{kind: stage[kind] / 2**20 for kind in _KINDS if stage[kind]} for stage in stages]
        return self._memory or []


def _summary(config: Config) -> str:
    parallel = config.parallel
    return (f"{config.model.kind}, {config.pipeline.schedule}, {config.train.dtype} on tp={parallel.tp} "
            f"pp={parallel.pp} dp={parallel.dp}, {config.global_batch_size if parallel.dp else '?'} samples a batch")


def _lines(rows: deque[dict[str, Any]]) -> list[str]:
    """Each row as a line of text, the newest first."""
    return [str(row.get("text") or ", ".join(f"{key} {value}" for key, value in row.items())) for row in reversed(rows)]
