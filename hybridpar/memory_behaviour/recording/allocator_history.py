"""Compare recorded memory events with the history of CUDA's caching allocator: whether both saw the
same allocations and frees.

torch.cuda.memory._record_memory_history(context=None, max_entries=..)   .. training, recorded ..
compare(spans, torch.cuda.memory._snapshot()["device_traces"][device])

The allocator rounds sizes up to 512 bytes, and also sees scratch memory of operators and memory of
libraries. So the recorded mallocs, rounded, are a subsequence of its allocs; the rest is scratch.

Source: torch's docs, "Understanding CUDA Memory Usage": entries with action, addr, size, stream.
Units: bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpar.memory_behaviour.analysis.fragmentation import ROUND, round_up
from hybridpar.memory_behaviour.events import Span, What

ALLOC = "alloc"
FREE = "free_requested"
"""The history entry that is compared; "free_completed" may come later, when other streams have
finished with a block."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a recording with the allocator's history.

    Args:
        births: Recorded allocations.
        deaths: Recorded frees.
        found_births: Recorded allocations that are in the history.
        found_deaths: Frees of these that the history has before the next recorded allocation.
        scratch: Allocations in the history that were not recorded.
        peak: Peak of the recorded blocks, rounded.
        allocator_peak: Peak of everything that the allocator handed out since the history began.

    Units: bytes.
    """

    births: int
    found_births: int
    deaths: int
    found_deaths: int
    scratch: int
    peak: int
    allocator_peak: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"the allocator's history has {self.found_births:,} of {self.births:,} recorded births "
            "and "
            f"{self.found_deaths:,} of {self.deaths:,} deaths, and {self.scratch:,} blocks of "
            "operators' own; "
            f"peaks of {self.peak / mib:,.1f} and {self.allocator_peak / mib:,.1f} MiB"
        )


@dataclass
class _Given:
    """A block of the history: its size, and the numbers of the entries where it begins and ends
    (None: it does not)."""

    size: int
    begin: int
    end: int | None = None


def compare(spans: Iterable[Span], history: Sequence[Mapping[str, Any]]) -> Agreement:
    """Compare a recording with the history of one device that began at the same time.

    A recorded allocation matches the first alloc of its size after the matches of earlier ones.
    Needs memory for both.
    """
    given = _blocks(history)
    by_size: dict[int, list[_Given]] = defaultdict(list)
    for block in reversed(given):
        by_size[block.size].append(block)  # in reverse, so that `pop` returns the next one
    seen: dict[int, _Given] = {}
    sizes: dict[int, int] = {}
    waiting: list[_Given] = []  # recorded frees since the last allocation
    births = deaths = found_deaths = place = now = peak = 0
    for event in (event for span in spans for event in span.events):
        size = round_up(event.num_bytes, ROUND)
        if event.what is What.MALLOC and event.op:
            births = births + 1
            now = now + size
            sizes[event.block] = size
            peak = max(peak, now)
            rows = by_size[size]
            while rows and rows[-1].begin < place:
                rows.pop()
            if rows:
                seen[event.block] = found = rows.pop()
                place = found.begin + 1
                found_deaths += sum(one.end is not None and one.end < place for one in waiting)
                waiting.clear()
        elif event.what is What.FREE and event.block in sizes:
            deaths = deaths + 1
            now = now - sizes.pop(event.block)
            if event.block in seen:
                waiting.append(seen[event.block])
    found_deaths += sum(one.end is not None for one in waiting)
    return Agreement(
        births,
        len(seen),
        deaths,
        found_deaths,
        len(given) - len(seen),
        peak,
        _peak(given, len(history)),
    )


def _blocks(history: Sequence[Mapping[str, Any]]) -> list[_Given]:
    """Return the blocks in the order of allocation."""
    found: list[_Given] = []
    living: dict[int, _Given] = {}
    for number, entry in enumerate(history):
        if entry["action"] == ALLOC:
            block = living[entry["addr"]] = _Given(entry["size"], number)
            found.append(block)
        elif entry["action"] == FREE and (gone := living.pop(entry["addr"], None)) is not None:
            gone.end = number
    return found


def _peak(blocks: Iterable[_Given], num_entries: int) -> int:
    changes = [0] * (num_entries + 1)
    for block in blocks:
        changes[block.begin] += block.size
        if block.end is not None:
            changes[block.end] -= block.size
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak
