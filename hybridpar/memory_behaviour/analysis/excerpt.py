"""Parts of a trace to look at: a few of its steps, simulated times for one that has none, bytes
held over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hybridpar.memory_behaviour.events import Category, Span, What
from hybridpar.schedules.action import Kind, parse_action
from hybridpar.schedules.simulate.timeline import Timeline

Times = Mapping[tuple[Kind, int, int], tuple[float, float]]
"""Start and end of an action, by its kind, stage and micro-batch."""
Level = tuple[float, dict[Category, int]]
"""Time, and bytes by category then."""


def excerpt(spans: Iterable[Span], first: int, last: int) -> list[Span]:
    """The spans from the first of step `first` to the update of step `last`, also those of steps
    that begin meanwhile.

    Before them are the mallocs of blocks that earlier spans leave alive, each in a span of its own,
    as it was. Memory: of these spans, and of living blocks.
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
    """The times of a pipeline rank's actions."""
    return {
        (action.kind, action.stage, action.microbatch): (start, done)
        for action, start, done, _ in timeline.actions(rank)
    }


def retimed(spans: Iterable[Span], times: Times) -> Iterator[Span]:
    """The same spans at these times, each action's operators evenly over it. What has no time takes
    none."""
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
    """Bytes by category whenever they change. Where they do so several times at once: the most,
    then the last.

    categories: of the blocks, by number.
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
