"""Memory behaviours of a trace, in one pass over its actions, in memory that does not grow with its
length.

peak          the owners of memory at its maximum
timeline      bytes alive by category over time
intervals     access time intervals: time between two consecutive accesses (reads, writes) of
              the same tensor (Life.intervals). A block is one tensor, or holds several named ones
reuse         bytes of distinct other tensors that are accessed between two consecutive accesses
              of the same tensor
lifetimes     free - malloc, of blocks that are freed
breakdown     blocks, bytes and accesses by category
stability     the step from which on every step does the same

A block's category is known only when its life ends, so statistics by category are updated then.

Source: Li et al., ISPASS 2021, arXiv 2104.00258; reuse distance: Mattson et al., IBM Systems
Journal 9(2), 1970. Units: bytes, seconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappush, heappushpop

import numpy as np

from hybridpar.memory_behaviour.analysis.distribution import Distribution
from hybridpar.memory_behaviour.analysis.reuse import ReuseDistances
from hybridpar.memory_behaviour.events import Access, Category, Life, MemoryEvent, Span, What
from hybridpar.schedules.action import parse_action

MOST_POINTS = 4096
MOST_OUTLIERS = 2048
NUM_OWNERS = 20


@dataclass(frozen=True)
class Peak:
    """The first moment at which the most bytes are alive.

    If there are several steps, the first one, which sets up, does not count. `by_layer` has
    activations only. `owners` are the largest blocks, without their accesses.
    """

    num_bytes: int
    time: float
    step: int
    action: str
    by_category: dict[Category, int]
    by_layer: dict[int, int]
    owners: tuple[Life, ...]


@dataclass(frozen=True)
class Interval:
    """Time between two consecutive accesses, `before` and `after`, of a tensor in a block. `life`
    has no accesses."""

    life: Life
    before: Access
    after: Access

    @property
    def seconds(self) -> float:
        return self.after.time - self.before.time


@dataclass(frozen=True)
class Intervals:
    """Access time intervals. `outliers` have the largest seconds x bytes, the largest first."""

    distribution: Distribution
    outliers: list[Interval]


@dataclass
class Totals:
    """Blocks of a category over the full trace: number, bytes allocated, reads and writes."""

    num_blocks: int = 0
    num_bytes: int = 0
    reads: int = 0
    writes: int = 0

    @property
    def accesses(self) -> int:
        """Number of reads and writes."""
        return self.reads + self.writes


@dataclass(frozen=True)
class Behaviour:
    """Memory behaviours of a trace.

    Args:
        timeline: (time, bytes alive by category) after actions, and at the peak.
        stable_from: First step of the longest run of equal steps; None if no two consecutive steps
            are equal. Equal steps have the same sequence of (behaviour, bytes, operator, action
            relative to the step). The first steps allocate memory that is then kept, and the last
            ones drain the pipeline.
        stable_until: Last step of that run.
        changes: The first 64 steps that differ from the step before.
        num_events: Number of events of all kinds.
    """

    peak: Peak
    timeline: list[tuple[float, dict[Category, int]]]
    intervals: Intervals
    reuse: Distribution
    lifetimes: dict[Category, Distribution]
    breakdown: dict[Category, Totals]
    stable_from: int | None
    stable_until: int | None
    num_steps: int
    changes: tuple[int, ...]
    num_events: int


def analyse(spans: Iterable[Span]) -> Behaviour:
    """Return the memory behaviours of a trace, from one pass. Needs memory for living blocks and a
    fixed number of samples.

    Raises whatever reading the actions raises.
    """
    found = _Pass()
    for span in spans:
        found.add(span)
    return found.result()


@dataclass(slots=True, eq=False)
class _Block:
    """A living block. `born_at`: number of the action."""

    life: Life
    born_at: int
    reads: int = 0
    writes: int = 0
    last: dict[str, tuple[float, bool, str, str, int, str, int]] = field(default_factory=dict)
    """Fields of the last Access of each tensor."""


class _Pass:
    def __init__(self) -> None:
        self._living: dict[int, _Block] = {}
        self._live = self._num_events = 0
        self._best = (0, 0.0, 0, "")
        self._best_at = 0
        self._first = -1
        self._at_peak: list[Life] = []
        self._is_peak = False
        self._timeline = _Timeline()
        self._steps = _Steps()
        self._distances = ReuseDistances()
        self._intervals = Distribution()
        self._reuse = Distribution()
        self._outliers: list[tuple[float, int, Interval]] = []
        self._lifetimes: dict[Category, Distribution] = defaultdict(Distribution)
        self._breakdown: dict[Category, Totals] = defaultdict(Totals)

    def add(self, span: Span) -> None:
        self._first = span.step if self._first < 0 else self._first
        self._steps.add(span)
        for event in span.events:
            self._num_events += 1
            self._add(span, event)
        self._timeline.end(span.end)

    def _add(self, span: Span, event: MemoryEvent) -> None:
        if event.what is What.MALLOC:
            self._living[event.block] = _Block(Life.of(event, span), self._timeline.now)
            self._live += event.num_bytes
            again = self._live == self._best[0] and self._best[2] == self._first < span.step
            if self._live > self._best[0] or again:
                self._best = (self._live, event.time, span.step, span.action)
                self._best_at = self._timeline.now
                self._is_peak = True
        elif event.what is What.FREE:
            self._note_peak()
            block = self._living.pop(event.block)
            block.life.end(event, span)
            self._live -= event.num_bytes
            self._lifetimes[self._ended(block, self._timeline.now)].add(
                max(event.time - block.life.born, 0.0)
            )
            for tensor in block.last:
                self._distances.remove((event.block, tensor))
        else:
            self._access(self._living[event.block], span, event)

    def _access(self, block: _Block, span: Span, event: MemoryEvent) -> None:
        writes = event.what is What.WRITE
        time = event.time
        # a plain tuple, of which few become an Access: there are millions
        tensor = event.name
        access = (time, writes, event.op, span.action, span.step, tensor, event.num_bytes)
        block.reads = block.reads + (not writes)
        block.writes = block.writes + writes
        distance = self._distances.access((event.block, tensor), event.num_bytes)
        last = block.last.get(tensor)
        if last is not None and distance is not None:
            seconds = max(time - last[0], 0.0)
            self._reuse.add(distance)
            if seconds > 0:
                self._intervals.add(seconds)
            product = seconds * event.num_bytes
            if product and (len(self._outliers) < MOST_OUTLIERS or product > self._outliers[0][0]):
                push = heappush if len(self._outliers) < MOST_OUTLIERS else heappushpop
                push(
                    self._outliers,
                    (
                        product,
                        -self._num_events,
                        Interval(block.life, Access(*last), Access(*access)),
                    ),
                )
        block.last[tensor] = access

    def _note_peak(self) -> None:
        """Record the living blocks if they are the most so far; called before the first of them is
        freed."""
        if self._is_peak:
            self._at_peak = [block.life for block in self._living.values()]
            self._is_peak = False

    def _ended(self, block: _Block, died_at: int | None) -> Category:
        """Add a finished block to the statistics of its category."""
        category = block.life.category
        num_bytes = block.life.num_bytes
        self._timeline.add(category, num_bytes, block.born_at, died_at)
        totals = self._breakdown[category]
        totals.num_blocks = totals.num_blocks + 1
        totals.num_bytes = totals.num_bytes + num_bytes
        totals.reads = totals.reads + block.reads
        totals.writes = totals.writes + block.writes
        return category

    def result(self) -> Behaviour:
        self._note_peak()
        for block in self._living.values():
            self._ended(block, None)
        peak = self._peak()
        outliers = [
            interval
            for _, _, interval in sorted(self._outliers, key=lambda one: (-one[0], -one[1]))
        ]
        return Behaviour(
            peak,
            self._timeline.points(peak, self._best_at),
            Intervals(self._intervals, outliers),
            self._reuse,
            dict(self._lifetimes),
            dict(self._breakdown),
            *self._steps.stable,
            self._steps.count,
            self._steps.changes,
            self._num_events,
        )

    def _peak(self) -> Peak:
        by_category: dict[Category, int] = defaultdict(int)
        by_layer: dict[int, int] = defaultdict(int)
        for life in self._at_peak:
            by_category[category := life.category] += life.num_bytes
            if category is Category.ACTIVATIONS:
                by_layer[life.layer] += life.num_bytes
        owners = sorted(self._at_peak, key=lambda life: (-life.num_bytes, life.block))[:NUM_OWNERS]
        return Peak(*self._best, dict(by_category), dict(by_layer), tuple(owners))


class _Timeline:
    """Bytes alive by category at the ends of actions; with more than MAX_POINTS actions, at every
    second, fourth, .. end."""

    def __init__(self) -> None:
        self.now = 0
        self._every = 1
        self._times: list[float] = []
        self._changes: dict[Category, np.ndarray] = defaultdict(
            lambda: np.zeros(MOST_POINTS, np.int64)
        )

    def end(self, time: float) -> None:
        """End an action. A point for several actions shows the last one."""
        if self.now // self._every == MOST_POINTS - 1:  # the last place is for the peak
            self._times = self._times[1::2] + self._times[len(self._times) & ~1 :]
            for category, changes in self._changes.items():
                joined = changes.reshape(-1, 2).sum(1)
                self._changes[category] = np.concatenate([joined, np.zeros_like(joined)])
            self._every *= 2
        place = self.now // self._every
        self._times[place:] = [time]
        self.now += 1

    def add(self, category: Category, num_bytes: int, born_at: int, died_at: int | None) -> None:
        """Add a block to all points of its life."""
        changes = self._changes[category]
        changes[born_at // self._every] += num_bytes
        if died_at is not None:
            changes[died_at // self._every] -= num_bytes

    def points(self, peak: Peak, peak_at: int) -> list[tuple[float, dict[Category, int]]]:
        """Return all points, including the peak, which is in action number `peak_at`."""
        sums = {category: changes.cumsum() for category, changes in self._changes.items()}
        points = [
            (time, {category: int(sums[category][i]) for category in sums if sums[category][i]})
            for i, time in enumerate(self._times)
        ]
        if peak.num_bytes:
            points.insert(peak_at // self._every, (peak.time, peak.by_category))
        return points


class _Steps:
    """Groups of equal steps: each step has a number that stands for its sequence of events."""

    _MOST_CHANGES = 64
    _MOST_FIRSTS = 1 << 13
    _UNDER_WAY = 64

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._firsts: dict[tuple[int, str, int], tuple[int, int]] = {}

    def add(self, span: Span) -> None:
        action = self._relative(span)
        row = self._rows.get(span.step, 0)
        for event in span.events:
            row = hash((row, event.what, event.num_bytes, event.op, action))
        self._rows[span.step] = row

    def _relative(self, span: Span) -> object:
        """Return the action with its micro-batch and version counted from the first of its kind and
        stage in the step."""
        if not span.action:
            return ""
        if len(self._firsts) > self._MOST_FIRSTS:
            self._firsts = {
                key: first
                for key, first in self._firsts.items()
                if key[0] > span.step - self._UNDER_WAY
            }
        action = parse_action(span.action)
        first = self._firsts.setdefault(
            (span.step, action.kind.value, action.stage), (action.microbatch, action.version)
        )
        return (
            action.kind.value,
            action.stage,
            action.microbatch - first[0],
            action.version - first[1],
        )

    @property
    def count(self) -> int:
        return sum(step > 0 for step in self._rows)

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps that differ from the step before."""
        return tuple(first for first, _ in self._runs()[1 : self._MOST_CHANGES + 1])

    @property
    def stable(self) -> tuple[int | None, int | None]:
        """First and last step of the longest run of at least two equal steps; the earliest one if
        several."""
        first, last = max(self._runs(), key=lambda run: run[1] - run[0], default=(0, 0))
        return (first, last) if first < last else (None, None)

    def _runs(self) -> list[tuple[int, int]]:
        """Return the first and last step of each run of equal steps."""
        groups = itertools.groupby(
            sorted(step for step in self._rows if step > 0), self._rows.__getitem__
        )
        runs = [list(steps) for _, steps in groups]
        return [(steps[0], steps[-1]) for steps in runs]
