"""Memory events: what happens to blocks of memory, in order.

    malloc   a block is handed out          read     an operator reads it
    free     it is given back               write    an operator writes it

A block is the memory of one storage. Views share it, and making one is no access.

Source of the four behaviours: Li et al., ISPASS 2021, arXiv 2104.00258.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from hybridpar.schedules.action import parse_action
from hybridpar.schedules.kinds import ACTION_SPECS, Kind


class What(str, Enum):
    """Behaviour of a block."""

    MALLOC = "malloc"
    FREE = "free"
    READ = "read"
    WRITE = "write"


class MemoryEvent(NamedTuple):
    """One behaviour of one block.

    block: its number; blocks count from 0 in the order in which they are first seen. op: operator,
    such as "aten::mm"; "" of a block that was there before, and of a free. time: seconds since the
    trace began. layer: number of the model's block that runs; -1: none. name: of a block that was
    there before, what it is: "weights 0", "batch".
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
    """The events of one action, or between two. step: from 1. action: as it prints; "" between two.
    Units: seconds."""

    step: int
    action: str
    start: float
    end: float
    events: Sequence[MemoryEvent]


@dataclass(frozen=True)
class Header:
    """The subject of a trace. place: the rank's index on each axis. predicted: nothing ran; times
    are of no meaning.

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
    """A block from malloc to free. died: None while it lives. layer: number of the model's block
    that made it, or -1.

    Actions are those in which it was made and given back; steps count from 1. Units: bytes,
    seconds.
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

    @staticmethod
    def of(event: MemoryEvent, span: Span) -> Life:
        """The life that a malloc begins."""
        return Life(
            event.block,
            event.num_bytes,
            event.op,
            event.layer,
            event.name,
            event.time,
            span.action,
            span.step,
        )

    def end(self, event: MemoryEvent, span: Span) -> None:
        """Ends it, by a free."""
        self.died = event.time
        self.died_in = span.action
        self.died_step = span.step

    @property
    def category(self) -> Category:
        """Purpose of the block, from where it was made and where it was given back."""
        if self.name:
            column = self.name.partition(" ")[0]
            return _COLUMNS.get(column, Category.OTHER)
        if (
            self.born_in == self.died_in
            and self.born_step == self.died_step
            and self.died is not None
        ):
            return Category.TEMPORARIES
        born = _kind(self.born_in)
        died = _kind(self.died_in)
        if (
            born is None or (born is Kind.F and died in (Kind.F, Kind.NORM)) or self.op == _SQUARES
        ):  # losses, norms
            return Category.OTHER
        if born is Kind.F and (died in _BACKWARDS or self.died is None):
            return (
                Category.INPUTS if self.layer < 0 and self.op in _MESSAGES else Category.ACTIVATIONS
            )
        if born is Kind.I and died in (Kind.W, None):
            return Category.FACTORS
        if born is Kind.RECV_F and died in _BACKWARDS:
            return Category.INPUTS
        return (
            Category.COMMUNICATION
            if born in (*_BACKWARDS, Kind.F) or ACTION_SPECS[born].peer_offset
            else Category.OTHER
        )


_COLUMNS = {category.value: category for category in Category} | {"frozen": Category.WEIGHTS}
_BACKWARDS = (Kind.B, Kind.I, Kind.W)
_SQUARES = "hybridpar::sum_squares"
_MESSAGES = frozenset({"aten::empty", "aten::new_empty", "aten::cat"})


def _kind(action: str) -> Kind | None:
    return parse_action(action).kind if action else None


def lives(spans: Iterable[Span], steps: Container[int] | None = None) -> Iterator[Life]:
    """Yields every block's life: those that end in their order, then those that do not.

    steps: only accesses in these steps are kept (None: all of them). Memory: of living blocks and
    what is kept of them, so a long trace wants few steps, as `range(3, 6)`.
    """
    living: dict[int, Life] = {}
    for span in spans:
        keeps = steps is None or span.step in steps
        for event in span.events:
            if event.what is What.MALLOC:
                living[event.block] = Life.of(event, span)
            elif event.what is What.FREE:
                life = living.pop(event.block)
                life.end(event, span)
                yield life
            elif keeps:
                living[event.block].accesses.append(
                    Access(event.time, event.what is What.WRITE, event.op, span.action, span.step)
                )
    yield from living.values()
