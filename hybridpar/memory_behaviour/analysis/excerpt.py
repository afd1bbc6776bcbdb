"""Excerpts of a trace for display: a few of its steps, simulated times for a trace without times,
and bytes allocated over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hybridpar.memory_behaviour.events import Category, Span, What
from hybridpar.schedules.action import Kind, parse_action
from hybridpar.schedules.simulate.timeline import Timeline

Times = Mapping[tuple[Kind, int, int], tuple[float, float]]
"""Start and end of an action, by its kind, stage and micro-batch."""
Level = tuple[float, dict[Category, int]]
"""Time, and bytes by category at that time."""


def excerpt(spans: Iterable[Span], first: int, last: int) -> list[Span]:
    """Return the spans from the start of step `first` to the update of step `last`, including spans
    of further steps that begin in between.

    They are preceded by the mallocs of blocks that earlier spans leave alive, each in a separate
    unchanged span. Needs memory for these spans and for living blocks.
    """
    born: dict[int, Span] = {}
    shown: list[Span] = []
    updated = False
    for span in spans:
        if (updated and span.action) or (span.step > last and not span.action):
            break
        updated = updated or (span.step == last and span.action.startswith(Kind.UPDATE.value))
        if shown or span.step >= first:
            shown.append(span)
            continue
        for event in span.events:
            if event.what is What.MALLOC:
                born[event.block] = replace(span, events=[event])
            elif event.what is What.FREE:
                del born[event.block]
    return [*born.values(), *shown]


def simulated_times(timeline: Timeline, rank: int) -> Times:
    """Return the times of a pipeline rank's actions."""
    return {
        (action.kind, action.stage, action.microbatch): (start, done)
        for action, start, done, _ in timeline.actions(rank)
    }


def retimed(spans: Iterable[Span], times: Times) -> Iterator[Span]:
    """Yield the spans with these times, and each action's operators evenly spaced over it. A span
    without a time has zero length."""
    now = 0.0
    for span in spans:
        start = now
        end = now
        if span.action:
            action = parse_action(span.action)
            start, end = times.get((action.kind, action.stage, action.microbatch), (now, now))
        start = max(start, now)
        now = max(end, now)
        moments = {
            time: i for i, time in enumerate(dict.fromkeys(event.time for event in span.events))
        }
        each = (now - start) / max(1, len(moments))
        yield replace(
            span,
            start=start,
            end=now,
            events=[
                event._replace(time=start + (moments[event.time] + 0.5) * each)
                for event in span.events
            ],
        )


def levels(spans: Iterable[Span], categories: Mapping[int, Category]) -> Iterator[Level]:
    """Yield bytes by category at each change. If several changes happen at one time, only the
    largest and the last total are yielded.

    Args:
        spans: The trace.
        categories: Categories of the blocks by number.
    """
    held: dict[Category, int] = {}
    most = held
    at = 0.0
    for event in (event for span in spans for event in span.events):
        sign = {What.MALLOC: 1, What.FREE: -1}.get(event.what, 0)
        if not sign:
            continue
        if event.time != at:
            if most != held:
                yield at, most
            yield at, held
            most = {}
            at = event.time
        category = categories[event.block]
        held = held | {category: held.get(category, 0) + sign * event.num_bytes}
        if sum(held.values()) > sum(most.values()):
            most = held
    yield from ((at, most), (at, held))
