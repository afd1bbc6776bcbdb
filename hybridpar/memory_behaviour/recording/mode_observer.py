"""Observe what operators do to blocks of memory as a dispatch mode, for ghosts and for real tensors
on any device.

While a mode is active, autograd allocates a new tensor for sums of two gradients that it otherwise
makes in place; this mode makes them in place.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.autograd import QuietMode
from hybridpar.memory_behaviour.events import MemoryEvent, What
from hybridpar.prediction.ghost import Ghost, cast_bytes, is_in_place_without_a_mode, tensors_in
from hybridpar.prediction.operators import Operator, OperatorAccess, adds_nothing, in_place_form

Reading = Callable[[Callable[[Any], float]], Sequence[MemoryEvent]]
"""A function that returns events, given a function from a clock's stamp to seconds."""


class _Block(weakref.ref[Any]):
    """A watched owner of memory. `key`: identity of the owner. `number`, `num_bytes`: as in the
    trace."""

    __slots__ = ("key", "num_bytes", "number")
    key: int
    number: int
    num_bytes: int


class _Part(NamedTuple):
    """Bytes [start, stop) of a block, which hold the tensor `name`."""

    start: int
    stop: int
    name: str


_Tensor = tuple[int, _Part | None]
"""A tensor: the owner of its block, and its part of the block; None: the whole block."""
_Raw = tuple[What, int, int, str, Any, int, str]
"""A memory event whose time is a clock's stamp."""


class ModeObserver(QuietMode):
    """An Observer (see recorder.py). `now` returns stamps of a clock."""

    def __init__(self, now: Callable[[], Any]):
        super().__init__()
        self._layer = -1
        self._is_paused = False
        # by identity, because torch hashes operators in Python
        self._operators: dict[int, Operator] = {}
        self._blocks: dict[int, _Block] = {}  # by owner
        self._freed: deque[_Block] = deque()  # by other threads
        self._parts: dict[int, _Parts] = {}  # by owner
        self._thread = get_ident()
        self._next = 0
        self._events: list[_Raw] = []
        self._now = now

    def enter(self) -> None:
        self._thread = get_ident()
        self.__enter__()

    def exit(self) -> None:
        self.__exit__(None, None, None)

    def enter_layer(self, layer: int) -> None:
        """Note which block of the model runs; see Observer."""
        self._layer = layer

    def pause(self, paused: bool) -> None:
        """Stop or resume observing operators; see Observer."""
        self._is_paused = paused

    def adopt(self, name: str, tensors: list[Tensor]) -> None:
        self._note_freed()
        now = self._now()
        born: dict[int, int] | None = None
        for key, (tensor, num_bytes) in _owned(tensors).items():
            if key not in self._blocks:
                self._malloc(key, tensor, num_bytes, "", now, name)
                continue
            if born is None:
                born = {
                    event[1]: i for i, event in enumerate(self._events) if event[0] is What.MALLOC
                }
            if (place := born.get(self._blocks[key].number)) is not None:
                self._events[place] = (*self._events[place][:-1], name)

    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        if not self._is_paused:
            self._access(op, OperatorAccess(list(reads), list(writes)), [])

    def resized(self, name: str, tensor: Tensor) -> None:
        self._note_freed()
        key = id(_owner(tensor))
        now = self._now()
        if (block := self._blocks.pop(key, None)) is not None:
            self._free(block, now)
        if num_bytes := _num_bytes(tensor):
            self._malloc(key, tensor, num_bytes, "", now, name)

    def name_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            owner = _owner(tensor)
            known = self._parts.get(id(owner))
            if known is None or known.owner() is not owner:
                known = self._parts[id(owner)] = _Parts(owner)
            if tensor.numel():
                known.add(_Part(*_extent(tensor), name))

    def take(self) -> Reading | None:
        self._note_freed()
        # any statement here may free blocks, whose finalizers add events
        events = self._events
        self._events = []
        return (lambda since: _read(events, since)) if events else None

    def close(self) -> None:
        self._blocks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        operator = self._operator(func)
        if operator.is_view:
            return func(*args, **kwargs)
        in_place = operator.is_sum and is_in_place_without_a_mode(func, args)
        out = func(*args, **kwargs)
        made = [out] if isinstance(out, Tensor) else tensors_in(out)
        if in_place or (operator.is_sum and adds_nothing(*args[:2])):
            self._move(args[0], made[0])
            if not adds_nothing(*args[:2]):
                operator = self._operator(in_place_form(func))
                self._access(operator.name, operator.use((made[0], *args[1:]), kwargs), made)
        else:
            scratch = (
                cast_bytes(func, tensors_in(args)) if operator.casts and _is_on_cpu(args) else 0
            )
            self._access(
                operator.name, operator.use(args, kwargs), made, scratch, fresh=operator.is_fresh
            )
        return out

    def _operator(self, func: Any) -> Operator:
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        return operator

    def _access(
        self,
        op: str,
        use: OperatorAccess,
        made: list[Tensor],
        scratch: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        self._note_freed()
        now = self._now()
        reads = _owned(use.reads)
        writes = _owned(use.writes)
        made_here = _owned(made)
        blocks = self._blocks
        layer = self._layer
        for given in (reads, writes, made_here):
            for key, (tensor, num_bytes) in given.items():
                block = blocks.get(key)
                if block is None:
                    if given is not made_here:
                        self._malloc(key, tensor, num_bytes, "", now, "other")
                elif block.num_bytes != num_bytes:  # the storage was resized
                    self._free(blocks.pop(key), now)
                    self._malloc(key, tensor, num_bytes, op, now)
        new = [key for key in made_here if key not in blocks]
        if not new and not writes and made:
            return  # a view
        for key in new:
            self._malloc(key, *made_here[key], op, now)
        if scratch:
            for what in (
                What.MALLOC,
                What.WRITE,
                What.READ,
                What.FREE,
            ):  # a block that only this operator uses
                self._events.append((what, self._next, scratch, op, now, layer, ""))
            self._next += 1
        note = self._events.append
        for what, given, tensors in (
            (What.READ, reads, use.reads),
            (What.WRITE, writes, use.writes),
        ):
            for key, part in self._accessed(given, tensors):
                block = blocks[key]
                num_bytes = block.num_bytes if part is None else part.stop - part.start
                name = "" if part is None else part.name
                note((what, block.number, num_bytes, op, now, layer, name))
        for key in () if fresh else new:
            block = blocks[key]
            note((What.WRITE, block.number, block.num_bytes, op, now, layer, ""))

    def _accessed(self, owned: Collection[int], tensors: Iterable[Tensor]) -> Iterable[_Tensor]:
        """Return the tensors of an operator, each once.

        Args:
            owned: The owners of their blocks.
            tensors: Its arguments.
        """
        if self._parts.keys().isdisjoint(owned):
            return [(key, None) for key in owned]
        found: dict[_Tensor, None] = {}
        for tensor in _dense(tensors):
            owner = _owner(tensor)
            key = id(owner)
            if key not in owned:
                continue
            known = self._parts.get(key)
            parts: list[_Part] = []
            if known is not None and known.owner() is owner:
                parts = known.overlapping(*_extent(tensor))
            for part in parts or (None,):
                found[key, part] = None
        return found

    def _move(self, old: Tensor, new: Tensor) -> None:
        """Assign the block of `old` to `new` from now on."""
        key = id(_owner(old))
        other = id(_owner(new))
        if key not in self._blocks:
            self._malloc(key, old, _num_bytes(old), "", self._now(), "other")
        if key != other:
            block = self._blocks.pop(key)
            self._watch(block.number, block.num_bytes, other, new)

    def _malloc(
        self, key: int, tensor: Tensor, num_bytes: int, op: str, now: Any, name: str = ""
    ) -> None:
        self._watch(self._next, num_bytes, key, tensor)
        self._events.append((What.MALLOC, self._next, num_bytes, op, now, self._layer, name))
        self._next += 1

    def _free(self, block: _Block, now: Any) -> None:
        self._events.append((What.FREE, block.number, block.num_bytes, "", now, self._layer, ""))

    def _watch(self, number: int, num_bytes: int, key: int, tensor: Tensor) -> None:
        block = self._blocks[key] = _Block(_owner(tensor), self._gone)
        block.key = key
        block.number = number
        block.num_bytes = num_bytes

    def _gone(self, block: _Block) -> None:
        if self._blocks.get(block.key) is not block:
            return
        del self._blocks[block.key]
        if get_ident() == self._thread:
            self._note_freed()
            self._free(block, self._now())
        else:
            self._freed.append(block)

    def _note_freed(self) -> None:
        """Record the frees that other threads have made since."""
        while self._freed:
            self._free(self._freed.popleft(), self._now())


class _Parts:
    """The named tensors of a block, in the order of their places."""

    def __init__(self, owner: Any):
        self.owner = weakref.ref(owner)
        self._parts: list[_Part] = []
        self._stops: list[int] = []

    def add(self, part: _Part) -> None:
        index = bisect_right(self._stops, part.start)
        self._parts.insert(index, part)
        self._stops.insert(index, part.stop)

    def overlapping(self, start: int, stop: int) -> list[_Part]:
        """Return the parts that overlap bytes [start, stop)."""
        found = []
        for number in range(bisect_right(self._stops, start), len(self._parts)):
            part = self._parts[number]
            if part.start >= stop:
                break
            found.append(part)
        return found


def _read(events: list[_Raw], since: Callable[[Any], float]) -> list[MemoryEvent]:
    stamp = None
    seconds = 0.0
    found = []
    for what, block, num_bytes, op, time, layer, name in events:
        if time is not stamp:
            stamp = time
            seconds = since(time)
        found.append(MemoryEvent(what, block, num_bytes, op, seconds, layer, name))
    return found


def _owner(tensor: Tensor) -> Any:
    """Return the object that lives as long as the tensor's memory."""
    return tensor.block if isinstance(tensor, Ghost) else tensor.untyped_storage()


def _num_bytes(tensor: Tensor) -> int:
    return (
        tensor.block.num_bytes if isinstance(tensor, Ghost) else tensor.untyped_storage().nbytes()
    )


def _owned(tensors: Iterable[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """Return one tensor and the bytes for each block that takes memory, in order, by the block's
    owner."""
    found: dict[int, tuple[Tensor, int]] = {}
    for tensor in _dense(tensors):
        if num_bytes := _num_bytes(tensor):
            found[id(_owner(tensor))] = tensor, num_bytes
    return found


def _dense(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own, and the dense parts of sparse ones."""
    for tensor in tensors:
        if isinstance(tensor, Ghost) or (tensor.layout is torch.strided and not tensor.is_meta):
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield from _dense((tensor._indices(), tensor._values()))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its block that a tensor has, and the one after the last."""
    plain = tensor.meta if isinstance(tensor, Ghost) else tensor
    item = plain.itemsize
    start = int(plain.storage_offset()) * item
    if not plain.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    return start, start + (int(last) + 1) * item


def _is_on_cpu(args: Any) -> bool:
    """Return whether an operator makes copies for its arithmetic as a CPU does."""
    first = args[0]
    return (
        not first.block.tracker.is_cuda if isinstance(first, Ghost) else first.device.type == "cpu"
    )
