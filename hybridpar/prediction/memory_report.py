"""Tables of predicted and measured memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm import gather_objects
from hybridpar.data.loader import Loader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.knobs import Saving
from hybridpar.prediction.meter import CpuMeter, CudaMeter
from hybridpar.prediction.predict import batches_to_peak, predict
from hybridpar.prediction.walk import StageMemory

_COLUMNS = (
    "weights",
    "master",
    "gradients",
    "optimizer",
    "checkpoint",
    "activations",
    "communication",
    "transient",
    "total",
)
_BESIDE = {"graphs": "more for CUDA graphs", "host": "in host memory", "file": "in the slow tier"}
_MIB = 2**20
_WORTH_SAYING = 5
"""Smallest reported difference, in percent of a peak."""


def table(stages: Sequence[StageMemory], rank_name: str = "stage") -> str:
    """Return a table of the predicted peak of each pipeline rank in MiB, by its components, and of
    memory elsewhere."""
    beside = {
        name: title
        for name, title in _BESIDE.items()
        if any(getattr(stage, name) for stage in stages)
    }
    rows = [[rank_name, *_COLUMNS, *beside.values(), "at the peak"]]
    for number, stage in enumerate(stages):
        parts = [f"{getattr(stage, name) / _MIB:,.1f}" for name in (*_COLUMNS, *beside)]
        rows.append(
            [str(number), *parts, f"{stage.in_flight} in flight, {stage.during.partition('v')[0]}"]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]], num_left: int = 0) -> str:
    """Return rows of a table as aligned lines. The first `num_left` columns are text, the others
    numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def shares(parts: Mapping[str, int]) -> dict[str, float]:
    """Return the percentage of each part, with one decimal, adding up to 100."""
    total = sum(parts.values()) or 1
    tenths = {key: 1000 * part // total for key, part in parts.items()}
    by_rest = sorted(parts, key=lambda key: -(1000 * parts[key] % total))
    for key in by_rest[: 1000 - sum(tenths.values())]:
        tenths[key] += 1
    return {key: count / 10 for key, count in tenths.items()}


def short_form(stages: Sequence[StageMemory], rank_name: str, saving: Saving | None) -> list[str]:
    """Return lines about the fullest rank of a prediction, the owners of its peak, and the saving
    of a knob."""
    rank = max(range(len(stages)), key=lambda number: stages[number].total)
    stage = stages[rank]
    state = (
        {"state in memory": stage.state - stage.file}
        if stage.file
        else {name: getattr(stage, name) for name in _COLUMNS[:4]}
    )
    owners = shares(state | {name: getattr(stage, name) for name in _COLUMNS[4:-1]})
    whose = ", ".join(
        f"{name} {owners[name]:.0f} %"
        for name in sorted(owners, key=lambda n: -owners[n])
        if owners[name] >= _WORTH_SAYING
    )
    lines = [
        f"{rank_name} {rank} takes the most, {stage.total / _MIB:,.1f} MiB in {stage.during}: "
        f"{whose}"
    ]
    if saving is not None:
        lines.append(
            f"{saving.knob} would save {saving.saves / _MIB:,.1f} MiB of it; `hybridpar memory` "
            "says what "
            "each knob saves"
        )
    return lines


@dataclass(frozen=True)
class Comparison:
    """The peak of each stage, on its rank with the largest peak. Units: bytes.

    `rank_name` is "rank" if a pipeline rank holds several stages.
    """

    measured: tuple[int, ...]
    predicted: tuple[int, ...]
    rank_name: str = "stage"

    def __str__(self) -> str:
        """Return one line: the stage with the largest peak, and the largest deviation of the
        others."""
        stage = max(range(len(self.measured)), key=self.measured.__getitem__)
        off = [m / p - 1 for m, p in zip(self.measured, self.predicted, strict=True)]
        worst = max(off, key=abs)
        where = f" on {self.rank_name} {stage}" if len(self.measured) > 1 else ""
        others = (
            f"; {self.rank_name}s are off by at most {100 * abs(worst):.1f} %"
            if len(self.measured) > 1
            else ""
        )
        return (
            f"peak memory of a process{where}: {self.measured[stage] / _MIB:,.1f} MiB measured, "
            f"{self.predicted[stage] / _MIB:,.1f} MiB predicted ({100 * off[stage]:+.1f} %){others}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"measured": list(self.measured), "predicted": list(self.predicted)}


class MemoryWatch:
    """A measurement of a run from before its engine is built, to be compared with the prediction.

    On a GPU it lasts to the end, at no cost. On a CPU it lasts for the batches after which the peak
    must have been reached, because it costs some microseconds per operator.

    watch = MemoryWatch(job, device)
    engine = Engine(...)
    engine.train(watch.loader(loader), ...)
    comparison = watch.compare(grid)
    """

    def __init__(self, job: JobPlan, device: torch.device):
        self._job = job
        self._device = device
        self._meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
        self._batches_left = batches_to_peak(job)
        self._batch = -1

    def loader(self, loader: Loader) -> Loader:
        """Wrap `loader`, so that the watch sees how far training has come, and restart the peak."""
        self._meter.restart_peak()
        return _Watched(self, loader)

    def note(self, batch: int) -> None:
        """Note that a micro-batch of `batch` is about to begin."""
        if not isinstance(self._meter, CpuMeter) or self._batches_left < 0:
            return
        if batch != self._batch:
            self._batch = batch
            self._batches_left = self._batches_left - 1
        if self._batches_left < 0:
            self._meter.close()
        else:
            self._meter.read()  # empties the profiler's event buffer

    def compare(self, grid: ProcessGrid, state: int = 0) -> Comparison:
        """End the measurement, and compare it with the plan's prediction if there is one.

        Args:
            grid: The grid.
            state: Bytes that the state has taken, bypassing the allocator on a CPU.

        Collectives: one gather.
        """
        self._meter.close()
        mine = (
            grid.pp.rank,
            self._meter.read().peak + (state if isinstance(self._meter, CpuMeter) else 0),
        )
        peaks = [0] * grid.pp.size
        for stage, peak in gather_objects(mine, grid.world):
            peaks[stage] = max(peaks[stage], peak)
        planned = self._job.config.plan.memory_mib
        if len(planned) == grid.pp.size:
            predicted = tuple(round(_MIB * mib) for mib in planned)
        else:
            predicted = tuple(s.total for s in predict(self._job, device=self._device))
        return Comparison(tuple(peaks), predicted, self._job.shape.rank_name)


@dataclass(frozen=True)
class _Watched:
    watch: MemoryWatch
    inner: Loader

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        self.watch.note(batch)
        return self.inner.microbatch(batch, index)

    def first_sample(self, index: int) -> int:
        return self.inner.first_sample(index)

    def num_targets(self, batch: int) -> int:
        return self.inner.num_targets(batch)
