"""Steady states, found rather than walked: what of a timeline repeats itself, so that the rest need
not be simulated.

A rank of 1f1b, once it has run ahead, does a forward and a backward by turns. Slice j of all ranks
is the j-th of these pairs on each:

    rank 0   F0 F1 F2 .. | F3 B0 | F4 B1 | F5 B2 | F6 B3 | .. drain
    rank 1      F0 F1 .. | F2 B0 | F3 B1 | F4 B2 | F5 B3 | .. drain
    slice                    0       1       2       3

What a slice waits for is in it and in the few before. So where a window of slices lies on all ranks
as long after the one before, every slice behind it does, however many there are until the drain;
and that is then the same. Interleaved, each round of micro-batches has the pairs of the round
before, and a rank waits for slices of up to two turns of the ring.

p ranks, v chunks, m micro-batches of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.schedules.kinds import COMPUTE, Kind
from hybridpar.schedules.schedule_table import PipelineShape, Schedule
from hybridpar.schedules.simulate.timeline import SAME, Timeline

_BACK = 4
"""Slices to look at: one waits for no more than so many before it."""
_TO_SETTLE = 8


def fewer(schedule: Schedule, shape: PipelineShape) -> Iterator[int]:
    """Yield numbers of micro-batches whose timeline may prove the time of additional ones."""
    p = shape.num_ranks
    m = shape.num_microbatches
    if schedule.order or schedule.activations or (shape.is_ring and m % p):
        return
    multiple = p if shape.is_ring else 1
    settling = _TO_SETTLE
    while True:
        slices = (
            schedule.warmup(shape, 0)
            + _window(shape)
            + _alike(shape)
            + _delay(schedule, shape)
            + settling
        )
        few = -(-slices // (shape.virtual_stages * multiple)) * multiple
        if 2 * few > m:
            return
        yield few
        settling *= 4


def time_of_more(timeline: Timeline, schedule: Schedule, shape: PipelineShape) -> float | None:
    """Return the time that each additional micro-batch adds to a batch, from a timeline of this
    shape that drains; None if the timeline does not show it.
    """
    alike = _alike(shape)
    number = shape.num_microbatches * shape.virtual_stages
    stop = number - schedule.warmup(shape, 0)
    window = range(stop - _window(shape), stop)
    if window.start <= alike + _delay(schedule, shape):
        return None
    took = []
    for rank, actions in timeline.plan.items():
        starts: dict[Kind, list[float]] = {}
        for action, start in zip(actions, timeline.starts[rank], strict=True):
            if action.kind in COMPUTE:  # of a rank some backwards may be whole, some split
                for kind in (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,):
                    starts.setdefault(kind, []).append(start)
        for kind, times in starts.items():
            lead = {
                Kind.F: schedule.warmup(shape, rank),
                Kind.W: -schedule.weight_delay(shape, rank),
            }.get(kind, 0)
            first = len(times) - number + lead
            took += [times[first + j] - times[first + j - alike] for j in window]
    is_settled = max(took) - min(took) <= SAME * timeline.makespan
    return max(took) * shape.virtual_stages / alike if is_settled else None


def repeats(timeline: Timeline, num_microbatches: int) -> float | None:
    """Return the time of a batch, if every forward and backward of the last batch but one starts
    equally long after its counterpart in the previous batch, on all ranks: then all later ones do.
    None otherwise.

    For plans whose stages have at most one batch in flight, and do not drain before the end.
    """
    m = num_microbatches
    end = max(action.microbatch for action in timeline.plan[0] if action.kind is Kind.F) + 1
    shifts = []
    for rank, actions in timeline.plan.items():
        for kind in COMPUTE:
            starts = [
                start
                for action, start in zip(actions, timeline.starts[rank], strict=True)
                if action.kind is kind and end - 3 * m <= action.microbatch < end - m
            ]
            shifts += [
                after - before
                for before, after in zip(starts, starts[len(starts) // 2 :], strict=False)
            ]
    least = min(shifts, default=0.0)
    most = max(shifts, default=0.0)
    return most if most - least <= SAME * timeline.makespan else None


def _delay(schedule: Schedule, shape: PipelineShape) -> int:
    """Return the most slices by which weight gradients are delayed."""
    return max(schedule.weight_delay(shape, rank) for rank in range(shape.num_ranks))


def _alike(shape: PipelineShape) -> int:
    """Return the number of slices after which a rank's work repeats."""
    return shape.num_stages if shape.is_ring else 1


def _window(shape: PipelineShape) -> int:
    """Return the number of slices that must repeat with an equal time difference."""
    return 2 * shape.num_ranks + _BACK if shape.is_ring else _BACK
