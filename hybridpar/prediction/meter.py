"""Memory that code takes, from the allocator itself: the bytes it has handed out and not got back,
and their peak.

CUDA's caching allocator counts for itself. The CPU's reports every block it hands out or gets back
to torch's profiler, where one is running: address, size, in order. What libraries allocate past
torch's allocator (scratch space of matrix products, Gloo's buffers, Python's objects) is not seen;
tests/prediction compares with a counter under malloc itself.
"""

from __future__ import annotations

import ctypes
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
)  # what torch.profiler itself reads allocations by
from torch.autograd.profiler import profile

_ERROR = 2  # of c10's log levels


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes allocated since the measurement began and still held: now, and at most. Units:
    bytes."""

    current: int
    peak: int


class CudaMeter:
    """Reads the caching allocator's own counters."""

    def __init__(self, device: torch.device):
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def read(self) -> Usage:
        """The numbers since the start; the peak since it was last restarted."""
        current = torch.cuda.memory_allocated(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return Usage(current - self._before, peak - self._before)

    def restart_peak(self) -> None:
        """Lets the peak be that of what follows."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Nothing to undo."""


class CpuMeter:
    """Adds up what the allocator reports to the profiler: some microseconds and 2 kB (until the
    next `read`) a block.

    Follows this thread's blocks, whoever returns them: Gloo's threads may be the last to hold a
    tensor, which shows in the totals that come with each report. Blocks from before are not
    counted, neither when they are returned.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()  # addresses
        self._current = self._peak = 0
        self._total: int | None = None  # as the allocator counts, from whenever it began
        # every thread's blocks, and no warning about those from before
        self._flags = [
            _Flag("caffe2_report_cpu_memory_usage", ctypes.c_bool, True),
            _Flag("caffe2_log_level", ctypes.c_int, _ERROR),
        ]
        os.putenv("KINETO_LOG_LEVEL", "99")  # else two lines on stderr for each reading
        self._listening = False
        self._open()

    def _open(self) -> None:
        # As torch.autograd.profiler.profile starts, but for the scope, which no operation has:
        # without that, operations are taken down too, and one that goes on in a thread of Gloo's
        # when the profiler ends brings the process down.
        settings: Any = profile(profile_memory=True)
        _prepare_profiler(settings.config(), settings.kineto_activities)
        scopes = {RecordScope.LITE_INTERPRETER}
        _enable_profiler(settings.config(), settings.kineto_activities, scopes)  # type: ignore[call-arg]  # not in stubs
        self._listening = True

    def read(self) -> Usage:
        """The numbers since the start; the peak since it was last restarted."""
        if self._listening:
            self._collect()
            self._open()
        return Usage(self._current, self._peak)

    def restart_peak(self) -> None:
        """Lets the peak be that of what follows."""
        self._peak = self.read().current

    def close(self) -> None:
        """Stops listening; the numbers stay."""
        if self._listening:
            self._collect()
            for flag in self._flags:
                flag.restore()

    def _collect(self) -> None:
        torch.UntypedStorage(
            1
        )  # a last pair of reports, with the other threads' share in its total
        self._listening = False
        *reports, probe, _ = _allocations(_disable_profiler().experimental_event_tree())
        for report in reports:
            self._note_others(report)
            if report.alloc_size > 0:
                self._blocks.add(report.ptr)
            elif report.ptr in self._blocks:
                self._blocks.remove(report.ptr)
            else:
                continue  # from before
            self._current += report.alloc_size
            self._peak = max(self._peak, self._current)
        self._note_others(probe)
        self._total = probe.total_allocated - probe.alloc_size

    def _note_others(self, report: Any) -> None:
        """Adds the change of the allocator's total since the last report, besides this block."""
        change = (
            report.total_allocated - report.alloc_size - self._total
            if self._total is not None
            else 0
        )
        self._total = report.total_allocated
        self._current += change
        self._peak = max(self._peak, self._current)


class _Flag:
    """A setting of torch's core library, changed until `restore`; no effect where this build has no
    such setting."""

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
    """The allocator's reports in a tree of events, in the order of time."""
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
    """Measures what the code inside allocates on `device`; `read()` works inside and afterwards.

    On a CPU it is torch's profiler that listens: there can be no second one, nor another
    measurement, inside.
    """
    meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    try:
        yield meter
    finally:
        meter.close()
