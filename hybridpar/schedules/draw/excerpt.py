"""The part of a large plan that a picture shows: a window of its steady state, and some ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.schedules.kinds import Kind
from hybridpar.schedules.simulate.timeline import Timeline

MOST_ROWS = 16
"""Ranks in a picture: the first half and the last half of these, if there are more."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Part of a timeline, and what it shows, in words.

    Attributes:
        timeline: The part. Actions are cut at its edges; times count from its start on.
        since: Start of the part.
        text: Shown time and ranks; empty if nothing is left out.
    """

    timeline: Timeline
    since: float = 0.0
    text: str = ""


def excerpt(timeline: Timeline, longest: float) -> Excerpt:
    """Return a part of a timeline that is at most `longest`: the middle of the time in which all
    ranks have work, and the first and last of many ranks."""
    ranks = sorted(timeline.plan)
    said = []
    since = 0.0
    if timeline.makespan > longest:
        full, ends = _full(timeline)
        since = max(0.0, min((full + ends - longest) / 2, timeline.makespan - longest))
        said.append(f"{since:,.6g} to {since + longest:,.6g}")
    if len(ranks) > MOST_ROWS:
        half = MOST_ROWS // 2
        said.append(
            f"{timeline.shape.rank_name}s 0-{half - 1} and {ranks[-half]}-{ranks[-1]} of {len(ranks)}"
        )
        ranks = [*ranks[:half], *ranks[-half:]]
    if not said:
        return Excerpt(timeline)
    part = timeline.cut_at(since + longest, since=since, ranks=ranks)
    return Excerpt(part, since, ", ".join(said))


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
