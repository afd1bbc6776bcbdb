"""A timeline in Chrome's trace format, for ui.perfetto.dev.

Each rank is a process with a track of its actions and its idle time. Asynchronous work (transfers,
reductions, moves of state, the host's updates) is in as many tracks below as it needs. Arrows lead
from sends to the computations that waited for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, MOVES, PER_ITEM, Kind
from hybridpar.schedules.simulate.timeline import Timeline

Entry = dict[str, Any]
_APART = {*MOVES, Kind.HOST}
"""Kinds that have separate tracks below the actions' track."""


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of a rank's time."""

    name: str
    category: str
    start: float
    end: float


def trace_json(entries: Iterable[Entry]) -> str:
    """Return the content of a trace file."""
    return json.dumps({"traceEvents": list(entries), "displayTimeUnit": "ms"})


def trace_entries(
    timeline: Timeline,
    ranks: Mapping[int, tuple[int, str]],
    idle: Mapping[int, Sequence[Slice]] | None = None,
    per_second: float = 1.0,
) -> Iterator[Entry]:
    """Yield the entries of a trace file for one pipeline.

    Args:
        ranks: Number and name of the process for each of its ranks.
        idle: When each rank was idle; None: whenever no action runs on it.
        per_second: Units of time of the timeline in a second.
    """
    scale = 1e6 / per_second
    for rank, (pid, name) in ranks.items():
        yield from process_entries(
            pid, name, waits(timeline, rank) if idle is None else idle[rank], per_second
        )
        for action, start, done, _ in timeline.actions(rank):
            yield _entry(pid, 0, Slice(str(action), action.kind.value, start, done), scale) | {
                "args": _args(action)
            }
        yield from _beside(timeline, rank, pid, scale)
    yield from _arrows(timeline, ranks, scale)


def metadata(kind: str, pid: int, **args: object) -> Entry:
    """Return an entry that names a process, or one of its tracks."""
    return {"ph": "M", "name": kind, "pid": pid, "args": args}


def process_entries(
    pid: int, name: str, slices: Iterable[Slice], per_second: float = 1.0
) -> Iterator[Entry]:
    """Yield the entries of a process, with slices on its track of actions."""
    yield metadata("process_name", pid, name=name)
    yield metadata("process_sort_index", pid, sort_index=pid)
    yield metadata("thread_name", pid, name="actions") | {"tid": 0}
    for one in slices:
        yield _entry(pid, 0, one, 1e6 / per_second)


def counter_entries(
    pid: int, name: str, samples: Iterable[tuple[float, Mapping[str, int]]], per_second: float = 1.0
) -> Iterator[Entry]:
    """Yield a stacked track of numbers for a process: the numbers by name from each time on."""
    for time, numbers in samples:
        yield {
            "ph": "C",
            "name": name,
            "pid": pid,
            "ts": time * 1e6 / per_second,
            "args": dict(numbers),
        }


def waits(timeline: Timeline, rank: int) -> Iterator[Slice]:
    """Yield the times between the actions of a rank."""
    before = 0.0
    stalls = timeline.stalls.get(rank, {})
    for step, (action, start, done, _) in enumerate(timeline.actions(rank)):
        # only items are waited for from `free` to the start
        free = start - stalls.get(step, 0.0) * (action.kind not in PER_ITEM)
        if free > before:
            yield Slice(wait_name(action), "idle", before, free)
        if start > free:
            yield Slice(f"idle: {action} waits for the slow tier", "idle", free, start)
        before = done


def wait_name(action: Action) -> str:
    """Return the name of the time in which a rank waits before this action."""
    return f"idle: {action} waits for {ACTION_SPECS[action.kind].awaits}"


def _args(action: Action) -> dict[str, int]:
    name = "number"
    if action.kind in PER_ITEM:
        name = "item"
    elif action.kind in COMPUTE | MOVES:
        name = "micro-batch"
    args = {name: action.microbatch} | ({"part": action.part} if action.part else {})
    return args | ({"weights": action.version} if action.version >= 0 else {})


def _beside(timeline: Timeline, rank: int, pid: int, scale: float) -> Iterator[Entry]:
    """Yield the entries of asynchronous work, in as few tracks as hold it without overlap."""
    free: list[tuple[str, float]] = []  # by track: its use, and the end of its last slice
    stalls = timeline.stalls.get(rank, {})
    beside = [
        (done + stalls.get(step, 0.0) * (action.kind in PER_ITEM), end, action)
        for step, (action, _, done, end) in enumerate(timeline.actions(rank))
        if end > done
    ]
    for start, end, action in sorted(beside, key=lambda item: item[0]):
        use = ACTION_SPECS[action.kind].name if action.kind in _APART else "communication"
        track = next(
            (i for i, (what, until) in enumerate(free) if what == use and until <= start), len(free)
        )
        if track == len(free):
            free.append((use, end))
            yield metadata("thread_name", pid, name=use) | {"tid": track + 1}
        free[track] = use, end
        name = f"gather of W{action.version}" if action.kind is Kind.UPDATE else str(action)
        one = Slice(name, f"{action.kind.value} under way", start, end)
        yield _entry(pid, track + 1, one, scale) | {"args": _args(action)}


def _entry(pid: int, tid: int, one: Slice, scale: float) -> Entry:
    return {
        "ph": "X",
        "name": one.name,
        "cat": one.category,
        "pid": pid,
        "tid": tid,
        "ts": one.start * scale,
        "dur": (one.end - one.start) * scale,
    }


def _arrows(
    timeline: Timeline, ranks: Mapping[int, tuple[int, str]], scale: float
) -> Iterator[Entry]:
    """Yield an arrow from each send to the computation that used the sent tensor."""
    takers = {
        (action.stage, ACTION_SPECS[action.kind].receive, action.microbatch): start
        for rank in ranks
        for action, start, _, _ in timeline.actions(rank)
        if action.kind in COMPUTE
    }
    number = 0
    shape = timeline.shape
    for rank, (pid, _) in ranks.items():
        for action, sent, _, _ in timeline.actions(rank):
            row = ACTION_SPECS[action.kind]
            taken = None
            if row.matching_recv:
                taken = takers.get(
                    (action.stage + row.peer_offset, row.matching_recv, action.microbatch)
                )
            if taken is None:
                continue
            number += 1
            same: Entry = {"id": f"{pid}.{number}", "name": "transfer", "cat": "transfer", "tid": 0}
            yield same | {"ph": "s", "pid": pid, "ts": sent * scale}
            taker = ranks[shape.rank_of(action.stage + row.peer_offset)][0]
            yield same | {"ph": "f", "pid": taker, "ts": taken * scale, "bp": "e"}
