"""Parts of traces: the steps that are asked for with what was there before, simulated times, bytes
held over time."""

from __future__ import annotations

import pytest
from memory_behaviour.pipeline_trace import KIB, trace

from hybridpar.memory_behaviour.analysis.excerpt import excerpt, levels, retimed, simulated_times
from hybridpar.memory_behaviour.events import Category, MemoryEvent, Span, What, lives
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate


def events(spans: list[Span]) -> list[MemoryEvent]:
    return [event for span in spans for event in span.events]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_an_excerpt_has_its_steps_and_the_mallocs_of_what_lives_then(schedule: str) -> None:
    spans = trace(5, schedule=schedule)
    start = next(i for i, span in enumerate(spans) if span.step == 3)
    end = next(i for i, span in enumerate(spans) if span.action == "UPDATE3@1") + 1
    shown = excerpt(spans, 3, 4)
    steps = spans[start:end]
    assert shown[-len(steps) :] == steps
    assert {span.step for span in steps} >= {3, 4}
    before = [event.block for event in events(shown[: -len(steps)])]
    living = {life.block for life in lives(spans[:start]) if life.died is None}
    assert set(before) == living
    assert len(before) == len(living)
    whole = {life.block: (life.born, life.born_in, life.born_step) for life in lives(spans)}
    assert all(
        whole[life.block] == (life.born, life.born_in, life.born_step) for life in lives(shown)
    )


def test_an_excerpt_reads_no_further_than_it_must() -> None:
    spans = iter(trace(5))
    assert excerpt(spans, 1, 2)[-1].action == "UPDATE1@1"
    assert {span.step for span in spans} == {3, 4, 5}


def test_simulated_times_keep_the_order_and_what_happens_at_once() -> None:
    spans = trace(2, ranks=2, rank=1)
    timeline = simulate(make_plan("1f1b", PipelineShape(2, 4), 0, 2), Costs(1, 2))
    moved = list(retimed(spans, simulated_times(timeline, 1)))
    assert [[e._replace(time=0) for e in span.events] for span in moved] == [
        [e._replace(time=0) for e in span.events] for span in spans
    ]
    times = [event.time for event in events(moved)]
    assert times == sorted(times)
    spans_of = {span.action: span for span in moved}
    first = spans_of["F0@1v0"]
    assert (first.start, first.end) == (1, 2)
    assert all(first.start < event.time < first.end for event in first.events)
    assert (spans_of["B0@1v0"].start, spans_of["B0@1v0"].end) == (2, 4)
    together = [
        Span(
            1,
            "F0@1",
            0,
            1,
            [
                MemoryEvent(What.MALLOC, 0, 8, "mm", 0.5),
                MemoryEvent(What.WRITE, 0, 8, "mm", 0.5),
                MemoryEvent(What.FREE, 0, 8, "", 0.6),
            ],
        )
    ]
    a, b, c = next(retimed(together, simulated_times(timeline, 1))).events
    assert a.time == b.time < c.time


def test_levels_end_at_nothing_and_peak_at_the_peak() -> None:
    spans = trace(1, layers=1, unit=KIB)
    found = list(levels(spans, {life.block: life.category for life in lives(spans)}))
    assert max(sum(held.values()) for _, held in found) == KIB * (4 + 4 + 8 + 3 + 2), "a forward"
    assert {c.value: n for c, n in found[-1][1].items() if n} == {
        "weights": 4 * KIB,
        "gradients": 4 * KIB,
        "optimizer": 8 * KIB,
    }
    assert [time for time, _ in found] == sorted(time for time, _ in found)


def test_a_level_that_lasts_no_time_is_seen() -> None:
    """Scratch space of an operator: made and given back at once."""
    at_once = [
        Span(
            1,
            "",
            0,
            1,
            [
                MemoryEvent(What.MALLOC, 0, 5, "", 0.25),
                MemoryEvent(What.MALLOC, 1, 7, "", 0.5),
                MemoryEvent(What.FREE, 1, 7, "", 0.5),
            ],
        )
    ]
    held = {0: Category.WEIGHTS, 1: Category.TEMPORARIES}
    totals = [(time, sum(numbers.values())) for time, numbers in levels(at_once, held)]
    assert totals[-3:] == [(0.25, 5), (0.5, 12), (0.5, 5)]
