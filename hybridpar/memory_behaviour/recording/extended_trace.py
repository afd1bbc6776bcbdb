"""A trace of many micro-batches from a trace of few: equal micro-batches are traced once.

    short   F0 F1 | F2 B0 F3 B1 F4 B2 F5 B3 | B4 B5
    long    F0 F1 | F2 B0 F3 B1 F4 B2 .. (as F4 B2) .. F8 B6 F9 B7 | B8 B9

What an action does to blocks of memory depends on what the rank has in flight, and so on the
micro-batch's place in its batch only near the batch's ends. In between every action does what the
one before it of its kind did, to blocks that are as many micro-batches away. So blocks are named by
the action that allocated them, relative to the action that accesses them, and the events of the
long trace are the short one's with these names resolved again.

The short trace must show that its micro-batches in between are alike, the long plan must have every
action behind the same one as the short plan, and every name must resolve to a living block.
Otherwise there is no long trace.

If the pipeline drains, batches in between are alike, too: each begins with the same state and with
the unfinished sends of the batch before. Then the short trace has three batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hybridpar.memory_behaviour.analysis.excerpt import Times, retimed
from hybridpar.memory_behaviour.events import MemoryEvent, Span, What
from hybridpar.schedules.action import Action, parse_action
from hybridpar.schedules.kinds import PER_BATCH, Kind

Place = tuple[int, int]
"""Batch of an action, and the micro-batch's number in it; -1 for an action of the batch."""


class NotAlikeError(Exception):
    """The short trace does not show what the long one would be."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """How batches and their micro-batches are numbered in the short trace and in the long one.

    Attributes:
        short: Micro-batches of a short batch.
        long: Micro-batches of a long batch.
        edge: Micro-batches at each end of a batch that are unlike those in between.
        period: Micro-batches after which actions repeat.
        batches: Batches of the short trace and of the long one, whose first and last batches are
            unlike those in between.
    """

    short: int
    long: int
    edge: int
    period: int
    batches: tuple[int, int] = (1, 1)

    @classmethod
    def to(cls, long: int, edge: int, period: int) -> Stretch | None:
        """Return the shortest stretch of micro-batches that shows a repetition; None if it would
        not be shorter."""
        edge = -(-edge // period) * period
        least = 2 * edge + 2 * period
        short = least + (long - least) % period
        return cls(short, long, edge, period) if short < long else None

    def short_number(self, number: int) -> int:
        """Return the number in a short batch of the micro-batch that is like `number` in a long
        one."""
        if number < self.edge:
            return number
        if number >= self.long - self.edge:
            return number - self.long + self.short
        return self.edge + (number - self.edge) % self.period

    def short_batch(self, batch: int) -> int:
        """Return the batch of the short trace that is like `batch` of the long one."""
        short, long = self.batches
        if short == long or not batch:
            return batch
        return short - 1 if batch == long - 1 else 1


_Maker = tuple[str, int, int]
_OUTSIDE: _Maker = ("", 0, 0)
_END: _Maker = ("end", 0, 0)
"""Make what exists before the first action, and what is allocated after the last one."""


class _Origin(Enum):
    """Zero of the numbers of micro-batches in names."""

    OWN = "the micro-batch of the action that accesses"
    START = "the first micro-batch of the batch"
    END = "the end of the batch"
    BATCH = "an action of the batch allocated it, which has no micro-batch"


class _Owner(NamedTuple):
    """The action that allocated a block, seen from an action that accesses it.

    Attributes:
        origin: What `number` counts from.
        maker: Kind, stage and part.
        batches: Its batch, counted from the batch of the action that accesses.
        number: Its micro-batch.
        is_first: It belongs to the first batch, and the one that accesses to a later one.
    """

    origin: _Origin
    maker: _Maker
    batches: int
    number: int
    is_first: bool = False


_Event = tuple[What, int, int, int, str, float, int, str]
"""A MemoryEvent; in place of the block number of its owner in the template, and the block's number
among those that the owner allocated; in place of the time the operator's number in the action."""


class _Template(NamedTuple):
    """The events of an action: the number of its operators, owners of blocks, and events."""

    num_operators: int
    owners: tuple[_Owner, ...]
    events: tuple[_Event, ...]

    def is_like(self, other: _Template) -> bool:
        """Return whether both do the same."""
        return self == other


def extend(
    spans: Iterable[Span],
    short: Sequence[Action],
    long: Sequence[Action],
    stretch: Stretch,
    times: Times,
) -> list[Span]:
    """Return the long trace of a rank, at these times, as `retimed` has them.

    Args:
        spans: The short trace of the same rank.
        short: The rank's plan of that trace.
        long: The rank's plan for the long batches.
        stretch: How the two number their micro-batches.
        times: Start and end of each action of the long plan.

    Raises:
        NotAlikeError: The traces cannot be compared.
    """
    known = _Templates(spans, short, stretch)
    if len(set(known.actions)) != len(short):
        raise NotAlikeError("an action comes twice")
    _check_order(short, long, stretch)
    writer = _Writer(stretch.long, times)
    for span in known.before:
        writer.write_unchanged(span)
    for action in long:
        place = _place(action, stretch.long)
        writer.write(action, place, known.of(action, place))
    for template, step in known.after:
        writer.write_end(template, step)
    return writer.spans


def _place(action: Action, num_microbatches: int) -> Place:
    if action.kind in PER_BATCH:
        return action.microbatch, -1
    batch, number = divmod(action.microbatch, num_microbatches)
    return batch, number


_Key = tuple[Kind, int, int, int, int]
"""Kind, stage, part, batch and number of an action in the short plan."""


def _key(action: Action, place: Place) -> _Key:
    return action.kind, action.stage, action.part, *place


def _check_order(short: Sequence[Action], long: Sequence[Action], stretch: Stretch) -> None:
    """Check that each action of the long plan follows the same action as in the short plan.

    Raises: NotAlikeError.
    """
    links = dict(_links(short, stretch.short))
    for (kind, stage, part, batch, number), link in _links(long, stretch.long):
        place = stretch.short_batch(batch), number if number < 0 else stretch.short_number(number)
        key = (kind, stage, part, *place)
        before = links.get(key)
        if before is None or not before.is_like(link, stretch):
            raise NotAlikeError(f"{key} follows another action than in the short plan")


class _Link(NamedTuple):
    """The action before another one.

    Attributes:
        maker: Its kind, stage and part.
        batches: Its batch, counted from the other one's.
        number: Its micro-batch.
        own: The other one's micro-batch.
    """

    maker: _Maker
    batches: int
    number: int
    own: int

    def is_like(self, long: _Link, stretch: Stretch) -> bool:
        """Return whether this link of the short plan is what `long` is of the long one: as many
        micro-batches back, or at the same place near an end of its batch.
        """
        if self[:2] != long[:2]:
            return False
        if self.number < 0 or long.number < 0:
            return self.number == long.number
        if not self.batches and self.own >= 0 and self.number - self.own == long.number - long.own:
            return True
        return self.number == stretch.short_number(long.number)


def _links(plan: Sequence[Action], num_microbatches: int) -> Iterable[tuple[_Key, _Link]]:
    """Yield each action of a plan with its link."""
    maker = _OUTSIDE
    before: Place = (0, -1)
    for action in plan:
        place = _place(action, num_microbatches)
        link = _Link(maker, before[0] - place[0], before[1], place[1])
        yield _key(action, place), link
        maker = (action.kind.value, action.stage, action.part)
        before = place


class _Templates:
    """The templates of the short trace's actions.

    Attributes:
        before: Spans before the first action.
        after: What comes behind the last action, with its step.
        actions: The keys of the actions, in order.
    """

    def __init__(self, spans: Iterable[Span], short: Sequence[Action], stretch: Stretch):
        self.before: list[Span] = []
        self.after: list[tuple[_Template, int]] = []
        self.actions = [_key(action, _place(action, stretch.short)) for action in short]
        self._stretch = stretch
        self._found: dict[_Key, _Template] = {}
        self._checked: set[_Key] = set()
        self._born: dict[int, tuple[_Maker, Place, int]] = {}
        """Record what allocated each block: the action, its place, and the block's index."""
        planned = set(self.actions)
        last: Place = (0, -1)
        for span in spans:
            if span.action:
                action = parse_action(span.action)
                last = _place(action, stretch.short)
                key = _key(action, last)
                if key not in planned or key in self._found:
                    raise NotAlikeError(f"{action} is not in the plan")
                self._found[key] = self._template(span, (action.kind.value, *key[1:3]), last)
            elif self._found:
                end = (last[0], -1)
                self.after.append((self._template(span, _END, end), span.step))
            else:
                self.before.append(span)
                self._adopt(span)

    def of(self, action: Action, place: Place) -> _Template:
        """Return what an action of the long plan does. Raises: NotAlikeError."""
        batch = self._stretch.short_batch(place[0])
        number = place[1]
        if number < 0:
            return self._found.get(_key(action, (batch, number)), _NOTHING)
        key = _key(action, (batch, self._stretch.short_number(number)))
        found = self._found.get(key, _NOTHING)
        if self._is_between(key[4]) and key not in self._checked:
            # all of the short batch that stand for others must be alike
            for other in range(
                key[4], self._stretch.short - self._stretch.edge, self._stretch.period
            ):
                if not found.is_like(self._found.get((*key[:4], other), _NOTHING)):
                    raise NotAlikeError(f"{action} differs from micro-batch to micro-batch")
            self._checked.add(key)
        return found

    def _is_between(self, number: int) -> bool:
        edge = self._stretch.edge
        return edge <= number < self._stretch.short - edge

    def _adopt(self, span: Span) -> None:
        for event in span.events:
            if event.what is What.MALLOC:
                self._born[event.block] = _OUTSIDE, (0, -1), event.block
            elif event.what is What.FREE:
                raise NotAlikeError("a block is freed before the first action")

    def _template(self, span: Span, maker: _Maker, place: Place) -> _Template:
        events = []
        owners: dict[_Owner, int] = {}
        count = 0
        moments = {
            time: float(i)
            for i, time in enumerate(dict.fromkeys(event.time for event in span.events))
        }
        for what, block, num_bytes, op, time, layer, name in span.events:
            if what is What.MALLOC:
                self._born[block] = maker, place, count
                count += 1
            if block not in self._born:
                raise NotAlikeError(f"block {block} was not allocated")
            made_by, born, nth = self._born[block]
            owner = self._owner(made_by, born, place)._replace(is_first=born[0] == 0 < place[0])
            number = owners.setdefault(owner, len(owners))
            events.append((what, number, nth, num_bytes, op, moments[time], layer, name))
            if what is What.FREE:
                del self._born[block]
        return _Template(len(moments), tuple(owners), tuple(events))

    def _owner(self, maker: _Maker, born: Place, place: Place) -> _Owner:
        batch, number = born
        if maker == _OUTSIDE:
            return _Owner(_Origin.BATCH, maker, 0, -1)
        batches = batch - place[0]
        if number < 0:
            return _Owner(_Origin.BATCH, maker, batches, -1)
        if batches == 0 and place[1] >= 0 and abs(number - place[1]) <= self._stretch.edge:
            return _Owner(_Origin.OWN, maker, 0, number - place[1])
        if number < self._stretch.edge:
            return _Owner(_Origin.START, maker, batches, number)
        if self._is_between(number):
            raise NotAlikeError("a block of a micro-batch in between outlives its batch")
        return _Owner(_Origin.END, maker, batches, number - self._stretch.short)


_NOTHING = _Template(0, (), ())


class _Writer:
    """Writes the long trace. Blocks are numbered in the order of their allocation."""

    def __init__(self, num_microbatches: int, times: Times):
        self.spans: list[Span] = []
        self._num_microbatches = num_microbatches
        self._times = times
        self._now = 0.0
        self._next = 0
        self._last_batch = 0
        self._blocks: dict[tuple[_Maker, Place], dict[int, int]] = defaultdict(dict)
        """Living blocks by the action that allocated them, and by their index."""

    def write_unchanged(self, span: Span) -> None:
        """Write a span before the first action."""
        for event in span.events:
            if event.what is What.MALLOC:
                self._blocks[_OUTSIDE, _NOWHERE][event.block] = event.block
                self._next = max(self._next, event.block + 1)
        self.spans += retimed([span], {})

    def write(self, action: Action, place: Place, template: _Template) -> None:
        """Write an action. Raises: NotAlikeError if it accesses a block that is not alive."""
        self._last_batch = max(self._last_batch, place[0])
        if not template.events:
            return
        start, end = self._times.get(
            (action.kind, action.stage, action.microbatch), (self._now, self._now)
        )
        start = max(start, self._now)
        self._now = max(end, self._now)
        self._write(str(action), 1 + place[0], place, template, start)

    def write_end(self, template: _Template, step: int) -> None:
        """Write what comes behind the last action, which has events."""
        self._write("", step, (self._last_batch, -1), template, self._now)

    def _write(
        self, action: str, step: int, place: Place, template: _Template, start: float
    ) -> None:
        each = (self._now - start) / template.num_operators
        owners = [self._blocks_of(owner, place) for owner in template.owners]
        events = []
        for what, owner, nth, num_bytes, op, time, layer, name in template.events:
            blocks = owners[owner]
            if what is _MALLOC:
                block = blocks[nth] = self._next
                self._next = block + 1
            elif nth not in blocks:
                raise NotAlikeError(f"{action} accesses a block that is not alive")
            else:
                block = blocks.pop(nth) if what is _FREE else blocks[nth]
            now = start + (time + 0.5) * each
            events.append(MemoryEvent(what, block, num_bytes, op, now, layer, name))
        self.spans.append(Span(step, action, start, self._now, events))

    def _blocks_of(self, owner: _Owner, place: Place) -> dict[int, int]:
        """Return the living blocks of an owner, seen from an action at `place`, by their index.

        Where the owner's action has none in its own batch, it allocated them in the first batch
        alone, for all later ones.
        """
        born = self._resolve(owner, place)
        found = self._blocks[owner.maker, born]
        if owner.is_first and not found:
            return self._blocks[owner.maker, (0, born[1])]
        return found

    def _resolve(self, owner: _Owner, place: Place) -> Place:
        """Return the place of an owner, seen from an action at `place`."""
        if owner.maker == _OUTSIDE:
            return _NOWHERE
        number = owner.number
        if owner.origin is _Origin.OWN:
            number += place[1]
        elif owner.origin is _Origin.END:
            number += self._num_microbatches
        return place[0] + owner.batches, number


_NOWHERE: Place = (0, -1)
_MALLOC = What.MALLOC
_FREE = What.FREE
