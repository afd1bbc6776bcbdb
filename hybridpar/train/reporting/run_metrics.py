"""The numbers of a run: metrics.jsonl with one JSON object a line, the time of batches, and
memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.config import Whole, from_plain
from hybridpar.config.row_names import valid_name, valid_numbers_in
from hybridpar.config.typed import convert
from hybridpar.data.loader import Loader
from hybridpar.reading import open_regular, parse_json

MOST_CURVES = 32
"""Numbers of a run that pictures show; a run may have any number of validation sets."""
_LONGEST_LINE = 1 << 20


def stream_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics.jsonl, one at a time, each with a step.

    The first line that is something else ends them: a killed process may have left the last one
    unfinished.
    """
    return (row for row, _ in _rows(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All objects of a metrics.jsonl, as `stream_metrics` gives them."""
    return list(stream_metrics(path))


def end_of(path: Path, step: int) -> int:
    """The place in a metrics.jsonl where the lines up to a step end; 0 for step 0, whose lines are
    made again."""
    found = 0
    for row, end in _rows(path) if step else ():
        if row["step"] > step:
            break
        found = end
    return found


def evaluation_at(path: Path, step: int, name: str) -> dict[str, Any] | None:
    """The row of a metrics.jsonl with the validation loss `name` of a step, or None if it has no
    such row."""
    return next((row for row in stream_metrics(path) if row["step"] == step and name in row), None)


def last_step(path: Path) -> int:
    """The largest step in a metrics.jsonl; -1 if it has no row."""
    return max((row["step"] for row in stream_metrics(path)), default=-1)


def read_curves(path: Path, most: int = 1 << 13) -> list[dict[str, Any]]:
    """Losses and validation losses of a metrics.jsonl, as rows of a step and one of them; of the
    first sets, if many.

    Of more than `most` of a kind every second one is left out, or three of four, ..; the last one
    is always there.
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


class _Thinned:
    """At most `most` values of a long row of them, evenly, and the last one."""

    def __init__(self, most: int):
        self._most = most
        self._every = 1
        self._count = 0
        self._kept: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []

    def add(self, value: dict[str, Any]) -> None:
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
        return self._kept + self._last


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a metrics.jsonl, each with the place in the file where its line ends."""
    try:
        with BufferedReader(open_regular(path, within=path.parent)) as file:
            end = 0
            while line := file.readline(_LONGEST_LINE):
                row = convert(parse_json(line), dict)
                from_plain(Whole, row.get("step"), "step")
                end += len(line) if line.endswith(b"\n") else 0  # else nothing may follow it
                yield row, end
    except (OSError, ValueError):
        pass


class BatchClock:
    """A loader that notes when each batch begins on this rank: when its first micro-batch is asked
    for.

    The time between updates would not do: in a pipeline that never drains they come late, and the
    last two together.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._starts: dict[int, float] = {}
        self.first_sample = loader.first_sample
        self.num_targets = loader.num_targets

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        self._starts.setdefault(batch, time.perf_counter())
        return self._loader.microbatch(batch, index)

    def seconds(self, batch: int) -> float:
        """The time from the start of `batch` to that of the next, or until now where none has
        started."""
        return self._starts.get(batch + 1, time.perf_counter()) - self._starts.pop(batch)

    def stop(self) -> None:
        """Forgets what was noted, after the last batch of a stretch."""
        self._starts.clear()


def peak_memory_mib(device: torch.device) -> float:
    """The most memory that this process has held, in MiB: in RAM where it computes there, else on
    its GPU.

    There it is what torch has reserved: CUDA graphs keep memory that counts as allocated only while
    they are recorded.
    """
    if (
        device.type == "cuda" and torch.cuda.get_allocator_backend() == "pluggable"
    ):  # which does not count
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**20
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
