"""Trace files, and lives of blocks."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_behaviour.traces import Rank, random_spans

from hybridpar.errors import DataError
from hybridpar.memory_behaviour import trace_file
from hybridpar.memory_behaviour.events import Category, Header, MemoryEvent, Span, What, lives
from hybridpar.memory_behaviour.trace_file import header_line, read_trace, span_line

HEADER = Header(3, "cuda", {"pp": 1, "tp": 0}, predicted=True, more={"model.kind": "gpt"})
SPAN = Span(
    1,
    "F0@0v0",
    0.5,
    1.5,
    [
        MemoryEvent(What.MALLOC, 0, 8, "aten::mm", 0.5, 2),
        MemoryEvent(What.READ, 0, 8, "aten::mm", 1, -1, ""),
        MemoryEvent(What.FREE, 0, 8, "", 1.25),
    ],
)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


@given(st.randoms(use_true_random=False))
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, random: Random
) -> None:
    spans = list(random_spans(random, 6))
    path = write(
        tmp_path_factory.mktemp("trace") / "m.jsonl", header_line(HEADER), *map(span_line, spans)
    )
    header, read = read_trace(path)
    assert (header, list(read)) == (HEADER, spans)


def test_a_killed_run_ends_quietly(tmp_path: Path) -> None:
    line = span_line(SPAN)
    for end in (1, 20, len(line) - 1):
        path = write(tmp_path / "m.jsonl", header_line(HEADER), line, line[:end])
        assert list(read_trace(path)[1]) == [SPAN]


def changed(**fields: object) -> str:
    return json.dumps(json.loads(span_line(SPAN)) | fields) + "\n"


def event(**fields: object) -> str:
    """A line whose second event has other fields."""
    row = (
        dict(zip(MemoryEvent._fields, ["read", 0, 8, "aten::mm", 1.0, -1, ""], strict=True))
        | fields
    )
    first, _, last = json.loads(span_line(SPAN))["events"]
    return changed(events=[first, list(row.values()), last])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nothing\n", "Expecting value"),
        ("\n", "Expecting value"),
        ("[]\n", "must be an object of action, end, events, start, step"),
        ("{}\n", "must be an object of"),
        (changed(step=-1), "step must be a whole number of at least 0, not -1"),
        (changed(step=1.5), "step must be"),
        (changed(action="F0"), "must be KIND MICROBATCH"),
        (changed(action=3), "action must be a short text"),
        (changed(start=None), "start must be a number of seconds"),
        (changed(end=float("nan")), "end must be a number of seconds, not nan"),
        (changed(events={}), "events must be a list"),
        (changed(events=[["read"]]), "a list of 7 values"),
        (event(what="look"), "malloc, free, read, write, not 'look'"),
        (event(what=[]), "a behaviour must be one of"),
        (event(block=5), "a read of block 5, which does not exist"),
        (event(what="free"), "a free of block 0, which does not exist"),  # the next one
        (event(what="malloc"), "block 0 is handed out twice"),
        (event(num_bytes=-8), "num_bytes must be a whole number of at least 0, not -8"),
        (event(num_bytes=9), "block 0 has 8 bytes first, then 9"),
        (event(num_bytes=7), "block 0 has 8 bytes first, then 7"),
        (event(num_bytes=9, name="weights/0/w"), "block 0 has 8 bytes first, then 9"),
        (event(time="soon"), "time must be a number of seconds, not 'soon'"),
        (event(time=float("inf")), "time must be"),
        (event(time=True), "time must be"),
        (event(layer=-2), "layer must be a whole number of at least -1"),
        (event(op="\x1b[2J"), "op must be a short text"),
        (event(name="x" * 5000), "name must be a short text"),
    ],
)
def test_a_damaged_line_is_one_error(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path / "m.jsonl", header_line(HEADER), span_line(SPAN), line, span_line(SPAN))
    _, spans = read_trace(path)
    assert next(spans) == SPAN
    with pytest.raises(DataError) as found:
        next(spans)
    assert str(found.value).startswith(f"{path}, line 3: is no line of a memory trace")
    assert what in str(found.value)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "first line must be the header"),
        (header_line(HEADER)[:-1], "first line must be the header"),
        ("[1]\n", "first line must be the header"),
        (span_line(SPAN), "first line must be the header"),
        (
            header_line(HEADER).replace("memory 1", "memory 2"),
            "its format is 'hybridpar memory 2'; this version reads ",
        ),
        (header_line(HEADER).replace('"rank": 3', '"rank": -3'), "rank must be"),
        (header_line(HEADER).replace('"rank"', '"rang"'), "rang"),
        (header_line(HEADER).replace('"cuda"', "7"), "device must be"),
        (header_line(HEADER).replace('"tp": 0', '"tp": 0.5'), "place.tp must be"),
        (header_line(HEADER).replace("true", "1"), "predicted must be true or false"),
        (header_line(HEADER).replace('{"model.kind": "gpt"}', "[]"), "more must be an object"),
    ],
)
def test_a_damaged_header_is_found_at_once(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(DataError, match=r"m\.jsonl, line 1: ") as found:
        read_trace(write(tmp_path / "m.jsonl", line))
    assert what in str(found.value)


def test_no_file_and_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path)
    monkeypatch.setattr(trace_file, "_LONGEST_LINE", 1000)
    path = write(tmp_path / "m.jsonl", header_line(HEADER), " " * 2000)
    with pytest.raises(DataError, match=r"line 2: .*more than 1000 bytes"):
        list(read_trace(path)[1])


@pytest.mark.thorough
def test_reading_takes_the_memory_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", header_line(HEADER), span_line(SPAN) * 20_000)
    tracemalloc.start()
    _, spans = read_trace(path)
    count = sum(1 for _ in spans)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert most < 2 << 20 < path.stat().st_size


def test_lives_and_the_accesses_that_are_kept() -> None:
    spans = list(Rank(num_batches=3).spans())
    whole, some = list(lives(spans)), list(lives(spans, range(2, 3)))
    assert [(life.block, life.born, life.died, life.category) for life in whole] == [
        (life.block, life.born, life.died, life.category) for life in some
    ]
    for life, other in zip(whole, some, strict=True):
        assert other.accesses == [access for access in life.accesses if access.step == 2]
    assert {life.category for life in whole} == {
        Category.WEIGHTS,
        Category.GRADIENTS,
        Category.OPTIMIZER,
        Category.ACTIVATIONS,
        Category.INPUTS,
        Category.COMMUNICATION,
        Category.TEMPORARIES,
    }
    assert all(life.died is None for life in islice(reversed(whole), 6))
