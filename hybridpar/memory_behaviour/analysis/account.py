"""Account of a rank's memory: everything that a report and its pictures show, from one trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from hybridpar.errors import DataError
from hybridpar.memory_behaviour.analysis.arena import Arena, blocks_of, plan
from hybridpar.memory_behaviour.analysis.behaviour import Behaviour, Peak
from hybridpar.memory_behaviour.analysis.excerpt import Level, excerpt, levels
from hybridpar.memory_behaviour.analysis.fragmentation import Usage, replay
from hybridpar.memory_behaviour.analysis.swap import LINKS, across, num_feasible, saved_at_peak
from hybridpar.memory_behaviour.events import Category, Header, Life, Span, What, lives
from hybridpar.prediction.knobs import Saving, sorted_savings
from hybridpar.schedules.draw.svg import FORWARDS


class Gap(NamedTuple):
    """Time between two consecutive accesses of a tensor, by two operators (Life.intervals).

    `tensor`: its name in the block; "" if the block is one tensor.
    """

    seconds: float
    num_bytes: int
    category: Category
    tensor: str


@dataclass(frozen=True)
class TensorIntervals:
    """Access intervals of a named tensor, the shortest first. Units: bytes, seconds."""

    category: Category
    tensor: str
    num_bytes: int
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def longest(self) -> float:
        return self.seconds[-1]


@dataclass(frozen=True)
class Swapped:
    """Number of intervals in which a tensor could be swapped out over a link and back in time, and
    bytes saved at the peak."""

    link: str
    num_intervals: int
    saves: int


@dataclass(frozen=True)
class Account:
    """Memory of a rank over a trace, with single blocks over two steps: the step of the peak, and
    the next.

    Args:
        behaviour: Behaviour of the full trace.
        usage: Allocator usage of the full trace.
        spans: Actions of the two steps; lives, gaps, levels and arena are derived from them.
        first_step: The first of the two steps.
        lives: Blocks in the order of allocation, as in arena.offsets.
        timed: Whether times are seconds; otherwise the unit is a forward of the costliest rank.
    """

    header: Header
    behaviour: Behaviour
    spans: Sequence[Span]
    lives: Sequence[Life]
    gaps: Sequence[Gap]
    levels: Sequence[Level]
    swaps: Sequence[Swapped]
    usage: Usage
    arena: Arena
    timed: bool
    first_step: int

    @property
    def name(self) -> str:
        """The rank and its place on the grid."""
        return f"rank {self.header.rank}" + (
            f" ({place_text(self.header)})" if self.header.place else ""
        )

    @property
    def steps(self) -> str:
        """The shown steps, and where they come from."""
        first = self.first_step
        last = self.spans[-1].step
        which = f"steps {first} and {last}" if last > first else f"step {first}"
        source = "recorded"
        if self.header.predicted:
            source = "predicted, times " + (
                "simulated" if self.timed else "from counted operations"
            )
        return f"{which} of {self.behaviour.num_steps} {source}"

    @cached_property
    def tensors(self) -> list[TensorIntervals]:
        """Access intervals of each named tensor; first the ones whose longest interval times bytes
        is the largest."""
        found: dict[tuple[Category, str, int], list[float]] = defaultdict(list)
        for gap in self.gaps:
            if gap.tensor:
                found[gap.category, gap.tensor, gap.num_bytes].append(gap.seconds)
        tensors = [TensorIntervals(*key, sorted(seconds)) for key, seconds in found.items()]
        return sorted(tensors, key=lambda one: (-one.longest * one.num_bytes, one.tensor))

    @cached_property
    def start(self) -> float:
        """Time at which the shown steps begin."""
        return next(span.start for span in self.spans if span.step >= self.first_step)

    @property
    def end(self) -> float:
        """Time at which the shown steps end."""
        return self.spans[-1].end

    @property
    def time_unit(self) -> str:
        """Unit of time in pictures."""
        return "milliseconds" if self.timed else FORWARDS


def place_text(header: Header) -> str:
    """Return the place of a rank, such as pp=1 dp=0 tp=0."""
    return " ".join(f"{axis}={index}" for axis, index in header.place.items())


def examine(
    header: Header, behaviour: Behaviour, read: Callable[[], Iterable[Span]], *, timed: bool = True
) -> Account:
    """Return the account of a trace, which is read several times. Needs memory for living blocks
    and two steps.

    Args:
        header: Subject of the trace.
        behaviour: Behaviour of the trace.
        read: Function that returns the trace's spans from the start.
        timed: Whether times are seconds.

    Raises:
        DataError: The trace has no block.
    """
    if not behaviour.peak.num_bytes:
        raise DataError(f"the trace of rank {header.rank} has no block")
    first = behaviour.peak.step
    shown = excerpt(read(), first, first + 1)
    if shown[-1].step == first:
        before = excerpt(read(), first - 1, first)
        first, shown = next((span.step, before) for span in before if span.step >= first - 1)
    order = {
        block: i
        for i, block in enumerate(
            event.block for span in shown for event in span.events if event.what is What.MALLOC
        )
    }
    blocks = sorted(lives(shown), key=lambda life: order[life.block])
    usage = replay(event for span in read() for event in span.events)
    categories = {life.block: life.category for life in blocks}
    gaps = [
        Gap(after.time - before.time, after.num_bytes, categories[life.block], after.tensor)
        for life in blocks
        for before, after in life.intervals()
    ]
    return Account(
        header,
        behaviour,
        shown,
        blocks,
        gaps,
        list(levels(shown, categories)),
        _swaps(blocks, gaps, behaviour.peak) if timed else [],
        usage,
        plan(blocks_of(shown)),
        timed,
        first,
    )


def _swaps(blocks: Sequence[Life], gaps: Sequence[Gap], peak: Peak) -> list[Swapped]:
    """Return for each link what could be swapped."""
    seconds = np.array([gap.seconds for gap in gaps], np.float64)
    num_bytes = np.array([gap.num_bytes for gap in gaps], np.float64)
    at_peak = across(blocks, peak.time)
    return [
        Swapped(
            link.name,
            num_feasible(seconds, num_bytes, link),
            saved_at_peak(at_peak, link, peak),
        )
        for link in LINKS.values()
    ]


def offloading(timeline: Iterable[tuple[float, Mapping[Category, int]]]) -> list[Saving]:
    """Return the savings at the peak of a trace if all blocks of a category were offloaded, the
    largest first."""
    rows = [[part.get(category, 0) for category in Category] for _, part in timeline]
    held = np.array(rows, np.int64).reshape(-1, len(Category))
    total = held.sum(1)
    peak = int(total.max(initial=0))
    without = (total[:, None] - held).max(0, initial=0).tolist()
    return sorted_savings(
        Saving(category.value, peak - left, left)
        for category, left in zip(Category, without, strict=True)
    )
