"""Record what every operator does to every block of memory, for real tensors and ghosts.

recorder = Recorder(write)
with recorder:
    loss = model(x).sum()
    loss.backward()
recorder.close()                     # write() got Spans: mallocs, frees, reads and writes, in order

An observer sits between autograd and the operators, so it sees operators of a backward, fused ones,
torch's operators on lists of tensors (foreach), and hybridpar's own in C++ and Triton, whose
schemas declare what they write. Views are no access. Scratch space inside an operator is not seen.
An asynchronous message counts as reading and writing when it is started.

There are two observers with equal events: one in C++ (csrc/recorder), for tensors on CPUs; and a
dispatch mode in Python (mode_observer.py), for ghosts and tensors on GPUs, or if the extension was
not built.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.memory_behaviour.events import Span, WrittenEvents
from hybridpar.memory_behaviour.recording.mode_observer import ModeObserver, Reading
from hybridpar.prediction.operators import described
from hybridpar.runtime import recording
from hybridpar.schedules.action import PER_BATCH, PER_ITEM, Action


class Clock(Protocol):
    """A clock. A stamp from `now` can be converted to seconds since another one, once it
    `is_over`."""

    def now(self) -> Any: ...
    def since(self, begun: Any, stamp: Any) -> float: ...
    def is_over(self, stamp: Any) -> bool: ...


class _HostClock:
    now = staticmethod(time.perf_counter_ns)

    def since(self, begun: int, stamp: int) -> float:
        return (stamp - begun) / 1_000_000_000

    def is_over(self, stamp: int) -> bool:
        return True


class DeviceClock:
    """The clock of the current CUDA stream."""

    def __init__(self) -> None:
        self._clock = recording.DeviceClock()

    def now(self) -> torch.cuda.Event:
        return self._clock.now()

    def since(self, begun: torch.cuda.Event, stamp: torch.cuda.Event) -> float:
        return self._clock.read(stamp)[0] - self._clock.read(begun)[0]

    def is_over(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()


HOST_CLOCK: Clock = _HostClock()


class Observer(Protocol):
    """An observer of blocks of memory: of operators while it is entered, and of frees until it is
    closed."""

    def enter_layer(self, layer: int) -> None:
        """Note which block of the model runs; -1 for none."""

    def pause(self, paused: bool) -> None:
        """Stop observing operators, or resume."""

    def enter(self) -> None: ...
    def exit(self) -> None: ...
    def adopt(self, name: str, tensors: list[Tensor]) -> None: ...
    def resized(self, name: str, tensor: Tensor) -> None: ...
    def name_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...
    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None: ...
    def take(self) -> Reading | None:
        """Return a reader of the events since the last call, to be called when the time is over;
        None if there are none."""

    def close(self) -> None: ...


class _NativeObserver:
    """The observer in C++. It stores events as text, with times of the host's clock."""

    def __init__(self, begun: int):
        self._inner = native.recorder().Observer(described, begun)
        self.enter = self._inner.enter
        self.exit = self._inner.exit
        self.close = self._inner.close

    def enter_layer(self, layer: int) -> None:
        self._inner.layer = layer

    def pause(self, paused: bool) -> None:
        self._inner.paused = paused

    def adopt(self, name: str, tensors: list[Tensor]) -> None:
        self._inner.adopt(json.dumps(name), tensors)

    def resized(self, name: str, tensor: Tensor) -> None:
        self._inner.resized(json.dumps(name), tensor)

    def name_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._inner.name_tensors(list(map(json.dumps, tensors)), list(tensors.values()))

    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        raise AssertionError(f"{op}: dispatch sees all messages of real tensors")

    def take(self) -> Reading | None:
        count, text = self._inner.take()
        return (lambda since: WrittenEvents(count, text)) if count else None


def observer_for(clock: Clock, begun: Any) -> Observer:
    """Return the observer in C++ if possible: it requires the host's clock, and no other active
    mode, such as that for ghosts."""
    is_native = (
        clock is HOST_CLOCK
        and not torch._C._len_torch_dispatch_stack()
        and not native.missing_recorder()
    )
    return _NativeObserver(begun) if is_native else ModeObserver(clock.now)


class Recorder:
    """A recorder that passes spans of memory events to `write` while it is entered, each when the
    next begins.

    Records operators of the thread that enters it, and of the backwards that this thread starts.

    Args:
        write: Called with each span.
        num_microbatches: Micro-batches of a step, which determine the step of an action.
        clock: A clock. A device's clock is read only after its operators have run, because nothing
            waits for the device, so its spans are passed on later.
    """

    def __init__(
        self, write: Callable[[Span], object], num_microbatches: int = 1, clock: Clock = HOST_CLOCK
    ):
        self.is_active = False
        """Whether the recorder is entered."""
        self._write = write
        self._num_microbatches = num_microbatches
        self._clock = clock
        self._begun = self._start = clock.now()
        self._observer = observer_for(clock, self._begun)
        self._step = 1
        self._running: Action | None = None
        self._spans: deque[tuple[int, str, Any, Any, Reading]] = deque()

    def __enter__(self) -> Recorder:
        self.is_active = True
        self._observer.enter()
        return self

    def __exit__(self, *args: object) -> None:
        self.is_active = False
        self._observer.exit()

    def enter_layer(self, layer: int) -> None:
        """Note which block of the model runs; -1 for none."""
        self._observer.enter_layer(layer)

    def pause(self, paused: bool) -> None:
        """Stop recording operators, or resume."""
        self._observer.pause(paused)

    def adopt(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Name the blocks of tensors in the trace: existing blocks from now on, blocks of this span
        from their allocation."""
        self._observer.adopt(name, list(tensors))

    def resized(self, name: str, tensor: Tensor) -> None:
        """Record that a tensor's storage was emptied, or has memory again as a block of this name,
        because no operator does that.

        Blocks that are allocated while nothing is recorded are seen when they are first used.
        """
        if self.is_active:
            self._observer.resized(name, tensor)

    def name_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Name contiguous tensors that divide a block, such as the weights in a flat buffer. From
        now on an access of a part of the block is an access of each tensor that it overlaps."""
        self._observer.name_tensors(tensors)

    def communicate(self, op: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Record an operator that does not go through the dispatcher."""
        self._observer.communicate(op, reads, writes)

    def begin(self, action: Action | None) -> None:
        """End a span. `action` runs from now on; None: unnamed work in step `step`."""
        self._end_span()
        self._running = action
        if action is not None and action.kind not in PER_ITEM:
            number = action.microbatch
            self._step = 1 + (
                number if action.kind in PER_BATCH else number // self._num_microbatches
            )

    @property
    def step(self) -> int:
        """Number of the current step, from 1. Setting it ends a span."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._end_span()
        self._step = step

    def close(self) -> None:
        """Pass on the remaining spans, and stop watching blocks."""
        self._observer.close()
        self._end_span(finish=True)

    def _end_span(self, *, finish: bool = False) -> None:
        """Pass on the spans whose times are known; with `finish`, wait for all of them."""
        start = self._start
        self._start = self._clock.now()
        if (reading := self._observer.take()) is not None:
            action = "" if self._running is None else str(self._running)
            self._spans.append((self._step, action, start, self._start, reading))
        while self._spans and (finish or self._clock.is_over(self._spans[0][3])):
            step, action, start, end, reading = self._spans.popleft()
            self._write(
                Span(step, action, self._since(start), self._since(end), reading(self._since))
            )

    def _since(self, stamp: Any) -> float:
        return self._clock.since(self._begun, stamp)
