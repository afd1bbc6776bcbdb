"""The part of a large plan that a picture shows: a window of its steady state, and some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.simulate.timeline import Timeline

T = TypeVar("T")
MOST_ROWS = 16
"""Ranks in a picture: the first half and the last half of these, if there are more."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Part of a timeline, whose times count from `since` on.

    Args:
        timeline: The part, with the ranks that are shown alone; actions are cut at its edges.
        since: Start of the part.
        ranks: Ranks that are shown.
        num_ranks: Number of ranks of the full timeline.
        rank_name: Word for a rank.
    """

    timeline: Timeline
    since: float
    ranks: Sequence[int]
    num_ranks: int
    rank_name: str

    def __str__(self) -> str:
        """Return what is shown, in words; empty if nothing is left out."""
        said = []
        if self.since:
            said.append(f"{self.since:,.6g} to {self.since + self.timeline.makespan:,.6g}")
        if len(self.ranks) < self.num_ranks:
            half = MOST_ROWS // 2
            first, last = self.ranks[:half], self.ranks[half:]
            said.append(
                f"{self.rank_name}s {first[0]}-{first[-1]} and {last[0]}-{last[-1]} of {self.num_ranks}"
            )
        return ", ".join(said)


def excerpt(timeline: Timeline, longest: float) -> Excerpt:
    """Return a part of a timeline that is at most `longest`: the middle of the time in which all
    ranks have work, and the first and last of many ranks."""
    ranks = sorted(timeline.plan)
    shown = ranks
    if len(ranks) > MOST_ROWS:
        half = MOST_ROWS // 2
        shown = [*ranks[:half], *ranks[-half:]]
    if timeline.makespan <= longest and shown == ranks:
        return Excerpt(timeline, 0.0, ranks, len(ranks), timeline.rank_name)
    since = 0.0
    if timeline.makespan > longest:
        full, ends = _full(timeline)
        since = max(0.0, min((full + ends - longest) / 2, timeline.makespan - longest))
    until = min(since + longest, timeline.makespan)
    part = _between(timeline, shown, since, until)
    return Excerpt(part, since, shown, len(ranks), timeline.rank_name)


def _full(timeline: Timeline) -> tuple[float, float]:
    """Return the time from the last rank's first forward to rank 0's last before it drains."""
    first, *_, last = sorted(timeline.plan) * 2
    forwards = [
        (start, action.microbatch)
        for action, start, _, _ in timeline.actions(first)
        if action.kind is Kind.F
    ]
    full = min(
        (start for action, start, _, _ in timeline.actions(last) if action.kind is Kind.F),
        default=0.0,
    )
    updates = [
        start for action, start, _, _ in timeline.actions(first) if action.kind is Kind.UPDATE
    ]
    num_microbatches = (max(m for _, m in forwards) + 1) // max(1, len(updates)) if forwards else 0
    second = [start for start, m in forwards if m >= num_microbatches]
    if updates and second and min(second) >= updates[0]:
        forwards = [(start, m) for start, m in forwards if m < num_microbatches]
    ends = max((start for start, _ in forwards), default=timeline.makespan)
    return min(full, ends), ends


def _between(timeline: Timeline, ranks: Sequence[int], since: float, until: float) -> Timeline:
    """Return the actions of some ranks that overlap a window, cut at its edges, from 0 on."""

    def cut(time: float) -> float:
        return min(max(time, since), until) - since

    kept: dict[int, list[int]] = {}
    for rank in ranks:
        kept[rank] = [
            i
            for i, (_, start, done, end) in enumerate(timeline.actions(rank))
            if max(done, end) > since and start < until
        ]

    def of_rank(values: Sequence[T], rank: int) -> list[T]:
        return [values[i] for i in kept[rank]]

    def times(table: Sequence[float], rank: int) -> list[float]:
        return [cut(time) for time in of_rank(table, rank)]

    returns = {rank: [done for _, _, done, _ in timeline.actions(rank)] for rank in ranks}
    return Timeline(
        {rank: of_rank(timeline.plan[rank], rank) for rank in ranks},
        {rank: times(timeline.starts[rank], rank) for rank in ranks},
        {rank: times(timeline.ends[rank], rank) for rank in ranks},
        until - since,
        {rank: times(returns[rank], rank) for rank in ranks},
        {
            rank: {
                place: timeline.stalls[rank][i]
                for place, i in enumerate(kept[rank])
                if i in timeline.stalls.get(rank, {}) and timeline.starts[rank][i] >= since
            }
            for rank in ranks
        },
    )
