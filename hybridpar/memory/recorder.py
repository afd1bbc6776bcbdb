"""Records what every operator does to every block of memory, of real tensors as of ghosts.

    recorder = Recorder(write)
    with recorder:
        loss = model(x).sum()
        loss.backward()
    recorder.close()                     # write() got Spans: mallocs, frees, reads and writes, in order

It stands between autograd and the operators, so it sees those of a backward, fused ones, torch's lists of tensors
(foreach), and our own in C++ and Triton, whose schemas say what they write. Views are no access. Scratch space inside
an operator is not seen. An asynchronous message reads and writes when it is started.

While a mode is active, autograd makes sums of two gradients anew which else it makes in place: here they are in place.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.memory.events import MemoryEvent, Span, What
from hybridpar.memory.ghost import Ghost, cast_bytes, is_in_place_without_a_mode, tensors_in
from hybridpar.pipeline.plan.action import PER_BATCH, Action
from hybridpar.pipeline.run import recording

_FRESH = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize",
})
"""Operators that write nothing to what they make."""
_OVERWRITES = frozenset({"copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "_foreach_copy",
                         "_foreach_zero"})
"""Operators that write over their first argument without reading it."""


class Clock(Protocol):
    """Says what time it is; what `now` returns may be read off, as seconds, once it `is_over`."""

    def now(self) -> Any: ...
    def read(self, stamp: Any) -> float: ...
    def is_over(self, stamp: Any) -> bool: ...


class _HostClock:
    now = staticmethod(time.perf_counter)

    def read(self, stamp: float) -> float:
        return stamp

    def is_over(self, stamp: float) -> bool:
        return True


class DeviceClock:
    """The clock of the current CUDA stream."""

    def __init__(self) -> None:
        self._clock = recording.DeviceClock()

    def now(self) -> torch.cuda.Event:
        return self._clock.now()

    def read(self, stamp: torch.cuda.Event) -> float:
        return self._clock.read(stamp)[0]

    def is_over(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()


HOST_CLOCK: Clock = _HostClock()


class _Use(NamedTuple):
    """The tensors that an operator reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]


class Recorder(TorchDispatchMode):
    """Hands spans of memory events to `write`, one when the next begins, while it is entered.

    `action`: says what runs, asked at each event. None: nothing that has a name, and `step` says in which step.
    `num_microbatches`: of a step; an action tells its step by it. `clock`: a device's tells when an operator's turn
    came; its spans are handed over once that is known, as nobody waits for it.
    """

    def __init__(self, write: Callable[[Span], object], action: Callable[[], Action | None] = lambda: None,
                 num_microbatches: int = 1, clock: Clock = HOST_CLOCK):
        super().__init__()
        self.layer = -1
        """Number of the model's block that runs, as the owner sets it; -1: none."""
        self.paused = self.is_active = False
        """Whether operators are let pass; whether it is entered."""
        self._write, self._action, self._num_microbatches = write, action, num_microbatches
        self._step = 1
        self._running: Action | None = None
        self._spans: list[Span] = []
        self._numbers: dict[int, int] = {}  # block by storage
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._next = 0
        self._events: list[MemoryEvent] = []
        self._clock = clock
        self._begun = self._start = clock.now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: to let the compiler know would first import it, which takes seconds."""
        return False

    def __enter__(self) -> Recorder:
        self.is_active = True
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self.is_active = False
        super().__exit__(*args)

    def adopt(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Names blocks that are there, from now on in the trace."""
        self._look()
        for tensor in tensors:
            if _key(tensor) not in self._numbers:
                self._malloc(tensor, "", self._clock.now(), name)

    def close(self) -> None:
        """Hands over what is left. Blocks are not watched any more."""
        self._watched.clear()
        self._end_span()
        self._hand_over(finish=True)

    @property
    def step(self) -> int:
        """Number of the step that runs, from 1. Setting it ends a span."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._end_span()
        self._step = step

    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operator on tensors that dispatch does not see."""
        if not self.paused:
            self._enter()
            self._access(op, _Use(list(reads), list(writes)), [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        self._enter()
        in_place = is_in_place_without_a_mode(func)
        out = func(*args, **kwargs)
        made = tensors_in(out)
        given = tensors_in(args)
        dense = [t for t in given if t.layout is torch.strided]
        if in_place or (dense and len(dense) < len(given)):  # a sum; a sparse part of it is empty (nn.matmul.nothing)
            self._move(dense[0], made[0], _name(func), reads=len(dense) == len(given))
        elif func is torch.ops.aten.lift_fresh.default:  # the last step of torch.tensor
            self._access(_name(func), _Use([], []), made)
        else:
            self._access(_name(func), _use(func, args, kwargs), made, cast_bytes(func, given),
                         fresh=_operation(func) in _FRESH)
        return out

    def _access(self, op: str, use: _Use, made: list[Tensor], scratch: int = 0, *, fresh: bool = False) -> None:
        now, reads, writes = self._clock.now(), _blocks(use.reads), _blocks(use.writes)
        for key, tensor in [*reads.items(), *writes.items()]:
            if key not in self._numbers:
                self._malloc(tensor, "", now, "other")
        new = {key: tensor for key, tensor in _blocks(made).items() if key not in self._numbers}
        if not new and not writes and made:
            return  # a view
        for tensor in new.values():
            self._malloc(tensor, op, now)
        if scratch:
            self._scratch(scratch, op, now)
        for key in reads:
            self._note(What.READ, key, op, now)
        for key in [*writes, *(() if fresh else new)]:
            self._note(What.WRITE, key, op, now)

    def _move(self, old: Tensor, new: Tensor, op: str, *, reads: bool) -> None:
        """`new` is `old`, written over; without `reads`, nothing was added."""
        now, key, other = self._clock.now(), _key(old), _key(new)
        if key not in self._numbers:
            self._malloc(old, "", now, "other")
        if key != other:
            number, size = self._numbers.pop(key), self._sizes.pop(key)
            del self._watched[key]
            self._numbers[other], self._sizes[other] = number, size
            self._watch(other, new)
        if reads:
            self._note(What.READ, other, op, now)
            self._note(What.WRITE, other, op, now)

    def _malloc(self, tensor: Tensor, op: str, now: Any, name: str = "") -> None:
        key = _key(tensor)
        self._numbers[key], self._sizes[key] = self._next, _num_bytes(tensor)
        self._next += 1
        self._watch(key, tensor)
        self._note(What.MALLOC, key, op, now, name)

    def _scratch(self, num_bytes: int, op: str, now: Any) -> None:
        """A block that only this operator has."""
        for what in (What.MALLOC, What.WRITE, What.READ, What.FREE):
            self._events.append(MemoryEvent(what, self._next, num_bytes, op, now, self.layer))
        self._next += 1

    def _watch(self, key: int, tensor: Tensor) -> None:
        def gone(_: object) -> None:
            if key in self._watched:
                del self._watched[key]
                self._look()
                self._events.append(MemoryEvent(
                    What.FREE, self._numbers.pop(key), self._sizes.pop(key), "", self._clock.now(), self.layer))

        self._watched[key] = weakref.ref(_owner(tensor), gone)

    def _note(self, what: What, key: int, op: str, now: Any, name: str = "") -> None:
        self._events.append(MemoryEvent(what, self._numbers[key], self._sizes[key], op, now, self.layer, name))

    def _enter(self) -> None:
        """An operator begins."""
        self._look()
        if self._spans:
            self._hand_over()

    def _look(self) -> None:
        """Ends the span, if another action runs now. Writes nothing: it is also called where a block is given back."""
        if (action := self._action()) is not self._running:
            self._end_span()
            self._running = action
            if action is not None:
                number = action.microbatch
                self._step = 1 + (number if action.kind in PER_BATCH else number // self._num_microbatches)

    def _end_span(self) -> None:
        now = self._clock.now()
        if self._events:
            events, self._events = self._events, []
            name = "" if self._running is None else str(self._running)
            self._spans.append(Span(self._step, name, self._start, now, events))
        self._start = now

    def _hand_over(self, *, finish: bool = False) -> None:
        read = self._clock.read
        while self._spans and (finish or self._clock.is_over(self._spans[0].end)):
            span = self._spans.pop(0)
            begun = read(self._begun)
            events = [event._replace(time=read(event.time) - begun) for event in span.events]
            self._write(Span(span.step, span.action, read(span.start) - begun, read(span.end) - begun, events))


def _owner(tensor: Tensor) -> Any:
    """The object that lives as long as the tensor's memory."""
    return tensor.block if isinstance(tensor, Ghost) else tensor.untyped_storage()


def _key(tensor: Tensor) -> int:
    """A number of the tensor's memory, while that lives."""
    return id(tensor.block) if isinstance(tensor, Ghost) else tensor.untyped_storage()._cdata


def _num_bytes(tensor: Tensor) -> int:
    return tensor.block.num_bytes if isinstance(tensor, Ghost) else tensor.untyped_storage().nbytes()


def _blocks(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A tensor for each block that takes memory, in order."""
    return {_key(t): t for t in tensors if t.layout is torch.strided and t.device.type != "meta" and _num_bytes(t)}


@cache
def _name(func: Any) -> str:
    name: str = func.name().partition(".")[0]
    return name


@cache
def _operation(func: Any) -> str:
    return _name(func).partition("::")[2].rstrip("_")


@cache
def _roles(func: Any) -> tuple[tuple[str, bool, bool], ...]:
    """For each argument: its name, whether the operator reads it, and whether it writes it."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (argument.is_out or (position == 0 and _operation(func) in _OVERWRITES)))
        found.append((argument.name, reads, writes))
    return tuple(found)


def _use(func: Any, args: Any, kwargs: Mapping[str, Any]) -> _Use:
    if func.namespace == "c10d":
        return message_use(_operation(func), args)
    use = _Use([], [])
    for i, (name, reads, writes) in enumerate(_roles(func)):
        value = args[i] if i < len(args) else kwargs.get(name)
        if value is None or isinstance(value, (int, float, str)):
            continue
        tensors = tensors_in(value)
        if reads:
            use.reads.extend(tensors)
        if writes:
            use.writes.extend(tensors)
    return use


def message_use(operation: str, args: Any) -> _Use:
    """The use of torch's own collectives and messages, whose schemas do not say it."""
    first = tensors_in(args[0])
    if operation == "send":
        return _Use(first, [])
    if operation.startswith("recv"):
        return _Use([], first)
    if operation in ("_allgather_base", "alltoall_base"):
        return _Use(tensors_in(args[1]), first)
    return _Use(first, first)
