"""Updates weights on the host, beside training: gradients go there group by group, and new weights
come back.

    launch thread   NORM t: send      HOST t: begin                                UPDATE t, group 0: wait   group 1 ..
    to host              |-- 0 --||-- 1 --|
    host                              |---- 0 ----||---- 1 ----|      as many threads as the launch thread has
    from host                                      |- 0 -|      |- 1 -|

For the parameters that the host updates, its memory has the master copy, the optimizer's state and
room for one batch's gradients, taken once. Each of the three rows is a thread. A batch begins there
after the launch thread has waited for the one before. Errors of a thread are raised where the
launch thread waits.

Beside a GPU both rows of copies are also streams: a copy begins after the work that the launch
thread had started before it, and ends before its thread goes on. Host memory is then pinned.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.cpu import numa_node, zeros
from hybridpar.optim import GroupedOptimizer
from hybridpar.state.residency.chunks import Buffer, Chunk, Memory
from hybridpar.state.weights import WeightStore


class HostMemory(Memory):
    """Host memory that a device copies to and from. For a GPU it is pinned, near it, in tensors of
    exact size.

    torch's own pinned memory comes in powers of two.
    Raises: RuntimeError of CUDA, if the system pins no more.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._pins, self._pinned, self._node = (
            device.type == "cuda",
            list[Tensor](),
            numa_node(device),
        )
        weakref.finalize(self, _unpin, self._pinned)

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        tensor = zeros(chunk.stop - chunk.start, dtype, self.device, node=self._node)
        if self._pins and type(tensor) is Tensor and tensor.nbytes:  # not a ghost
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
            )
            self._pinned.append(tensor)
        return tensor


class UpdatedMemory(Memory):
    """Memory of what is updated, on a rank whose host updates: host memory, except for chunks that
    it leaves out."""

    def __init__(self, memory: Memory):
        super().__init__()
        self._host = HostMemory(memory.device)
        self._stays = memory

    def zeros(self, kind: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        return (self._host if chunk.use.hosted else self._stays).zeros(kind, chunk, dtype)


def _unpin(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


@dataclass(slots=True)
class CopyTime:
    """Duration of the copies in one `HostWork.reach` context; known once the context has ended.
    Units: seconds."""

    seconds: float = 0.0


class HostWork:
    """The work on the host and on the way there: copies of flat tensors, and the optimizer's step
    of a group."""

    def mark(self) -> Any:
        """The point that the launch thread's work has reached, for copies to wait for. Call it in
        that thread."""
        return None

    @contextmanager
    def reach(self, mark: Any, way: str) -> Iterator[CopyTime]:
        """Open a context for the thread that copies one way. Its copies start after `mark`, and are
        over at its end.

        The duration that it yields is that of the copies alone. Waiting for `mark` is not part of
        it.
        """
        took = CopyTime()
        start = time.perf_counter()
        yield took
        took.seconds = time.perf_counter() - start

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies the second of each pair to the first."""
        for target, source in pairs:
            target.copy_(source)

    def step(self, step: Callable[[], None], numel: int) -> None:
        """Makes a step of so many parameters."""
        step()


class StreamWork(HostWork):
    """The same beside a GPU: a stream for each way."""

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
            begun.record(
                stream
            )  # behind the mark, so the device reaches it when the copies may start
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
    """The work of the host beside this device."""
    return StreamWork(device) if device.type == "cuda" else HostWork()


class HostUpdates:
    """Updates a rank's weights on the host.

    For each batch: `send` once its gradients are final and reduced, `begin` once their factor is
    known, and `wait` for each group. optimizer: its first groups are the hosted weights'; they are
    stepped in order. gradients: flat buffers that batches use in turn.
    """

    def __init__(
        self,
        weights: WeightStore,
        optimizer: GroupedOptimizer,
        num_groups: int,
        gradients: Sequence[Buffer],
        work: HostWork | None = None,
    ):
        self._weights, self._optimizer, self._work = (
            weights,
            optimizer,
            work or host_work(weights.memory.device),
        )
        self._gradients = gradients
        self.staging = weights.on_host("gradients")
        self._names = [
            [slot.name for slot in group.slots] for group in optimizer.groups[:num_groups]
        ]
        self._grads = self.staging.views({name for names in self._names for name in names})
        self.sizes = [sum(self._grads[name].numel() for name in names) for names in self._names]
        """Number of parameters that the host updates, by group."""
        self._to_host, self._host, self._from_host = (
            _Thread(name) for name in ("to host", "host", "from host")
        )
        self._sent: dict[int, Future[None]] = {}  # by group: gradients on their way
        self._made: dict[int, Future[None]] = {}  # by group: weights that are being made
        self._later: int | None = None
        self.num_bytes = {"to host": 0, "from host": 0}
        """Bytes copied each way so far."""

    def held(self) -> tuple[int, int]:
        """Host memory of the master copy, and of the optimizer's state and copies under way. Units:
        bytes."""
        master = self._weights.master
        made = self._weights.made
        assert master is not None
        hosted = (
            t for chunk, t in zip(master.chunks, master.tensors, strict=True) if chunk.use.hosted
        )
        state = (
            t
            for group in self._optimizer.groups[: len(self._names)]
            for t in group.state_tensors().values()
        )
        rooms = self.staging.nbytes + (0 if made is None else made.nbytes)
        return sum(t.nbytes for t in hosted), sum(t.nbytes for t in state) + rooms

    def work_here(self, here: bool) -> None:
        """here: the thread that asks does all work itself, at once, so that it can be recorded."""
        for thread in (self._to_host, self._host, self._from_host):
            thread.is_here = here

    def send(self, index: int) -> None:
        """Sends the gradients in a buffer, as soon as the batch before is over."""
        if self._sent:
            assert self._later is None, "two batches wait for the one before"
            self._later = index
            return
        mark = self._work.mark()
        for group in range(len(self._names)):
            pairs = [
                (self.staging[at : at + stop - start], self._gradients[index][start:stop])
                for start, stop, at in self._weights.spans(group)
            ]
            self.num_bytes["to host"] += sum(source.nbytes for _, source in pairs)
            self._sent[group] = self._to_host.submit(self._copy, "to host", mark, pairs)

    def begin(self, version: int, lr: float, factor: float | None, *, predict: bool = True) -> None:
        """Starts to make a version of the weights, from the gradients sent times `factor`; None:
        makes none.

        predict: as in WeightStore.advance.
        """
        assert not self._made, "the batch before was not waited for"
        mark = self._work.mark()
        for group, sent in self._sent.items():
            if factor is None:
                self._made[group] = sent
                continue
            updated = self._host.submit(self._step, group, lr, factor, predict, after=sent)
            pairs = self._weights.arriving(version, group)
            self.num_bytes["from host"] += sum(source.nbytes for _, source in pairs)
            self._made[group] = self._from_host.submit(
                self._copy, "from host", mark, pairs, after=updated
            )

    def _copy(self, way: str, mark: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._work.reach(mark, way):
            self._work.copy(pairs)

    def _step(self, group: int, lr: float, factor: float, predict: bool) -> None:
        weights = self._weights.update_on_host(group, predict=predict)
        gradients = [self._grads[name] for name in self._names[group]]
        self._work.step(
            lambda: self._optimizer.step(group, weights, gradients, lr=lr, gradient_scale=factor),
            self.sizes[group],
        )

    def is_done(self) -> bool:
        """Whether all groups that the host makes have arrived."""
        return all(made.done() for made in self._made.values())

    def wait(self, group: int) -> None:
        """Returns once a group that the host makes has arrived, or will not be made. Raises: what
        failed."""
        self._made.pop(group).result()
        del self._sent[group]
        if not self._sent and self._later is not None:
            index = self._later
            self._later = None
            self.send(index)


class _Thread:
    """A thread that does one call after the other, with as many torch threads as its maker has.

    is_here: calls are made at once, by the thread that asks.
    """

    def __init__(self, name: str):
        self.is_here = False
        self._pool = ThreadPoolExecutor(1, name, torch.set_num_threads, (torch.get_num_threads(),))

    def submit(
        self, call: Callable[..., None], *args: object, after: Future[None] | None = None
    ) -> Future[None]:
        """Makes a call in the thread, once those before it and `after` are over; if `after` fails,
        so does this."""

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
