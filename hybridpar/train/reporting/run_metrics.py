"""Numbers of a run: metrics.jsonl with one JSON object a line, time of batches, memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.config import Whole, from_plain
from hybridpar.config.row_names import VALID, valid_name, valid_numbers_in
from hybridpar.config.typed import convert
from hybridpar.data.loader import Loader
from hybridpar.reading import open_regular, parse_json

MOST_CURVES = 32
"""Most curves in a plot; a run may have any number of validation sets."""
_LONGEST_LINE = 1 << 20


def stream_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl, each of which has a step.

    An invalid line ends the rows: a killed process may have left the last line unfinished.
    """
    return (row for row, _ in _rows(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics.jsonl; see `stream_metrics`."""
    return list(stream_metrics(path))


def end_of(path: Path, step: int) -> int:
    """Return the offset after the rows up to a step; 0 for step 0, which is evaluated again."""
    found = 0
    for row, end in _rows(path) if step else ():
        if row["step"] > step:
            break
        found = end
    return found


def last_step(path: Path) -> int:
    """Return the largest step in a metrics.jsonl; -1 if it has no row."""
    return max((row["step"] for row in stream_metrics(path)), default=-1)


def read_curves(path: Path, most: int = 1 << 13) -> list[dict[str, Any]]:
    """Return losses and validation losses of a metrics.jsonl, as rows with a step and one loss.

    Curves beyond MOST_CURVES are left out. A curve of more than `most` points keeps every second
    point, or every fourth, ..; and always the last one.
    """
    curves: dict[str, _Thinned] = {}
    for row in stream_metrics(path):
        names = [
            valid_name("loss", valid_set)
            for name, valid_set, _ in valid_numbers_in(row)
            if name == "loss"
        ]
        for name in ["loss", *names]:
            if isinstance(row.get(name), int | float) and (
                name in curves or len(curves) < MOST_CURVES
            ):
                curves.setdefault(name, _Thinned(most)).add({"step": row["step"], name: row[name]})
    return [row for curve in curves.values() for row in curve.points]


@dataclass(frozen=True)
class History:
    """Numbers of a whole run from metrics.jsonl, including steps before the run was resumed.

    A number that is not finite (null in metrics.jsonl) is NaN.

    Attributes:
        losses: Training loss by step, one every train.log_interval steps.
        validation: Numbers of each evaluation by step, then by name ("val_loss", ..).
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> History:
        """Read a metrics.jsonl; without the file the history is empty."""
        history = History()
        for row in stream_metrics(path):
            step = row["step"]
            if "loss" in row:
                history.losses[step] = _number(row["loss"])
                continue
            numbers = {
                name: _number(value)
                for name, value in row.items()
                if name.startswith(VALID) and (value is None or isinstance(value, int | float))
            }
            if numbers:
                history.validation.setdefault(step, {}).update(numbers)
        return history


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


class _Thinned:
    """At most `most` evenly spaced values of a long sequence, and the last value."""

    def __init__(self, most: int):
        self._most = most
        self._every = 1
        self._count = 0
        self._kept: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []

    def add(self, value: dict[str, Any]) -> None:
        """Add a value; when too many are kept, drop every second one."""
        self._last = [value]
        if self._count % self._every == 0:
            self._kept.append(value)
            self._last = []
            if len(self._kept) > self._most:
                self._kept = self._kept[::2]
                self._every = 2 * self._every
        self._count += 1

    @property
    def points(self) -> list[dict[str, Any]]:
        """The kept values."""
        return self._kept + self._last


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of a metrics.jsonl, each with the offset at which its line ends."""
    try:
        with BufferedReader(open_regular(path, within=path.parent)) as file:
            end = 0
            while line := file.readline(_LONGEST_LINE):
                row = convert(parse_json(line), dict)
                from_plain(Whole, row.get("step"), "step")
                # an unfinished line is the last one, so its end does not count
                end += len(line) if line.endswith(b"\n") else 0
                yield row, end
    except (OSError, ValueError):
        pass


class BatchClock:
    """A loader that records when each batch begins on this rank: at its first micro-batch.

    The times of updates are not enough: in a pipeline that never drains they come late, and the
    last two come together.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._starts: dict[int, float] = {}
        self.first_sample = loader.first_sample
        self.num_targets = loader.num_targets

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        """Return a micro-batch, and record when its batch began."""
        self._starts.setdefault(batch, time.perf_counter())
        return self._loader.microbatch(batch, index)

    def seconds(self, batch: int) -> float:
        """Return the time from the start of `batch` to the next start, or until now."""
        return self._starts.get(batch + 1, time.perf_counter()) - self._starts.pop(batch)

    def stop(self) -> None:
        """Forget the recorded times, once the pipeline has drained."""
        self._starts.clear()


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: RAM on a CPU, otherwise GPU memory.

    GPU memory is what torch has reserved, because memory of CUDA graphs counts as allocated only
    while they are captured.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
