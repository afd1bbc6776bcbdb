"""The numbers of a run: one JSON object a line, time, memory, and the share of the machine's arithmetic in use."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint import plain
from hybridpar.checkpoint.files import to_json
from hybridpar.comm import all_reduce, barrier
from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.grid import Axis
from hybridpar.models.build import DTYPES
from hybridpar.nn import matmul
from hybridpar.reading import open_regular
from hybridpar.train.records import Records

# Dense peak FLOP/s of 16-bit matrix products, from NVIDIA's data sheets; the first name in the device's name counts.
_GPU_PEAKS = (
    ("H200", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("GH200", 989e12),
    ("B200", 2250e12), ("A100", 312e12), ("A10G", 70e12), ("A10", 125e12), ("A30", 165e12), ("A40", 150e12),
    ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("V100", 125e12), ("T4", 65e12),
)
_LONGEST_LINE = 1 << 20
_PROBE_SIZE, _PROBE_SECONDS = 1024, 0.15


class MetricsLog:
    """`metrics.jsonl`: appended to as training goes, and first cut back to what came before a resumed step.

    A number that is not finite is written as null, which JSON has.
    """

    def __init__(self, records: Records, path: Path, resumed_step: int):
        self._records, self._path = records, path
        records.begin(path, _end_of(path, resumed_step))

    def cut_back(self, step: int) -> None:
        """Forgets what came after a step that training goes on after."""
        kept = [line for line in self._records.waiting(self._path) if json.loads(line)["step"] <= step]
        self._records.begin(self._path, _end_of(self._path, step))
        for line in kept:
            self._records.append(self._path, line)

    def write(self, values: dict[str, Any]) -> None:
        self._records.append(self._path, f"{to_json(values)}\n".encode())


def _end_of(path: Path, step: int) -> int:
    """Where the lines of a metrics.jsonl up to a step end; those of step 0 are made again."""
    found = 0
    for row, end in _rows(path) if step else ():
        if row["step"] > step:
            break
        found = end
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, each with a step; nothing from the first line on that is something else, as the
    last one that a killed process left unfinished."""
    return [row for row, _ in _rows(path)]


def read_curves(path: Path, most: int = 1 << 13) -> list[dict[str, Any]]:
    """Losses and validation losses of a metrics.jsonl, as rows of a step and one of them.

    Of more than `most` of a kind every second one is left out, or three of four, ..; the last one is always there.
    """
    curves = {name: _Thinned(most) for name in ("loss", "val_loss")}
    for row, _ in _rows(path):
        for name, curve in curves.items():
            if isinstance(row.get(name), int | float):
                curve.add({"step": row["step"], name: row[name]})
    return [row for curve in curves.values() for row in curve.points]


class _Thinned:
    """At most `most` values of a long row of them, evenly, and the last one."""

    def __init__(self, most: int):
        self._most, self._every, self._count = most, 1, 0
        self._kept: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []

    def add(self, value: dict[str, Any]) -> None:
        self._last = [value]
        if self._count % self._every == 0:
            self._kept.append(value)
            self._last = []
            if len(self._kept) > self._most:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._count += 1

    @property
    def points(self) -> list[dict[str, Any]]:
        return self._kept + self._last


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects that read_metrics gives, one at a time, each with the place in the file where its line ends."""
    try:
        with BufferedReader(open_regular(path)) as file:
            end = 0
            while line := file.readline(_LONGEST_LINE):
                row = plain.mapping(plain.parse(line), "a line")
                plain.integer(row.get("step"), "step")
                end += len(line) if line.endswith(b"\n") else 0  # else nothing may follow it
                yield row, end
    except (OSError, ValueError):
        pass


class BatchClock:
    """A loader that notes when each batch begins on this rank, which is when its first micro-batch is asked for.

    The time between updates would not do: in a pipeline that never drains they come late, and the last two together.
    """

    def __init__(self, loader: Loader):
        self._loader = loader
        self._starts: dict[int, float] = {}
        self.first_sample, self.num_targets = loader.first_sample, loader.num_targets

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        self._starts.setdefault(batch, time.perf_counter())
        return self._loader.microbatch(batch, index)

    def seconds(self, batch: int) -> float:
        """From the start of `batch` to that of the next, or until now where none has started."""
        return self._starts.get(batch + 1, time.perf_counter()) - self._starts.pop(batch)

    def stop(self) -> None:
        """Forgets what was noted, after the last batch of a stretch."""
        self._starts.clear()


def peak_memory_mib(device: torch.device) -> float:
    """Most memory that this process has held, in MiB: on its GPU, or in RAM where it computes there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def peak_flops(config: Config, device: torch.device, world: Axis) -> tuple[float, str]:
    """Matrix-product FLOP/s of all processes together, and where the number comes from.

    Known GPUs in 16 bit, one for each process: their data sheet; otherwise measured, on all processes at the same time.
    Collectives: on all ranks of the job.
    """
    if device.type == "cuda" and config.train.dtype in ("bf16", "fp16") and not config.train.share_gpus:
        name = torch.cuda.get_device_name(device)
        for known, peak in _GPU_PEAKS:
            if known in name:
                return peak * world.size, f"{known} data sheet x {world.size}"
    dtype = DTYPES[config.train.dtype]
    barrier(world)
    total = torch.tensor(_probe(dtype, device), dtype=torch.float64, device=device)
    all_reduce(total, world)
    at_once = "es at once" if world.size > 1 else ""
    return float(total), f"{config.train.dtype} matrix products, measured on {world.size} process{at_once}"


def _probe(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a layer's product: of the fastest of several, as others may be using the machine."""
    size = _PROBE_SIZE * (4 if device.type == "cuda" else 1)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    end, fastest = time.perf_counter() + _PROBE_SECONDS, math.inf
    while (start := time.perf_counter()) < end or fastest == math.inf:
        matmul.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
