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
from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.memory.events import MemoryEvent, Span, What
from hybridpar.memory.ghost import Ghost, cast_bytes, is_in_place_without_a_mode, tensors_in
from hybridpar.memory.operators import Operator, Use, adds_nothing
from hybridpar.pipeline.plan.action import PER_BATCH, PER_ITEM, Action
from hybridpar.pipeline.run import recording


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


class _Block(weakref.ref[Any]):
    """Watches the owner of memory. key: identity of that owner. number, num_bytes: as in the trace."""

    __slots__ = ("key", "num_bytes", "number")
    key: int
    number: int
    num_bytes: int


_Raw = tuple[What, int, int, str, Any, int, str]
"""A memory event whose time is a clock's stamp."""


class Recorder(TorchDispatchMode):
    """Hands spans of memory events to `write`, one when the next begins, while it is entered.

    `action`: says what runs, asked at each event. None: nothing that has a name, and `step` says in which step.
    `num_microbatches`: of a step; an action tells its step by it. `clock`: a device's tells when an operator's turn
    came; its spans are handed over once that is known, as nobody waits for it.

    Operators of the thread that enters it, and of the backwards that this one starts, are recorded.
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
        self._spans: list[tuple[int, str, Any, Any, list[_Raw]]] = []
        self._operators: dict[int, Operator] = {}  # by identity: torch hashes them in Python
        self._blocks: dict[int, _Block] = {}  # by owner
        self._freed: deque[_Block] = deque()  # by other threads
        self._thread = get_ident()
        self._next = 0
        self._events: list[_Raw] = []
        self._hooks: list[Any] = []
        self._clock, self._now = clock, clock.now
        self._begun = self._start = clock.now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: to let the compiler know would first import it, which takes seconds."""
        return False

    def __enter__(self) -> Recorder:
        self.is_active = True
        self._thread = get_ident()
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self.is_active = False
        super().__exit__(*args)

    def adopt(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Names blocks: from now on in the trace those that were there, from their birth those made in this span."""
        self._look()
        now = self._now()
        born: dict[int, int] | None = None
        for key, (tensor, num_bytes) in _owned(tensors).items():
            if key not in self._blocks:
                self._malloc(key, tensor, num_bytes, "", now, name)
                continue
            if born is None:
                born = {event[1]: i for i, event in enumerate(self._events) if event[0] is What.MALLOC}
            if (place := born.get(self._blocks[key].number)) is not None:
                self._events[place] = (*self._events[place][:-1], name)

    def adopt_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Names weights (buffers among them), gradients and the optimizer's state, after each of its steps again.

        What a step of the optimizer is the first to see has its name if it was made since `step` was last set.
        """
        def name(*_: object) -> None:
            self.adopt("weights", (*model.parameters(), *model.buffers()))
            self.adopt("gradients", (p.grad for p in model.parameters() if p.grad is not None))
            self.adopt("optimizer", tensors_in([tuple(state.values()) for state in optimizer.state.values()]))

        name()
        self._hooks.append(optimizer.register_step_post_hook(name))

    def close(self) -> None:
        """Hands over what is left. Blocks are not watched any more."""
        for hook in self._hooks:
            hook.remove()
        self._blocks.clear()
        self._note_freed()
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
            self._access(op, Use(list(reads), list(writes)), [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        if operator.is_view:
            return func(*args, **kwargs)
        self._enter()
        in_place = operator.is_sum and args[0].layout is torch.strided and is_in_place_without_a_mode(func)
        out = func(*args, **kwargs)
        made = [out] if isinstance(out, Tensor) else tensors_in(out)
        if in_place or (operator.is_sum and adds_nothing(*args[:2])):
            self._move(args[0], made[0], operator.name, reads=in_place)
        else:
            scratch = cast_bytes(func, tensors_in(args)) if operator.casts and _is_on_cpu(args) else 0
            self._access(operator.name, operator.use(args, kwargs), made, scratch, fresh=operator.is_fresh)
        return out

    def _access(self, op: str, use: Use, made: list[Tensor], scratch: int = 0, *, fresh: bool = False) -> None:
        now, reads, writes, made_here = self._now(), _owned(use.reads), _owned(use.writes), _owned(made)
        blocks, layer = self._blocks, self.layer
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
            for what in (What.MALLOC, What.WRITE, What.READ, What.FREE):  # a block that only this operator has
                self._events.append((what, self._next, scratch, op, now, layer, ""))
            self._next += 1
        note = self._events.append
        for key in reads:
            block = blocks[key]
            note((What.READ, block.number, block.num_bytes, op, now, layer, ""))
        for key in [*writes, *(() if fresh else new)]:
            block = blocks[key]
            note((What.WRITE, block.number, block.num_bytes, op, now, layer, ""))

    def _move(self, old: Tensor, new: Tensor, op: str, *, reads: bool) -> None:
        """`new` is `old`, written over; without `reads`, nothing was added."""
        now, key, other = self._now(), id(_owner(old)), id(_owner(new))
        if key not in self._blocks:
            self._malloc(key, old, _num_bytes(old), "", now, "other")
        block = self._blocks[key]
        if key != other:
            del self._blocks[key]
            self._watch(block.number, block.num_bytes, other, new)
        if reads:
            for what in (What.READ, What.WRITE):
                self._events.append((what, block.number, block.num_bytes, op, now, self.layer, ""))

    def _malloc(self, key: int, tensor: Tensor, num_bytes: int, op: str, now: Any, name: str = "") -> None:
        self._watch(self._next, num_bytes, key, tensor)
        self._events.append((What.MALLOC, self._next, num_bytes, op, now, self.layer, name))
        self._next += 1

    def _free(self, block: _Block, now: Any) -> None:
        self._events.append((What.FREE, block.number, block.num_bytes, "", now, self.layer, ""))

    def _watch(self, number: int, num_bytes: int, key: int, tensor: Tensor) -> None:
        block = self._blocks[key] = _Block(_owner(tensor), self._gone)
        block.key, block.number, block.num_bytes = key, number, num_bytes

    def _gone(self, block: _Block) -> None:
        if self._blocks.get(block.key) is not block:
            return
        del self._blocks[block.key]
        if get_ident() == self._thread:
            self._look()
            self._free(block, self._now())
        else:
            self._freed.append(block)

    def _enter(self) -> None:
        """An operator begins."""
        self._look()
        if self._spans:
            self._hand_over()

    def _look(self) -> None:
        """Ends the span, if another action runs now. Writes nothing: it is also called where a block is given back."""
        if self._freed:
            self._note_freed()
        if (action := self._action()) is not self._running:
            self._end_span(action)
            if action is not None and action.kind not in PER_ITEM:
                number = action.microbatch
                self._step = 1 + (number if action.kind in PER_BATCH else number // self._num_microbatches)

    def _note_freed(self) -> None:
        """Tells what other threads gave back since."""
        while self._freed:
            self._free(self._freed.popleft(), self._now())

    def _end_span(self, following: Action | None = None) -> None:
        """Blocks may be given back at any point of it, and say so."""
        action, self._running = self._running, following
        start, self._start = self._start, self._now()
        events, self._events = self._events, []
        if events:
            self._spans.append((self._step, "" if action is None else str(action), start, self._start, events))

    def _hand_over(self, *, finish: bool = False) -> None:
        read, begun = self._clock.read, self._clock.read(self._begun)
        while self._spans and (finish or self._clock.is_over(self._spans[0][3])):
            step, action, start, end, events = self._spans.pop(0)
            stamp, seconds, found = None, 0.0, []
            for what, block, num_bytes, op, time_, layer, name in events:
                if time_ is not stamp:
                    stamp, seconds = time_, read(time_) - begun
                found.append(MemoryEvent(what, block, num_bytes, op, seconds, layer, name))
            self._write(Span(step, action, read(start) - begun, read(end) - begun, found))


def _owner(tensor: Tensor) -> Any:
    """The object that lives as long as the tensor's memory."""
    return tensor.block if isinstance(tensor, Ghost) else tensor.untyped_storage()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.block.num_bytes if isinstance(tensor, Ghost) else tensor.untyped_storage().nbytes()


def _owned(tensors: Iterable[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """A tensor for each block that takes memory, in order, by the block's owner, and its bytes."""
    found: dict[int, tuple[Tensor, int]] = {}
    for tensor in tensors:
        if isinstance(tensor, Ghost):
            if tensor.block.num_bytes:
                found[id(tensor.block)] = tensor, tensor.block.num_bytes
        elif tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if (num_bytes := storage.nbytes()) and not tensor.is_meta:
                found[id(storage)] = tensor, num_bytes
        elif tensor.layout is torch.sparse_coo:
            found |= _owned([tensor._indices(), tensor._values()])
    return found


def _is_on_cpu(args: Any) -> bool:
    """Whether an operator makes copies for its arithmetic as a CPU does."""
    first = args[0]
    return not first.block.tracker.is_cuda if isinstance(first, Ghost) else first.device.type == "cpu"
