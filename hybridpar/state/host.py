"""Optimizer step on the host, while training continues: gradients are copied to the host group by
group, and new weights are copied back.

    launch thread   NORM t: send      HOST t: begin                                UPDATE t, group 0: wait   group 1 ..
    to host              |-- 0 --||-- 1 --|
    host                              |---- 0 ----||---- 1 ----|      as many threads as the launch thread has
    from host                                      |- 0 -|      |- 1 -|

For the parameters that the host updates, host memory has the master copy, the optimizer state and
space for one batch's gradients, allocated once. Each of the three lower rows is a thread. A batch
starts there after the launch thread has waited for the previous one. An exception in a thread is
raised where the launch thread waits.

With a GPU both rows of copies are also streams: a copy starts after the work that the launch thread
had queued before it, and ends before its thread continues. Host memory is then pinned.

In limited memory each group has a HOST of its own, which sends and begins that group alone. On a CPU
the limited memory is the host's own, so nothing is copied: the middle row updates state in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm import Waitable
from hybridpar.optim import GroupedOptimizer
from hybridpar.state.residency.chunks import Buffer
from hybridpar.state.weights import WeightStore


@dataclass(slots=True)
class CopyTime:
    """Duration of the copies in one `HostWork.reach` context, in seconds; set at its end."""

    seconds: float = 0.0


class HostWork:
    """Runs the host's work: copies of flat tensors both ways, and optimizer steps."""

    def mark(self) -> Any:
        """Return a marker of the work that the calling launch thread has queued so far."""
        return None

    @contextmanager
    def reach(self, mark: Any, way: str) -> Iterator[CopyTime]:
        """Open a context for the thread that copies in direction `way`: its copies start after
        `mark` and are complete at the end of the context.

        Yields the duration of the copies alone, without the wait for `mark`.
        """
        took = CopyTime()
        start = time.perf_counter()
        yield took
        took.seconds = time.perf_counter() - start

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair to the first."""
        for target, source in pairs:
            target.copy_(source)

    def step(self, step: Callable[[], None], numel: int) -> None:
        """Run the optimizer step of a group with `numel` parameters."""
        step()


class StreamWork(HostWork):
    """Work of a host with a GPU: a stream for each copy direction."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = dict[str, torch.cuda.Stream]()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def reach(self, mark: torch.cuda.Event | None, way: str) -> Iterator[CopyTime]:
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(self._device)
        stream = self._streams[way]
        took = CopyTime()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if mark is not None:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            # recorded after the wait for the mark, so the device reaches it when copies may start
            begun.record(stream)
            yield took
            ended.record(stream)
        stream.synchronize()
        took.seconds = 1e-3 * begun.elapsed_time(ended)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if pairs:
            # One call queues all copies. A call for each would take the interpreter from the launch
            # thread each time.
            torch._foreach_copy_(
                [target for target, _ in pairs], [source for _, source in pairs], non_blocking=True
            )


def host_work(device: torch.device) -> HostWork:
    """Create the host's work for a device."""
    return StreamWork(device) if device.type == "cuda" else HostWork()


Make = Callable[[int, Sequence[Tensor]], None]
"""Makes a group of a version of the weights, from its gradients."""


class Group:
    """A group of weights that the host makes: done once it has arrived."""

    def __init__(self, made: Future[None]):
        self._made = made

    def is_done(self) -> bool:
        return self._made.done()

    def wait(self) -> None:
        self._made.result()


class HostUpdates:
    """Updates a rank's weights on the host.

    For each batch: `send` once its gradients are final and reduced, `begin` once their factor is
    known, and `wait` for each group. Gradients that were not sent before are sent by `begin`.

    Args:
        optimizer: Its first groups are the weights that the host updates, stepped in order.
        groups: Numbers of the rank's shards in each of these groups; no groups without a host
            optimizer.
        gradients: The reduced gradients of the rank's shards, for each buffer that batches use in
            turn.
    """

    def __init__(
        self,
        weights: WeightStore,
        optimizer: GroupedOptimizer,
        groups: Sequence[Sequence[int]],
        gradients: Sequence[Sequence[Tensor]],
        work: HostWork | None = None,
    ):
        self._weights = weights
        self._optimizer = optimizer
        self._work = work or host_work(weights.memory.device)
        self._gradients = gradients
        self._groups = groups
        hosted = [group.slots for group in optimizer.groups[: len(groups)]]
        self.staging: Buffer | None = None
        """Gradients on the host; None: the host reads them where they are."""
        self._grads: dict[str, Tensor] = {}
        if weights.copies:
            self.staging = weights.on_host("gradients")
            self._grads = self.staging.views({slot.name for slots in hosted for slot in slots})
        self.num_groups = len(groups)
        self._names = [[slot.name for slot in slots] for slots in hosted]
        self.sizes = [sum(prod(slot.shape) for slot in slots) for slots in hosted]
        """Number of parameters that the host updates, by group."""
        self._to_host, self._host, self._from_host = (
            _Thread(name) for name in ("to host", "host", "from host")
        )
        self._sent: dict[int, Future[None]] = {}  # by group: gradients on their way
        self._made: dict[int, Group] = {}  # weights that are being made
        self._later: int | None = None
        self.num_bytes = {"to host": 0, "from host": 0}
        """Bytes copied each way so far."""

    def held(self) -> tuple[int, int]:
        """Return the bytes of host memory of the master copy, and of all other state."""
        master = self._weights.master
        made = self._weights.made
        if master is None or self.staging is None:
            return 0, 0
        chunks = zip(master.chunks, master.tensors, strict=True)
        num_bytes = self.staging.nbytes + (0 if made is None else made.nbytes)
        for group in self._optimizer.groups[: self.num_groups]:
            num_bytes += sum(tensor.nbytes for tensor in group.state_tensors().values())
        return sum(tensor.nbytes for chunk, tensor in chunks if chunk.use.hosted), num_bytes

    def work_here(self, here: bool) -> None:
        """Run work at once in the calling thread (`here`; it can be recorded), or in threads."""
        for thread in (self._to_host, self._host, self._from_host):
            thread.is_here = here

    def send(self, index: int) -> None:
        """Send the gradients in a buffer, as soon as the previous batch is complete."""
        if self._sent:
            assert self._later is None, "two batches wait for the one before"
            self._later = index
            return
        mark = self._work.mark()
        for group in range(self.num_groups):
            self._send(group, index, mark)

    def _send(self, group: int, index: int, mark: Any) -> None:
        owned = self._owned(group, index)
        pairs = [
            (self._grads[name], gradient)
            for name, gradient in zip(self._names[group], owned, strict=True)
            if self._grads
        ]
        self.num_bytes["to host"] += sum(source.nbytes for _, source in pairs)
        self._sent[group] = self._to_host.submit(self._copy, "to host", mark, pairs)

    def _owned(self, group: int, index: int) -> list[Tensor]:
        return [self._gradients[index][i] for i in self._groups[group]]

    def begin(
        self, index: int, version: int, make: Make, groups: Iterable[int] | None = None
    ) -> list[Waitable]:
        """Start to make groups (None: all) of a version of the weights, from the gradients in a
        buffer; return what is done once they have arrived.
        """
        mark = self._work.mark()
        found: list[Waitable] = []
        for group in range(self.num_groups) if groups is None else groups:
            assert group not in self._made, "the batch before was not waited for"
            if group not in self._sent:
                self._send(group, index, mark)
            sent = self._sent[group]
            made = self._host.submit(self._step, group, index, make, after=sent)
            if pairs := self._weights.arriving(version, group):
                self.num_bytes["from host"] += sum(source.nbytes for _, source in pairs)
                made = self._from_host.submit(self._copy, "from host", mark, pairs, after=made)
            self._made[group] = Group(made)
            found.append(self._made[group])
        return found

    def _copy(self, way: str, mark: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._work.reach(mark, way):
            self._work.copy(pairs)

    def _step(self, group: int, index: int, make: Make) -> None:
        gradients = self._owned(group, index)
        if self._grads:
            gradients = [self._grads[name] for name in self._names[group]]
        self._work.step(lambda: make(group, gradients), self.sizes[group])

    def wait(self, group: int) -> None:
        """Return once a group has arrived. Raises: the error of the thread that failed."""
        self._made.pop(group).wait()
        del self._sent[group]
        if not self._sent and self._later is not None:
            index = self._later
            self._later = None
            self.send(index)


class _Thread:
    """A thread that runs one call after the other, with as many torch threads as its creator has.

    Attributes:
        is_here: Calls run at once, in the calling thread.
    """

    def __init__(self, name: str):
        self.is_here = False
        self._pool = ThreadPoolExecutor(1, name, torch.set_num_threads, (torch.get_num_threads(),))

    def submit(
        self, call: Callable[..., None], *args: object, after: Future[None] | None = None
    ) -> Future[None]:
        """Run a call in the thread, after earlier calls and `after`, whose failure it shares."""

        def task() -> None:
            if after is not None:
                after.result()
            with torch.no_grad():
                call(*args)

        if not self.is_here:
            return self._pool.submit(task)
        done: Future[None] = Future()
        try:
            task()
        except Exception as failure:  # raised where it is waited for, as in a thread
            done.set_exception(failure)
        else:
            done.set_result(None)
        return done
