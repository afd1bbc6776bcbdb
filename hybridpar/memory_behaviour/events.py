"""Memory events: a sequence of operations on blocks of memory.

malloc   a block is allocated           read     an operator reads it
free     it is freed                    write    an operator writes it

A block is the memory of one storage. Views share it, and making one is no access. A block may hold
several named tensors, such as the weights of a stage: an operator that reads or writes a part of the
block accesses each tensor that the part overlaps.

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
    """Kind of a memory event."""

    MALLOC = "malloc"
    FREE = "free"
    READ = "read"
    WRITE = "write"

    # Enum's own is a Python function, and events are hashed by the million
    __hash__ = str.__hash__


class MemoryEvent(NamedTuple):
    """One event of one block.

    Args:
        block: Number of the block, counted from 0 in the order in which blocks are first seen.
        num_bytes: Bytes of the block; of a read or write of a named tensor, bytes of the tensor.
        op: Operator, such as "aten::mm"; "" for a block that existed before the trace, and for a
            free.
        time: Seconds since the trace began.
        layer: Number of the model's block that runs; -1 for none.
        name: Purpose of a block that existed before the trace, such as "weights 0" or "batch"; of a
            read or write, the tensor in the block, such as
            "weights/0/blocks.3.mlp.up.weight", or "" for the whole block.
    """

    what: What
    block: int
    num_bytes: int
    op: str
    time: float
    layer: int = -1
    name: str = ""


class WrittenEvents(Sequence[MemoryEvent]):
    """Events as a JSON list from a file, parsed only when accessed."""

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
    """The events of one action, or between two actions. `step` counts from 1; `action` is printed,
    or "" between two. Units: seconds."""

    step: int
    action: str
    start: float
    end: float
    events: Sequence[MemoryEvent]


@dataclass(frozen=True)
class Header:
    """The subject of a trace.

    Args:
        place: The rank's index on each axis.
        predicted: Whether the trace is a prediction, whose times have no meaning.
        more: Plain values that the writer wants to keep (the configuration).
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
    """A read or a write of a tensor in a block; "": of the whole block. Units: seconds, bytes."""

    time: float
    writes: bool
    op: str
    action: str
    step: int
    tensor: str
    num_bytes: int


@dataclass(slots=True)
class Life:
    """A block from malloc to free.

    Args:
        died: Time of the free; None while it lives.
        layer: Number of the model's block that allocated it, or -1.

    Actions are the ones that allocated and freed it; steps count from 1. Units: bytes, seconds.
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
        """Return the life that a malloc begins."""
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

    def intervals(self) -> Iterator[tuple[Access, Access]]:
        """Yield the ends of the access intervals: two consecutive accesses of the same tensor.

        What one operator reads and writes, it accesses at one time: that is no interval.
        """
        last: dict[str, Access] = {}
        for access in self.accesses:
            before = last.get(access.tensor)
            if before is not None and access.time > before.time:
                yield before, access
            last[access.tensor] = access

    def end(self, event: MemoryEvent, span: Span) -> None:
        """End the life with a free."""
        self.died = event.time
        self.died_in = span.action
        self.died_step = span.step

    @property
    def category(self) -> Category:
        """Purpose of the block, from the actions that allocated and freed it."""
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
    """Yield every block's life: freed blocks in the order of their frees, then living ones.

    Needs memory for living blocks and their kept accesses, so a long trace should select few steps,
    such as `range(3, 6)`.

    Args:
        spans: The trace.
        steps: Steps whose accesses are kept; None for all.
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
                    Access(
                        event.time,
                        event.what is What.WRITE,
                        event.op,
                        span.action,
                        span.step,
                        event.name,
                        event.num_bytes,
                    )
                )
    yield from living.values()
