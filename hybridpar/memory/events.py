"""Memory events: what happens to blocks of memory, in order; and the file of them, a line for each action.

    malloc   a block is handed out          read     an operator reads it
    free     it is given back               write    an operator writes it

A block is the memory of one storage. Views share it, and making one is no access.

    {"format": "hybridpar memory 1", "rank": 0, "device": "cpu", ...}
    {"step": 1, "action": "F3@0v1", "start": 0.013, "end": 0.021, "events": [
        ["malloc", 17, 4096, "aten::mm", 0.0131, 2, ""], ["write", 17, 4096, "aten::mm", 0.0131, 2, ""], ..]}

Source of the four behaviours: Li et al., ISPASS 2021, arXiv 2104.00258.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.errors import ConfigError, DataError, shown
from hybridpar.pipeline.plan.action import parse_action
from hybridpar.pipeline.plan.kinds import ROWS, Kind
from hybridpar.reading import BoundedReader, errors_as, open_regular, parse_json

FORMAT = "hybridpar memory 1"


class What(str, Enum):
    """Behaviour of a block."""

    MALLOC = "malloc"
    FREE = "free"
    READ = "read"
    WRITE = "write"


class MemoryEvent(NamedTuple):
    """One behaviour of one block.

    block: its number; blocks count from 0 in the order in which they are first seen. op: operator, such as "aten::mm";
    "" of a block that was there before, and of a free. time: seconds since the trace began. layer: number of the
    model's block that runs; -1: none. name: of a block that was there before, what it is: "weights 0", "batch".
    """

    what: What
    block: int
    num_bytes: int
    op: str
    time: float
    layer: int = -1
    name: str = ""


class WrittenEvents(Sequence[MemoryEvent]):
    """Events as a file has them, a JSON list; they are only made when somebody looks at them."""

    def __init__(self, count: int, text: str):
        self.text = text
        self._count = count
        self._events: list[MemoryEvent] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if self._events is None:
            self._events = [MemoryEvent(What(what), *rest) for what, *rest in json.loads(self.text)]
        return self._events[index]


@dataclass(frozen=True, slots=True)
class Span:
    """The events of one action, or between two. step: from 1. action: as it prints; "" between two. Units: seconds."""

    step: int
    action: str
    start: float
    end: float
    events: Sequence[MemoryEvent]


@dataclass(frozen=True)
class Header:
    """The subject of a trace. place: the rank's index on each axis. predicted: nothing ran; times are of no meaning.

    `more`: plain values that the writer wants to keep (the configuration).
    """

    rank: int = 0
    device: str = "cpu"
    place: dict[str, int] = field(default_factory=dict)
    predicted: bool = False
    more: dict[str, Any] = field(default_factory=dict)


class Category(str, Enum):
    """Purpose of a block."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MASTER = "master"
    OPTIMIZER = "optimizer"
    INPUTS = "stashed inputs"
    ACTIVATIONS = "activations"
    FACTORS = "waiting factors"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    BATCH = "batch"
    OTHER = "other"


class Access(NamedTuple):
    """A read or a write. Units: seconds."""

    time: float
    writes: bool
    op: str
    action: str
    step: int


@dataclass(slots=True)
class Life:
    """A block from malloc to free. died: None while it lives. layer: number of the model's block that made it, or -1.

    Actions are those in which it was made and given back; steps count from 1. Units: bytes, seconds.
    """

    block: int
    num_bytes: int
    op: str
    layer: int
    name: str
    born: float
    born_in: str
    born_step: int
    died: float | None = None
    died_in: str = ""
    died_step: int = 0
    accesses: list[Access] = field(default_factory=list)

    @property
    def category(self) -> Category:
        """Purpose of the block, from where it was made and where it was given back."""
        if self.name:
            column = self.name.partition(" ")[0]
            return _COLUMNS.get(column, Category.OTHER)
        if self.born_in == self.died_in and self.born_step == self.died_step and self.died is not None:
            return Category.TEMPORARIES
        born, died = _kind(self.born_in), _kind(self.died_in)
        if born is None or (born is Kind.F and died in (Kind.F, Kind.NORM)) or self.op == _SQUARES:  # losses, norms
            return Category.OTHER
        if born is Kind.F and (died in _BACKWARDS or self.died is None):
            return Category.INPUTS if self.layer < 0 and self.op in _MESSAGES else Category.ACTIVATIONS
        if born is Kind.I and died in (Kind.W, None):
            return Category.FACTORS
        if born is Kind.RECV_F and died in _BACKWARDS:
            return Category.INPUTS
        return Category.COMMUNICATION if born in (*_BACKWARDS, Kind.F) or ROWS[born].side else Category.OTHER


_COLUMNS = {category.value: category for category in Category}
_BACKWARDS = (Kind.B, Kind.I, Kind.W)
_SQUARES = "hybridpar::sum_squares"
_MESSAGES = frozenset({"aten::empty", "aten::new_empty", "aten::cat"})


def _kind(action: str) -> Kind | None:
    return parse_action(action).kind if action else None


def lives(spans: Iterable[Span], steps: Container[int] | None = None) -> Iterator[Life]:
    """Yields every block's life: those that end in their order, then those that do not.

    steps: only accesses in these steps are kept (None: all of them). Memory: of living blocks and what is kept of them,
    so a long trace wants few steps, as `range(3, 6)`.
    """
    living: dict[int, Life] = {}
    for span in spans:
        keeps = steps is None or span.step in steps
        for event in span.events:
            if event.what is What.MALLOC:
                living[event.block] = Life(event.block, event.num_bytes, event.op, event.layer, event.name, event.time,
                                           span.action, span.step)
            elif event.what is What.FREE:
                life = living.pop(event.block)
                life.died, life.died_in, life.died_step = event.time, span.action, span.step
                yield life
            elif keeps:
                living[event.block].accesses.append(
                    Access(event.time, event.what is What.WRITE, event.op, span.action, span.step))
    yield from living.values()


# -- the file ----------------------------------------------------------------------------------------------------------


def header_line(header: Header) -> str:
    """The first line of a file."""
    return json.dumps({"format": FORMAT, **asdict(header)}) + "\n"


def span_line(span: Span) -> str:
    """The line of an action."""
    head = json.dumps({"step": span.step, "action": span.action, "start": span.start, "end": span.end}, **_COMPACT)
    return f'{head[:-1]},"events":{_events_text(span.events)}}}\n'


_COMPACT: Any = {"separators": (",", ":"), "check_circular": False}


def _events_text(events: Sequence[MemoryEvent]) -> str:
    return events.text if isinstance(events, WrittenEvents) else json.dumps(events, **_COMPACT)


def read_trace(path: Path) -> tuple[Header, Iterator[Span]]:
    """The subject of a file, and its actions, read as they are asked for. Memory: of living blocks and one line.

    A last line without an end was being written when the run was killed: the actions end before it.

    Raises: DataError that names file, line and what is wrong, at once for the header, for a later line when it is read.
    """
    parts = _read(path)
    return next(parts), parts


_LONGEST_LINE = 64 << 20
_LONGEST_TEXT = 1000
_MOST = 1 << 62


def _read(path: Path) -> Iterator[Any]:
    """The header, then the actions. Raises: DataError."""
    living: dict[int, int] = {}
    with errors_as(DataError, path):
        file = BoundedReader(open_regular(path))
    with file:
        for number in itertools.count(1):
            with errors_as(DataError, f"{path}, line {number}", "is no line of a memory trace",
                           ConfigError, TypeError):
                line = _line(file)
                if number > 1 and not line:
                    return
                found = _span(parse_json(line), living) if number > 1 else _header(line)
            yield found


def _line(file: BoundedReader) -> bytes:
    """The next line; empty at the end, and for a last one without an end. Raises: ValueError for a very long one."""
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"it has more than {_LONGEST_LINE} bytes")
    return line if line.endswith(b"\n") else b""


def _header(line: bytes) -> Header:
    """Raises: ValueError, TypeError."""
    fields = parse_json(line) if line else None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ValueError("the first line must be the header of a trace")
    if (found := fields.pop("format")) != FORMAT:
        raise ValueError(f"its format is {shown(found)}, and {FORMAT!r} is the one that is known")
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
    """The action of a line. living: bytes of the blocks that are there, by number; brought up to date.

    Raises: ValueError; ConfigError for what is no action.
    """
    if not isinstance(fields, dict) or set(fields) != _SPAN_KEYS:
        raise ValueError(f"it must be an object of {', '.join(sorted(_SPAN_KEYS))}")
    if fields["action"] != "":
        parse_action(_text(fields["action"], "action"))
    if not isinstance(fields["events"], list):
        raise ValueError("events must be a list")
    start, end = _seconds(fields["start"], "start"), _seconds(fields["end"], "end")
    return Span(_whole(fields["step"], "step"), fields["action"], start, end,
                [_event(event, living) for event in fields["events"]])


_BEHAVIOURS = {what.value: what for what in What}


def _event(fields: Any, living: dict[int, int]) -> MemoryEvent:
    """Raises: ValueError."""
    if not isinstance(fields, list) or len(fields) != len(MemoryEvent._fields):
        raise ValueError(f"an event must be a list of {len(MemoryEvent._fields)} values, not {shown(fields)}")
    behaviour, block, num_bytes, op, time, layer, name = fields
    what = _BEHAVIOURS.get(behaviour) if isinstance(behaviour, str) else None
    if what is None:
        raise ValueError(f"a behaviour is one of {', '.join(_BEHAVIOURS)}, not {shown(behaviour)}")
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
        raise ValueError(f"a {behaviour} of block {block}, which is not there")
    elif num_bytes != living[block]:
        raise ValueError(f"block {block} has {living[block]} bytes, and then {num_bytes}")
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


__all__ = ["FORMAT", "Access", "Category", "DataError", "Header", "Life", "MemoryEvent", "Span", "What", "header_line",
           "lives", "read_trace", "span_line"]
