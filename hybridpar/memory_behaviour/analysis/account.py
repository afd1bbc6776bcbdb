"""Account of a rank's memory: everything that a report and its pictures show, from one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hybridpar.errors import DataError
from hybridpar.memory_behaviour.analysis.arena import Arena, blocks_of, plan
from hybridpar.memory_behaviour.analysis.behaviour import Behaviour
from hybridpar.memory_behaviour.analysis.excerpt import Level, excerpt, levels
from hybridpar.memory_behaviour.analysis.fragmentation import Usage, replay
from hybridpar.memory_behaviour.analysis.swap import LINKS, feasible, saved_at_peak
from hybridpar.memory_behaviour.events import Category, Header, Life, Span, What, lives
from hybridpar.prediction.knobs import Saving, sorted_savings
from hybridpar.schedules.draw.svg import FORWARDS


class Gap(NamedTuple):
    """Time between two consecutive accesses of a block, by two operators (see behaviour.py)."""

    seconds: float
    num_bytes: int
    category: Category


@dataclass(frozen=True)
class Swapped:
    """Number of intervals in which a block could be swapped out over a link and back in time, and
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

    @property
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
    swaps = (
        [
            Swapped(
                link.name, len(feasible(blocks, link)), saved_at_peak(blocks, link, behaviour.peak)
            )
            for link in LINKS.values()
        ]
        if timed
        else []
    )
    usage = replay(event for span in read() for event in span.events)
    categories = {life.block: life.category for life in blocks}
    gaps = [
        Gap(after.time - before.time, life.num_bytes, categories[life.block])
        for life in blocks
        for before, after in pairwise(life.accesses)
        if after.time > before.time
    ]
    return Account(
        header,
        behaviour,
        shown,
        blocks,
        gaps,
        list(levels(shown, categories)),
        swaps,
        usage,
        plan(blocks_of(shown)),
        timed,
        first,
    )


def offloading(timeline: Iterable[tuple[float, Mapping[Category, int]]]) -> list[Saving]:
    """Return the savings at the peak of a trace if all blocks of a category were offloaded, the
    largest first."""
    peak = 0
    without = dict.fromkeys(Category, 0)
    for _, held in timeline:
        total = sum(held.values())
        peak = max(peak, total)
        for category in Category:
            without[category] = max(without[category], total - held.get(category, 0))
    return sorted_savings(
        Saving(category.value, peak - left, left) for category, left in without.items()
    )
