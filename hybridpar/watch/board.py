"""The data that the page shows of a run, from its folder alone; any of it may be missing or
unfinished."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hybridpar import flight
from hybridpar.config import Config, read_run_config, unloaded_code
from hybridpar.config.row_names import metrics_in, valid_name, valid_numbers_in
from hybridpar.errors import ConfigError, HybridparError, config_error, printable, shown
from hybridpar.reading import names_in, read_limited, reason, runs_in, runs_near
from hybridpar.train.folder import (
    CHANGES,
    CONFIG,
    COSTS,
    FAILURES,
    FLIGHT,
    LOADS_PICTURE,
    METRICS,
    NOTES,
)
from hybridpar.train.reporting.costs_file import read_costs
from hybridpar.train.reporting.run_metrics import MOST_CURVES
from hybridpar.validate import resolve, value_problems
from hybridpar.watch.tail import GREATEST, Curve, Tail

T = TypeVar("T")

CURVES = (
    "loss",
    "val_loss",
    "tokens_per_s",
    "step_ms",
    "grad_norm",
    "lr",
    "memory_mib",
    "mfu",
    "max_vio",
)
"""Numbers of metrics.jsonl that are drawn over the steps, besides metrics and validation
numbers."""
PICTURES = ("executed.svg", "plan.svg")
"""Pictures of the schedule, best first."""
SERVED = (*PICTURES, LOADS_PICTURE)
"""All pictures that the page shows."""
_EVENTS = 50
"""Number of newest failures, notes and changes that are kept, of each."""
_MOST_RANKS = 256
_MOST_STREAMS = 4 * _MOST_RANKS
_SENT = ("elements", "bytes", "whole_elements", "whole_bytes")
"""Counts of a stream of metrics.jsonl."""
_MOST_NAMES = 1 << 14
"""Most names in a folder that are read."""
_MOST_EVENT_BYTES = 64 << 20
"""Most bytes of failures, notes and changes that one look reads, of each."""
_MOST_COSTS = 8 << 20
_MOST_PICTURE = 16 << 20
_LONGEST = 2000
"""Most characters in a line of text."""
_STALE_S = 60.0
"""Seconds after which a rank that has recorded nothing counts as not training."""
_ENDED = (flight.FAILED, flight.LOST, flight.REFUSED, "finished")
_KINDS = (
    "weights",
    "master",
    "gradients",
    "optimizer",
    "checkpoint",
    "activations",
    "communication",
    "transient",
)


class Board:
    """The state of a run as plain data, updated at every look.

    A look takes time in proportion to what is new, not to the run's length, and memory is bounded.
    Code that the run folder names is imported only with `trust`. A file that cannot be read, or has
    unexpected contents, is a line under `problems`; everything else is shown.

    Raises:
        ConfigError: The folder does not exist.
    """

    def __init__(self, folder: Path, *, trust: bool = False):
        if not folder.is_dir():
            raise config_error(
                "run", str(folder), "does not exist", runs_near(folder) or "runs/NAME"
            )
        if not (folder / CONFIG).exists() and runs_in(folder):
            raise config_error(
                "run", str(folder), "a folder of runs; name one run in it", runs_near(folder)
            )
        self.folder = folder
        self._trust = trust
        self._lock = threading.Lock()
        self._metrics = Tail(folder / METRICS)
        self._events = {
            name: (Tail(folder / name), deque[str](maxlen=_EVENTS))
            for name in (FAILURES, NOTES, CHANGES)
        }
        self._begins = 0
        self._read: dict[str, tuple[object, Any, str]] = {}
        self._memory: list[dict[str, Any]] | None = None
        self._unpredicted = ""
        self._curves: dict[str, Curve] = {}
        self._latest: dict[str, Any] = {}
        self._traffic: list[dict[str, Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._curves = {name: Curve() for name in CURVES}
        self._latest = {}
        self._traffic = []

    def look(self, most_bytes: int = 256 << 20) -> dict[str, Any]:
        """Return all that the page shows, as JSON values.

        Args:
            most_bytes: Bytes of metrics to read now; the next look continues from there.
        """
        with self._lock:
            self._read_metrics(most_bytes)
            for tail, kept in self._events.values():
                kept.extend(map(_line, tail.rows(min(most_bytes, _MOST_EVENT_BYTES))))
            config, ranks, time_goes = self._config(), self._ranks(), self._time_goes()
            memory = self._memory_of(config)
            picture = next((name for name in PICTURES if self._has_picture(name)), "")
            return {
                "name": self.folder.name,
                "running": any(not r["ended"] and r["age_s"] < _STALE_S for r in ranks),
                "steps": config.train.num_steps if config else 0,
                "configuration": _summary(config) if config else "",
                "counts": config.model.counts if config else "tokens",
                "latest": self._latest,
                "eta_s": self._eta(config),
                "curves": {name: curve.shown() for name, curve in self._curves.items()},
                "ranks": ranks,
                "time_goes": time_goes,
                "memory": memory,
                "traffic": self._traffic,
                "failures": self._newest(FAILURES),
                "notes": self._newest(NOTES),
                "changes": self._newest(CHANGES),
                "anomalies": [
                    printable(name)
                    for name in names_in(self.folder / "anomalies", _MOST_NAMES)
                    if name.endswith(".json")
                ][-_EVENTS:],
                "picture": picture,
                "loads": LOADS_PICTURE if self._has_picture(LOADS_PICTURE) else "",
                "drawn": "as executed" if picture == PICTURES[0] else "simulated",
                "problems": self._problems(),
            }

    def picture(self, name: str) -> bytes:
        """Return one of `SERVED`.

        Raises:
            OSError: There is none.
            ValueError: It is too large.
        """
        return read_limited(self.folder / name, _MOST_PICTURE, within=self.folder)

    def _has_picture(self, name: str) -> bool:
        """Return whether a picture can be shown."""
        return self._kept(name, lambda: len(self.picture(name))) is not None

    def _newest(self, name: str) -> list[str]:
        """Return the events of a file as lines, newest first."""
        return list(reversed(self._events[name][1]))

    def _problems(self) -> list[str]:
        """Return the problems of the run's files, as lines."""
        tails = [self._metrics, *(tail for tail, _ in self._events.values())]
        lines = [tail.problem for tail in tails] + [
            problem for _, _, problem in self._read.values()
        ]
        return [printable(line)[:_LONGEST] for line in [*lines, self._unpredicted] if line]

    def _kept(self, name: str, read: Callable[[], T]) -> T | None:
        """Return `read(path)` for a file of the folder, cached until the file changes; None if
        it is missing or damaged."""
        path = self.folder / name
        try:
            state = os.stat(path)
            stamp: object = (state.st_ino, state.st_size, state.st_mtime_ns)
        except OSError as error:
            stamp = error.errno
        before = self._read.get(name)
        if before is None or before[0] != stamp:
            value = None
            problem = ""
            try:
                if os.path.lexists(path):
                    value = read()
            except HybridparError as error:
                problem = str(error).replace(f"{path}: ", f"{name}: ").replace("\n", "; ")
            except (OSError, ValueError, RecursionError) as error:
                problem = f"{name}: cannot be read ({reason(error)})"
            before = self._read[name] = stamp, value, problem
        return before[1]  # type: ignore[no-any-return]

    def _read_metrics(self, most_bytes: int) -> None:
        for row in self._metrics.rows(most_bytes):
            if self._metrics.begins != self._begins:
                self._begins = self._metrics.begins
                self._forget()
            step = row.get("step")
            if type(step) is not int or not 0 <= step < 1 << 62:
                continue
            self._latest["step"] = step
            if "traffic" in row:
                self._traffic = _streams_of(row["traffic"])
            numbers = {name: row[name] for name in CURVES if isinstance(row.get(name), int | float)}
            numbers |= {
                valid_name(name, valid_set): value
                for name, valid_set, value in valid_numbers_in(row)
            }
            for name, value in (numbers | dict(metrics_in(row))).items():
                if name not in self._curves and len(self._curves) >= MOST_CURVES:
                    continue
                self._curves.setdefault(name, Curve()).add(step, value)
                if isinstance(value, float) or abs(value) <= GREATEST:
                    self._latest[name] = value

    def _config(self) -> Config | None:
        return self._kept(CONFIG, self._read_config)

    def _read_config(self) -> Config:
        """Read config.toml. Raises: ConfigError, also for values out of range."""
        config = read_run_config(self.folder / CONFIG, trust=self._trust)
        if wrong := list(value_problems(config)):
            raise ConfigError(*wrong)
        return config

    def _eta(self, config: Config | None) -> float | None:
        """Return the seconds left, at the pace of the last step."""
        ms = self._latest.get("step_ms")
        step = self._latest.get("step")
        if config is None or not isinstance(ms, int | float) or not isinstance(step, int):
            return None
        return max(config.train.num_steps - step, 0) * ms / 1e3

    def _ranks(self) -> list[dict[str, Any]]:
        """Return what each rank is doing, from its flight record."""
        names = names_in(self.folder / FLIGHT, _MOST_NAMES)
        ranks = [
            name for name in names if re.fullmatch("rank_[0-9]{5,7}", name)
        ]  # the others belong to threads
        found = []
        for name in ranks[:_MOST_RANKS]:
            record = flight.read(self.folder / FLIGHT / name)
            if record is not None:
                ended = record.phase in _ENDED
                does = f"{record.phase} {record.error}" if ended else record.situation()
                found.append(
                    {
                        "rank": int(name[5:]),
                        "does": does.strip()[:_LONGEST],
                        "ended": ended,
                        "age_s": time.time() - record.time,
                    }
                )
        return found

    def _time_goes(self) -> list[dict[str, float]]:
        """Return the measured seconds of a batch on each pipeline rank; empty until the run has
        measured them."""
        return self._kept(COSTS, self._read_time_goes) or []

    def _read_time_goes(self) -> list[dict[str, float]]:
        """Read the measured times. Raises: HybridparError."""
        measured = read_costs(self.folder / COSTS, _MOST_COSTS).measured
        return [
            asdict(parts) | {"step": measured.step_time} for parts in measured.parts[:_MOST_RANKS]
        ]

    def _memory_of(self, config: Config | None) -> list[dict[str, Any]]:
        """Return the predicted peak of each pipeline rank by kind, in MiB; predicted once.

        Empty if the prediction needs code of a custom model that is not imported.
        """
        if self._memory is None and config is not None:
            stages: list[dict[str, Any]] = []
            if unloaded_code(config) is None:
                try:
                    stages = self._predicted(config)
                except HybridparError as error:
                    self._unpredicted = (
                        f"{CONFIG}: no memory is predicted: {str(error).strip()}".replace(
                            "\n", "; "
                        )
                    )
            self._memory = [
                {kind: stage[kind] / 2**20 for kind in _KINDS if stage[kind]} for stage in stages
            ]
        return self._memory or []

    @staticmethod
    def _predicted(config: Config) -> list[dict[str, Any]]:
        """Return the prediction for each pipeline rank.

        Raises: ConfigError if the run is not possible or very large.
        """
        from hybridpar.job import JobPlan
        from hybridpar.prediction import check_size, predict

        config = resolve(config, config.parallel.num_ranks)
        check_size(config)
        return [stage.as_json() for stage in predict(JobPlan(config))]


def _summary(config: Config) -> str:
    parallel = config.parallel
    return (
        f"{config.model.kind}, {config.pipeline.schedule}, {config.train.dtype} on "
        f"tp={parallel.tp} "
        f"{f'cp={parallel.cp} ' if parallel.cp > 1 else ''}"
        f"pp={parallel.pp} dp={parallel.dp}, {config.global_batch_size if parallel.dp else '?'} "
        "samples a batch"
    )


def _streams_of(traffic: object) -> list[dict[str, Any]]:
    """Return what a batch sends on each link, from a row of metrics; invalid entries are left
    out."""
    if not isinstance(traffic, dict):
        return []
    batches: Any = traffic.get("batches")
    streams = traffic.get("streams")
    if not _is_count(batches) or batches == 0 or not isinstance(streams, list):
        return []
    found = []
    for stream in streams[:_MOST_STREAMS]:
        if not isinstance(stream, dict):
            continue
        texts: dict[str, Any] = {name: stream.get(name) for name in ("link", "what", "codec")}
        counts: dict[str, Any] = {name: stream.get(name) for name in _SENT}
        has_texts = all(isinstance(text, str) for text in texts.values())
        if has_texts and all(map(_is_count, counts.values())):
            shown_texts = {name: printable(text)[:_LONGEST] for name, text in texts.items()}
            a_batch = {name: count / batches for name, count in counts.items()}
            found.append(shown_texts | a_batch)
    return found


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _line(row: dict[str, Any]) -> str:
    """Return an event as a line of text."""
    text = row.get("text")
    if not text or not isinstance(text, str):
        text = ", ".join(
            f"{key} {value if isinstance(value, str) else shown(value)}"
            for key, value in row.items()
        )
    return text[:_LONGEST]
