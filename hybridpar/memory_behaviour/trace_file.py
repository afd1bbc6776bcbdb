"""The file of a trace of memory events, with one line for each action.

{"format": "hybridpar memory 1", "rank": 0, "device": "cpu", ...}
{"step": 1, "action": "F3@0v1", "start": 0.013, "end": 0.021, "events": [
    ["malloc", 17, 4096, "aten::mm", 0.0131, 2, ""], ["write", 17, 4096, "aten::mm", 0.0131, 2, ""],
    ..]}
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridpar.errors import ConfigError, DataError, shown
from hybridpar.memory_behaviour.events import Header, MemoryEvent, Span, What, WrittenEvents
from hybridpar.reading import BoundedReader, errors_as, open_regular, parse_json
from hybridpar.schedules.action import parse_action

FORMAT = "hybridpar memory 1"
_COMPACT: Any = {"separators": (",", ":"), "check_circular": False}


def header_line(header: Header) -> str:
    """Return the first line of a file."""
    return json.dumps({"format": FORMAT, **asdict(header)}) + "\n"


def span_line(span: Span) -> str:
    """Return the line of an action."""
    head = json.dumps(
        {"step": span.step, "action": span.action, "start": span.start, "end": span.end}, **_COMPACT
    )
    events = (
        span.events.text
        if isinstance(span.events, WrittenEvents)
        else json.dumps(span.events, **_COMPACT)
    )
    return f'{head[:-1]},"events":{events}}}\n'


def read_trace(path: Path) -> tuple[Header, Iterator[Span]]:
    """Return the subject of a file, and its actions, read on demand. Needs memory for living blocks
    and one line.

    A last line without a line end was being written when the run was killed; the actions end before
    it.

    Raises:
        DataError: Names file, line and error; raised at once for the header, for later lines when
            they are read.
    """
    parts = _read(path)
    return next(parts), parts


_LONGEST_LINE = 64 << 20
_LONGEST_TEXT = 1000
_MOST = 1 << 62


def _read(path: Path) -> Iterator[Any]:
    """Yield the header, then the actions. Raises: DataError if a line is wrong."""
    living: dict[int, int] = {}
    with errors_as(DataError, path):
        file = BoundedReader(open_regular(path, within=path.parent.parent))
    with file:
        for number in itertools.count(1):
            with errors_as(
                DataError,
                f"{path}, line {number}",
                "is no line of a memory trace",
                ConfigError,
                TypeError,
            ):
                line = _line(file)
                if number > 1 and not line:
                    return
                found = _span(parse_json(line), living) if number > 1 else _header(line)
            yield found


def _line(file: BoundedReader) -> bytes:
    """Return the next line; empty at the end, and for a last line without a line end.

    Raises:
        ValueError: The line is too long.
    """
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"it has more than {_LONGEST_LINE} bytes")
    return line if line.endswith(b"\n") else b""


def _header(line: bytes) -> Header:
    """Return the header of a line. Raises: ValueError, TypeError if it is wrong."""
    fields = parse_json(line) if line else None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ValueError("the first line must be the header of a trace")
    if (found := fields.pop("format")) != FORMAT:
        raise ValueError(f"its format is {shown(found)}; this version reads {FORMAT!r}")
    header = Header(**fields)
    _whole(header.rank, "rank")
    _text(header.device, "device")
    if not isinstance(header.predicted, bool):
        raise ValueError(f"predicted must be true or false, not {shown(header.predicted)}")
    for name in ("place", "more"):
        if not isinstance(value := getattr(header, name), dict):
            raise ValueError(f"{name} must be an object, not {shown(value)}")
    for axis, index in header.place.items():
        _whole(index, f"place.{_text(axis, 'axis')}")
    return header


_SPAN_KEYS = {"step", "action", "start", "end", "events"}


def _span(fields: Any, living: dict[int, int]) -> Span:
    """Return the action of a line.

    Args:
        fields: The parsed line.
        living: Bytes of the living blocks by number; updated.

    Raises:
        ValueError: The line is wrong. Also ConfigError, if the action is not valid.
    """
    if not isinstance(fields, dict) or set(fields) != _SPAN_KEYS:
        raise ValueError(f"it must be an object of {', '.join(sorted(_SPAN_KEYS))}")
    if fields["action"] != "":
        parse_action(_text(fields["action"], "action"))
    if not isinstance(fields["events"], list):
        raise ValueError("events must be a list")
    start = _seconds(fields["start"], "start")
    end = _seconds(fields["end"], "end")
    return Span(
        _whole(fields["step"], "step"),
        fields["action"],
        start,
        end,
        [_event(event, living) for event in fields["events"]],
    )


_BEHAVIOURS = {what.value: what for what in What}


def _event(fields: Any, living: dict[int, int]) -> MemoryEvent:
    """Return the event of a list. Raises: ValueError if it is wrong."""
    if not isinstance(fields, list) or len(fields) != len(MemoryEvent._fields):
        raise ValueError(
            f"an event must be a list of {len(MemoryEvent._fields)} values, not {shown(fields)}"
        )
    behaviour, block, num_bytes, op, time, layer, name = fields
    what = _BEHAVIOURS.get(behaviour) if isinstance(behaviour, str) else None
    if what is None:
        raise ValueError(
            f"a behaviour must be one of {', '.join(_BEHAVIOURS)}, not {shown(behaviour)}"
        )
    _whole(block, "block")
    _whole(num_bytes, "num_bytes")
    _whole(layer, "layer", -1)
    _text(op, "op")
    _text(name, "name")
    if what is What.MALLOC:
        if block in living:
            raise ValueError(f"block {block} is handed out twice")
        living[block] = num_bytes
    elif block not in living:
        raise ValueError(f"a {behaviour} of block {block}, which does not exist")
    elif num_bytes > living[block] or (num_bytes < living[block] and not name):
        raise ValueError(f"block {block} has {living[block]} bytes first, then {num_bytes}")
    if what is What.FREE:
        del living[block]
    return MemoryEvent(what, block, num_bytes, op, _seconds(time, "time"), layer, name)


def _whole(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {shown(value)}")
    return value


def _seconds(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not -_MOST < value < _MOST:
        raise ValueError(f"{name} must be a number of seconds, not {shown(value)}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be a short text, not {shown(value)}")
    return value
