"""Record some steady-state batches on all ranks, align their clocks, and draw them.

Ranks record actions on the clock of their host; faults/clocks.py compares the clocks of hosts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from hybridpar.checkpoint.format.files import write_text
from hybridpar.comm import gather_objects
from hybridpar.cores import available_cores
from hybridpar.grid import ProcessGrid
from hybridpar.runtime.executor import Executor
from hybridpar.runtime.recording import Event, Recording, Usage, make_clock
from hybridpar.schedules.action import Action
from hybridpar.schedules.draw.perfetto import (
    Entry,
    Slice,
    metadata,
    trace_entries,
    trace_json,
    wait_name,
)
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.timeline import Timeline
from hybridpar.train.faults.clocks import shift_to_first

WARMUP = 3
SHOWN = 3
"""Number of batches in trace.json and executed.svg."""
_MOST_BATCHES = 16
_MOST_MICROBATCHES = 1000
_WAITED_S = 50e-6
"""Shortest wait that counts as waiting for something that was not ready."""


@dataclass(frozen=True)
class Host:
    """The host of a rank: machine, device, cores (0 on a GPU), and threads of each rank."""

    name: str = ""
    device: str = "cpu"
    cores: int = 0
    threads: int = 1


@dataclass(frozen=True)
class RankEvents:
    """Events that one rank recorded, in seconds on a clock shared by all ranks."""

    rank: int
    name: str
    pipeline: tuple[int, ...]
    """Index on all axes but pp: ranks with the same index exchange activations."""
    stage: int
    """Rank in the pipeline, which is also its first stage."""
    events: tuple[Event, ...]
    host: Host = field(default_factory=Host)
    usage: Usage = field(default_factory=Usage)
    clock_error: float = 0.0
    """Bound on the clock's error relative to rank 0, on another host."""


class Recorder:
    """Records some batches of a stretch of training that begins now.

    Recording starts after WARMUP batches, or earlier and with fewer batches in a short stretch.

    skip: number of untypical batches at the start.
    """

    def __init__(self, executor: Executor, first: int, num_batches: int, *, skip: int = 0):
        most = max(SHOWN, min(_MOST_BATCHES, _MOST_MICROBATCHES // executor.num_microbatches))
        self._executor = executor
        self._start = first + skip + min(WARMUP, (num_batches - skip) // 3)
        self._stop = min(self._start + most, first + num_batches)
        self._recording: Recording | None = None
        self.events: tuple[Event, ...] = ()
        self.usage = Usage()
        if self._start == first:
            self._begin()

    @property
    def is_active(self) -> bool:
        """Whether batches are being recorded."""
        return self._recording is not None

    def after_step(self, step: int) -> None:
        """Start or end the recording; call it after every update, while the executor runs."""
        if step == self._start:
            self._begin()
        elif step == self._stop:
            self.close()

    def close(self) -> None:
        """End the recording, if it is active."""
        if self._recording is not None:
            self.events = self._recording.events()
            self.usage = self._recording.usage()
        self._recording = None
        self._executor.record(None)

    def _begin(self) -> None:
        self._recording = Recording(make_clock(self._executor.transport.device))
        self._executor.record(self._recording)


def gather(recorder: Recorder, grid: ProcessGrid) -> list[RankEvents]:
    """Gather the events of all ranks of the grid on rank 0's clock, from 0."""
    shift = shift_to_first(grid)
    mine = replace(
        events_of(recorder, grid),
        events=_shifted(recorder.events, shift.seconds),
        clock_error=shift.error,
    )
    return _from_zero(gather_objects(mine, grid.world))


def events_of(recorder: Recorder, grid: ProcessGrid) -> RankEvents:
    """Return this rank's events on its host's clock."""
    return RankEvents(
        grid.rank,
        grid.describe(),
        tuple(index for name, index in grid.place.items() if name != "pp"),
        grid.pp.rank,
        recorder.events,
        _host(grid),
        recorder.usage,
    )


def _from_zero(ranks: Sequence[RankEvents]) -> list[RankEvents]:
    """Shift events so that the earliest begins at 0."""
    origin = min((r.events[0].start for r in ranks if r.events), default=0.0)
    return [replace(r, events=_shifted(r.events, -origin)) for r in ranks]


def _shifted(events: Sequence[Event], by: float) -> tuple[Event, ...]:
    return tuple(
        replace(
            e,
            start=e.start + by,
            end=e.end + by,
            waits=tuple((since + by, until + by) for since, until in e.waits),
            over=None if e.over is None else e.over + by,
        )
        for e in events
    )


def _host(grid: ProcessGrid) -> Host:
    if grid.device_type != "cpu":
        return Host(platform.node(), torch.cuda.get_device_name())
    return Host(
        platform.node(),
        platform.processor() or platform.machine(),
        available_cores(),
        torch.get_num_threads(),
    )


def _span(event: Event) -> tuple[float, float]:
    """Return the time in which an action itself ran: after its last wait.

    A send ran before its first wait, which is for other ranks.
    """
    if ACTION_SPECS[event.action.kind].matching_recv and event.waits:
        return event.start, event.waits[0][0]
    return event.ready, event.end


# For each computation: offset of the stage that sends its input, kind of the send and the receive.
_TRANSFERS = {
    kind: (-row.flow, row.send, row.receive)
    for kind, row in ACTION_SPECS.items()
    if row.send and row.receive
}


def transfer_times(ranks: Sequence[RankEvents], link: int) -> Iterator[float]:
    """Yield the times that waiting receivers of a link waited once a transfer could start.

    If the receive was posted last, the time is halved, because its request travels the other way
    first. Links are numbered as in plan.costs.
    """
    # reversed, so that the first segment of an action remains, which waits for the input
    events = {
        (r.pipeline, e.action.stage, e.action.kind, e.action.microbatch): e
        for r in ranks
        for e in reversed(r.events)
    }
    shape = _sizes(ranks)
    for (pipeline, stage, kind, number), used in events.items():
        towards, send, receive = _TRANSFERS.get(kind, (0, kind, kind))
        if not towards or shape.link(stage, towards) != link or not _has_waited(used):
            continue
        sent = events.get((pipeline, stage + towards, send, number))
        posted = events.get((pipeline, stage, receive, number))
        if sent is not None and posted is not None:
            start = _transfer_start(sent, posted)
            yield (_input_waits(used)[0][1] - start) / (1 + (start == posted.end))


def _sizes(ranks: Sequence[RankEvents]) -> PipelineShape:
    """Derive the shape of the pipeline from the stages that ranks computed."""
    homes = {e.action.stage: r.stage for r in ranks for e in r.events if e.action.kind in COMPUTE}
    return PipelineShape.found(homes, len({r.stage for r in ranks}))


def _transfer_start(sent: Event, posted: Event) -> float:
    # from the start of the send's call, because a sender without a core returns late from it
    return max(sent.start + sent.own, posted.end)


def _has_waited(used: Event) -> bool:
    """Return whether the action had to wait for its input."""
    return any(until - since > _WAITED_S for since, until in _input_waits(used)[:1])


def _input_waits(used: Event) -> Sequence[tuple[float, float]]:
    """Return the waits of an action, from the wait for its input on."""
    return used.waits[used.for_state :]


def executed(
    ranks: Sequence[RankEvents], pipeline: tuple[int, ...] = (), *, gathers: bool = False
) -> Timeline:
    """Return the timeline of one pipeline as it ran, without waits within actions.

    Concurrent work ends when a rank noticed its end. A transfer that nobody waited for takes as
    long as the median of the link.

    Args:
        pipeline: Index of the pipeline; default: the first.
        gathers: Whether replicas all-gather new weights after an update.
    """
    pipeline = pipeline or min(r.pipeline for r in ranks)
    stages = sorted((r for r in ranks if r.pipeline == pipeline), key=lambda r: r.stage)
    events = {
        (e.action.stage, e.action.kind, e.action.microbatch): e
        for r in stages
        for e in reversed(r.events)
    }
    shape = _sizes(stages)
    usual: dict[int | None, float] = {
        link: median(times)
        for link in range(len(stages))
        if (times := list(transfer_times(stages, link)))
    }

    def end_of(event: Event) -> float:
        was_seen = event.over is not None and (event.action.kind is not Kind.UPDATE or gathers)
        return max(event.end, event.over or 0.0) if was_seen else event.end

    ends = {key: end_of(event) for key, event in events.items()}
    for (stage, kind, number), event in events.items():
        towards, send, receive = _TRANSFERS.get(kind, (0, kind, kind))
        sent = events.get((stage + towards, send, number))
        posted = events.get((stage, receive, number))
        if not towards or sent is None or posted is None:
            continue
        arrival = event.ready
        if not _has_waited(event):
            arrival = min(
                arrival, _transfer_start(sent, posted) + usual.get(shape.link(stage, towards), 0.0)
            )
        ends[stage + towards, send, number] = max(_span(sent)[1], arrival)
        ends[stage, receive, number] = max(posted.end, arrival)
    plan: dict[int, tuple[Action, ...]] = {
        r.stage: tuple(e.action for e in r.events) for r in stages
    }

    def shown_end(event: Event) -> float:
        action = event.action
        if ACTION_SPECS[action.kind].peer_offset:
            return ends[action.stage, action.kind, action.microbatch]
        return end_of(event)

    by_rank = {r.stage: [shown_end(e) for e in r.events] for r in stages}
    spans = {r.stage: [_span(e) for e in r.events] for r in stages}
    return Timeline(
        plan,
        {rank: [start for start, _ in of_rank] for rank, of_rank in spans.items()},
        by_rank,
        max((end for of_rank in by_rank.values() for end in of_rank), default=0.0),
        {rank: [end for _, end in of_rank] for rank, of_rank in spans.items()},
    )


def last_batches(ranks: Sequence[RankEvents], num_batches: int) -> list[RankEvents]:
    """Return the events of the last batches of each rank, so that drawings stay small."""
    shown = []
    for rank in ranks:
        updates = [i for i, event in enumerate(rank.events) if event.action.kind is Kind.UPDATE]
        first = updates[-num_batches - 1] + 1 if len(updates) > num_batches else 0
        shown.append(replace(rank, events=rank.events[first:]))
    return _from_zero(shown)


def write_trace(ranks: Sequence[RankEvents], path: Path, *, gathers: bool = False) -> None:
    """Write the events of all ranks in Chrome's trace format."""
    entries: list[Entry] = []
    for pipeline in sorted({r.pipeline for r in ranks}):
        stages = {r.stage: r for r in ranks if r.pipeline == pipeline}
        idle = {
            stage: [
                Slice(wait_name(e.action), "idle", since, until)
                for e in r.events
                for since, until in e.waits
            ]
            for stage, r in stages.items()
        }
        names = {stage: (r.rank, r.name) for stage, r in stages.items()}
        entries += trace_entries(executed(ranks, pipeline, gathers=gathers), names, idle)
    for r in ranks:
        if r.clock_error:
            text = f"clock within {1e6 * r.clock_error:.0f} us of rank 0's"
            entries.append(metadata("process_labels", r.rank, labels=text))
    write_text(path, trace_json(entries))


def draw_executed(ranks: Sequence[RankEvents], title: str) -> str:
    """Draw the first pipeline as an SVG drawing that fits a page, in milliseconds."""
    return draw_svg(executed(ranks).scaled(1e3), title=title, unit="milliseconds", widens=False)
