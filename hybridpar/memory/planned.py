"""Planned memory: an arena before torch's allocator, with a place for every block of a rank's step.

    first cycles        every request and every end is noted:  F3  malloc 4096  malloc 512  free 0   B3 ..
    plan                offsets for a cycle, which comes again and again (memory.arena): blocks may
                        reach into the next
    from then on        in the span of an action, its requests get their places in the order of the
                        plan

A request that is not as foreseen gets memory from the other allocator, as does the rest of its
span; so does one whose place is still taken. Nothing is ever wrong, only less planned. The
allocator is in C++ (csrc/planned), one for each process: on CPUs for the thread that trains, on
GPUs for the stream that it computes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridpar import native
from hybridpar.errors import DataError
from hybridpar.memory.arena import Arena, Block, plan
from hybridpar.memory.sweep import Ints
from hybridpar.reading import errors_as, parse_json, read_limited

TURN, MALLOC, FREE = range(3)
"""What an event of the allocator is: its number is a span's, a size, or a block's in the order of
mallocs."""


@dataclass(frozen=True)
class Counts:
    """Requests since the plan was made, by what became of them, and the arena.

    hits: got their places. departed: of another size than foreseen, or one too many, and what
    follows in its span. occupied: the place was still taken. unplanned: blocks that live longer
    than a cycle, which have no place. living, most_living: bytes of blocks in places, now and at
    most. top: end of the highest place that was used. num_bytes: of the arena. Units: bytes.
    """

    hits: int = 0
    departed: int = 0
    occupied: int = 0
    unplanned: int = 0
    living: int = 0
    most_living: int = 0
    top: int = 0
    num_bytes: int = 0

    @property
    def missed(self) -> int:
        """Requests that had a place, or should have had one, and did not get it."""
        return self.departed + self.occupied

    @classmethod
    def read(cls, path: Path) -> Counts:
        """Read the counts in a file of memory/ of a run folder. Raises: DataError if it has
        something else."""
        with errors_as(DataError, path, "is no count of planned memory", TypeError):
            found = parse_json(read_limited(path, 1 << 16, within=path.parent.parent))
            if not isinstance(found, dict) or not all(
                type(value) is int and 0 <= value < 1 << 62 for value in found.values()
            ):
                raise ValueError("numbers by name are needed")
            return cls(**found)


@dataclass(frozen=True)
class CyclePlan:
    """Places of the requests of a cycle. sizes, offsets: of each, in order; offset -1: it has none.
    firsts: the first request of each span, and their number. arena: of those that have places.
    Units: bytes."""

    sizes: Ints
    offsets: Ints
    firsts: Ints
    arena: Arena


class CycleError(Exception):
    """What was noted is no two equal cycles."""


def plan_cycle(events: Ints) -> CyclePlan:
    """The plan that follows from the events of two cycles: pairs of numbers, the first a turn to
    span 0.

    Raises: CycleError where the second one does not ask for what the first one did.
    """
    (begins,) = np.nonzero((events[:, 0] == TURN) & (events[:, 1] == 0))
    if len(begins) != 2:
        raise CycleError(f"{len(begins)} cycles were noted")
    is_malloc = events[:, 0] == MALLOC
    before = is_malloc.cumsum() - is_malloc  # the time of an event: mallocs before it
    period = int(before[begins[1]])
    sizes = events[: begins[1]][is_malloc[: begins[1]], 1]
    again = events[begins[1] :][is_malloc[begins[1] :], 1]
    turns = events[:, 0] == TURN
    firsts = np.append(before[: begins[1]][turns[: begins[1]]], period)
    if not np.array_equal(sizes, again) or not np.array_equal(
        firsts[:-1] + period, before[begins[1] :][turns[begins[1] :]]
    ):
        raise CycleError("two cycles in a row did not ask for the same blocks")
    freed = events[:, 0] == FREE
    ends = np.full(2 * period, -1)
    ends[events[freed, 1]] = before[freed]
    starts, ends = (
        np.arange(period),
        np.maximum(ends[:period], np.arange(1, period + 1) * (ends[:period] >= 0)),
    )
    (placed,) = np.nonzero((ends > 0) & (ends - starts <= period))
    spans = len(firsts) - 1
    born, died = (
        np.searchsorted(firsts, times % max(period, 1), "right") for times in (starts, ends - 1)
    )
    arena = plan(
        [
            Block(
                int(sizes[i]),
                int(starts[i]),
                int(ends[i]),
                None if born[i] == died[i] else int(born[i] * (spans + 1) + died[i]),
            )
            for i in placed
        ],
        period,
    )
    offsets = np.full(period, -1)
    offsets[placed] = arena.offsets
    return CyclePlan(sizes, offsets, firsts, arena)


class Allocator:
    """The planned allocator of this process, in a library that has one.

    library: path of the extension. Raises: OSError where there is none.
    """

    def __init__(self, library: str):
        self._library = ctypes.CDLL(library)
        self.turn_to = self._function("turn_to", ctypes.c_int64)
        """Requests are of this span from now on; -1: of none."""
        self._record = self._function("record", ctypes.c_int)
        self._events = self._function(
            "events", ctypes.c_void_p, ctypes.c_int64, result=ctypes.c_int64
        )
        self._plan = self._function(
            "plan",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            result=ctypes.c_int,
        )
        self._counts = self._function("counts", ctypes.c_void_p)

    @classmethod
    def of_cpu(cls) -> Allocator:
        """The one before torch's allocator of CPUs, once it is there; `native.missing_recorder`
        says whether it is."""
        found = cls(native.recorder().__file__)
        if not found._function("install", ctypes.c_int, result=ctypes.c_int)(1):
            raise RuntimeError(
                "another allocator has taken the place of torch's, and planned memory goes before "
                "that"
            )
        return found

    @classmethod
    def of_cuda(cls, device: int, stream: int) -> Allocator:
        """The one that torch was given for CUDA, for a stream of a device."""
        found = cls(native.cuda_library())
        found._function("install", ctypes.c_int, ctypes.c_void_p)(device, stream)
        return found

    def _function(self, name: str, *arguments: Any, result: Any = None) -> Any:
        function = getattr(self._library, f"hybridpar_planned_{name}")
        function.argtypes = arguments
        function.restype = result
        return function

    def record(self, on: bool) -> None:
        """Notes events, or no more of them; those before are forgotten."""
        self._record(on)

    def events(self) -> Ints:
        """What was noted: pairs of numbers, as `TURN` says."""
        count = self._events(None, 0)
        pairs = np.zeros((count, 2), np.int64)
        self._events(pairs.ctypes.data, max(count, 1))
        return pairs

    def plan(self, cycle: CyclePlan) -> bool:
        """Puts a plan in force; whether there is memory for it."""
        return self._put(cycle.sizes, cycle.offsets, cycle.firsts, cycle.arena.num_bytes)

    def forget(self) -> None:
        """Ends the plan. The arena goes when its last block does."""
        self._put((), (), (), 0)

    def _put(
        self,
        sizes: Sequence[int] | Ints,
        offsets: Sequence[int] | Ints,
        firsts: Sequence[int] | Ints,
        num_bytes: int,
    ) -> bool:
        given = [np.ascontiguousarray(values, np.int64) for values in (sizes, offsets, firsts)]
        return bool(
            self._plan(
                given[0].ctypes.data,
                given[1].ctypes.data,
                len(given[0]),
                given[2].ctypes.data,
                max(len(given[2]) - 1, 0),
                num_bytes,
            )
        )

    def counts(self) -> Counts:
        """What became of requests since the plan."""
        found = np.zeros(8, np.int64)
        self._counts(found.ctypes.data)
        return Counts(*found.tolist())
