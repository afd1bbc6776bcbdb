"""Memory that code takes, from the allocator itself: the bytes that are allocated, and their peak.

CUDA's caching allocator keeps counters. The CPU's allocator reports every block to torch's profiler
if one is running: address, size, in order. Memory that libraries allocate elsewhere (scratch space
of matrix products, Gloo's buffers, Python objects) is not seen; tests/prediction compares with a
counter under malloc itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    RecordScope,
    _EventType,
)  # the function by which torch.profiler itself reads allocations
from torch.autograd.profiler import profile

_ERROR = 2  # one of c10's log levels


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes allocated since the measurement began and not freed: current and peak. Units: bytes."""

    current: int
    peak: int


class CudaMeter:
    """A meter that reads the caching allocator's counters."""

    def __init__(self, device: torch.device):
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def read(self) -> Usage:
        """Return the numbers since the start; the peak since it was last restarted."""
        current = torch.cuda.memory_allocated(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return Usage(current - self._before, peak - self._before)

    def restart_peak(self) -> None:
        """Restart the peak from the current bytes."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Do nothing: there is nothing to undo."""


class CpuMeter:
    """A meter that adds up the allocator's reports to the profiler; each block costs some
    microseconds, and 2 kB until the next `read`.

    Counts blocks of this thread, whichever thread frees them: Gloo's threads may be the last to
    hold a tensor, which shows in the totals of each report. Blocks from before the start are not
    counted, and neither are their frees.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()  # addresses
        self._current = self._peak = 0
        # in the allocator's count, which covers all threads since its own start, without a warning
        # about earlier blocks
        self._total: int | None = None
        # every thread's blocks, and no warning about those from before
        self._flags = [
            _Flag("caffe2_report_cpu_memory_usage", ctypes.c_bool, True),
            _Flag("caffe2_log_level", ctypes.c_int, _ERROR),
        ]
        os.putenv("KINETO_LOG_LEVEL", "99")  # suppresses two lines on stderr for each reading
        self._listening = False
        self._open()

    def _open(self) -> None:
        # Starts like torch.autograd.profiler.profile, but with a scope that no operation has.
        # Otherwise operations are recorded, too, and an operation that still runs in a Gloo thread
        # when the profiler ends crashes the process.
        settings: Any = profile(profile_memory=True)
        _prepare_profiler(settings.config(), settings.kineto_activities)
        scopes = {RecordScope.LITE_INTERPRETER}
        _enable_profiler(settings.config(), settings.kineto_activities, scopes)  # type: ignore[call-arg]  # not in stubs
        self._listening = True

    def read(self) -> Usage:
        """Return the numbers since the start; the peak since it was last restarted."""
        if self._listening:
            self._collect()
            self._open()
        return Usage(self._current, self._peak)

    def restart_peak(self) -> None:
        """Restart the peak from the current bytes."""
        self._peak = self.read().current

    def close(self) -> None:
        """Stop measuring; the numbers stay."""
        if self._listening:
            self._collect()
            for flag in self._flags:
                flag.restore()

    def _collect(self) -> None:
        torch.UntypedStorage(1)  # causes a last pair of reports, whose total includes other threads
        self._listening = False
        *reports, probe, _ = _allocations(_disable_profiler().experimental_event_tree())
        for report in reports:
            self._note_others(report)
            if report.alloc_size > 0:
                self._blocks.add(report.ptr)
            elif report.ptr in self._blocks:
                self._blocks.remove(report.ptr)
            else:
                continue  # allocated before the start
            self._current += report.alloc_size
            self._peak = max(self._peak, self._current)
        self._note_others(probe)
        self._total = probe.total_allocated - probe.alloc_size

    def _note_others(self, report: Any) -> None:
        """Add the change of the allocator's total since the last report, except this block."""
        change = (
            report.total_allocated - report.alloc_size - self._total
            if self._total is not None
            else 0
        )
        self._total = report.total_allocated
        self._current += change
        self._peak = max(self._peak, self._current)


class _Flag:
    """A setting of torch's core library that is changed until `restore`; no effect if this build
    lacks it."""

    def __init__(self, name: str, kind: type[ctypes.c_bool] | type[ctypes.c_int], value: int):
        folder = Path(torch.__file__).parent / "lib"
        try:
            path = next(folder.glob("*c10.*"))
            self._variable: Any = kind.in_dll(ctypes.CDLL(str(path)), f"FLAGS_{name}")
        except (StopIteration, OSError, ValueError):
            self._variable = None
            return
        self._before = self._variable.value
        self._variable.value = value

    def restore(self) -> None:
        if self._variable is not None:
            self._variable.value = self._before


def _allocations(roots: Iterable[Any]) -> list[Any]:
    """Return the allocator's reports in a tree of events, in order of time."""
    found = []
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields))
        waiting += event.children
    found.sort(key=itemgetter(0))
    return [fields for _, fields in found]


Meter = CudaMeter | CpuMeter


@contextmanager
def measure(device: torch.device) -> Iterator[Meter]:
    """Measure what the code inside allocates on `device`; `read()` works inside and afterwards.

    Garbage is collected first: a collection during a reading, when nothing is reported, would free
    blocks of an earlier measurement as if they were from this one.

    On a CPU torch's profiler is used, so neither another profiler nor another measurement can run
    inside.
    """
    gc.collect()
    meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    try:
        yield meter
    finally:
        meter.close()
