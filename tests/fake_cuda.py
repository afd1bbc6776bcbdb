"""A stand-in for what torch.cuda has for CUDA graphs, on a CPU.

Nothing has happened when a capture ends; a replay runs the captured operators again, with the
tensors of then. As on a GPU a capture refuses whatever waits, and its communication waits for
nobody. A capture that is broken throws at its end and leaves the allocator and the generator as
they are. A synchronization of the device waits for every receive that the rank has posted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hybridpar.comm import irecv, isend
from hybridpar.grid import Axis
from hybridpar.nn import cross_entropy, embedding
from hybridpar.runtime import executor
from hybridpar.state.residency.chunks import Buffer

CPU = torch.device("cpu")
_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Deadlock(Exception):
    """Ranks wait for each other in a circle."""


class Event:
    """torch.cuda.Event, which a replay records where a graph has it: it sees what `watched` holds
    then."""

    watched: Buffer | None = None
    awaited: Event | None = None
    """Work by the stream that is current."""

    def __init__(self, external: bool):
        assert external, "an event of a capture alone"

    def record(self) -> None:
        assert Graph.recording is not None
        Graph.recording.calls.append((self.see, (), {}, None))

    def see(self) -> None:
        self.seen = None if Event.watched is None else Event.watched.tensors[0].clone()


class Stream:
    """torch.cuda.Stream."""

    device = CPU
    current: Stream | None = None

    def __init__(self, device: torch.device = CPU) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None:
        Event.awaited = event


class Allocator:
    """The caching allocator's knowledge of captures."""

    def __init__(self) -> None:
        self.pools: Counter[int] = Counter()
        """Graphs by the pool that they use."""
        self.underway: list[int] = []
        """Pools of captures that have not ended."""
        self.has_freed_workspaces = False
        """Workspaces of cuBLAS, which all graphs captured on a stream share. The end of any of these
        graphs frees them."""

    def begin(self, pool: int) -> None:
        if self.underway:
            raise RuntimeError("beginAllocateToPool: already recording")
        self.pools[pool] += 1
        self.underway.append(pool)

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: int) -> None:
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0, "released more often than used"


class GeneratorState:
    """The state of a generator, which all graphs captured with it share."""

    def __init__(self) -> None:
        self.is_capturing = False


class Generator:
    """torch.cuda's default generator, as in torch 2.11."""

    def __init__(self) -> None:
        self.state = GeneratorState()

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


class Graph(TorchDispatchMode):
    """torch.cuda.CUDAGraph."""

    recording: Graph | None = None
    allocator = Allocator()
    generator = Generator()
    number = 0
    """Captures begun."""
    breaks: Callable[[int, int], bool] | None = None
    """Whether an operator breaks its capture, by the number of the capture and of the operator in
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._written: list[tuple[Tensor, Tensor]] = []
        self._is_broken = self._is_captured = False
        self._allocator = Graph.allocator

    def __del__(self) -> None:
        self._allocator.has_freed_workspaces |= self._is_captured

    def capture_begin(self, pool: int = -1, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads may save meanwhile"
        Graph.allocator.begin(pool)
        Graph.recording = self
        Graph.number += 1
        self._pool = pool
        self._state = Graph.generator.state
        self._state.is_capturing = True
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        Graph.recording = None
        self._undo_writes()
        if self._is_broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture\nand so on"
            )
        Graph.allocator.end(0, self._pool)
        self._state.is_capturing = False
        self._is_captured = True

    def refuse(self, what: str) -> None:
        self._is_broken = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in _WAITS or (
            Graph.breaks is not None and Graph.breaks(Graph.number, len(self.calls))
        ):
            self.refuse(str(op))
        for argument, x in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                self._written += [(y, y.clone()) for y in tree_leaves(x)]
        out = _launched(op, args) if op.namespace == "c10d" else op(*args, **kwargs)
        self.calls.append((op, args, kwargs, out))
        return out

    @torch.no_grad()
    def _undo_writes(self) -> None:
        for x, before in reversed(self._written):
            x.data.copy_(before)  # no new version for autograd

    @torch.no_grad()
    def replay(self) -> None:
        if self._state.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        assert not self._allocator.has_freed_workspaces, "it writes to a workspace that was freed"
        opaque: dict[int, Tensor] = {}  # oneDNN's, which nothing can be copied into
        for op, args, kwargs, out in self.calls:
            args, kwargs = tree_map(lambda x: opaque.get(id(x), x), (args, kwargs))
            held = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(new, torch.ScriptObject):  # communication
                    Work.unbox(new).wait()
                elif isinstance(x, Tensor) and x.layout is not torch.strided:
                    opaque[id(x)] = new
                elif isinstance(x, Tensor) and storage(x) not in held:
                    x.data.copy_(new)


def _launched(op: Any, args: Any) -> Any:
    """Return what a captured communication returns: it has not waited for the other ranks, as
    NCCL's does not."""
    work = FakeWork().boxed()
    return work if len(op._schema.returns) == 1 else (args[0], work)


def storage(x: Tensor) -> int | None:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else None


class Receives:
    """The receives that this rank has posted and not waited for; finds ranks that wait for each
    other in a circle.

    Counts of sent messages and the waits of all ranks lie in the store of the process group. A
    circle stays once it is there, so looking for it again and again finds it, however fast the
    ranks are.
    """

    def __init__(self, run: str):
        self._run = run
        self._posted = list[_Received]()
        self._sent = Counter[str]()
        self._received = Counter[str]()

    def isend(self, x: Tensor, to: int, axis: Axis) -> Any:
        key = self._key(axis, dist.get_rank(), axis.ranks[to])
        _store().add(key, 1)
        return isend(x, to, axis)

    def irecv(self, buffer: Tensor, source: int, axis: Axis) -> Any:
        key = self._key(axis, axis.ranks[source], dist.get_rank())
        self._received[key] += 1
        posted = _Received(
            irecv(buffer, source, axis), self, axis.ranks[source], key, self._received[key]
        )
        self._posted.append(posted)
        return posted

    def _key(self, axis: Axis, sender: int, receiver: int) -> str:
        return f"{self._run}/sent/{axis.name}/{sender}/{receiver}"

    def await_all(self) -> None:
        self.await_sent(self._posted)

    def forget(self, received: _Received) -> None:
        if received in self._posted:
            self._posted.remove(received)

    def await_sent(self, wanted: list[_Received]) -> None:
        """Return once these messages are sent. Raises: Deadlock."""
        if not wanted:
            return
        me = dist.get_rank()
        edges = [(one.source, one.key, one.number) for one in wanted]
        while missing := [edge for edge in edges if _is_missing(*edge)]:
            _store().set(f"{self._run}/waits/{me}", json.dumps(missing))
            if self._reaches_circle(me, ()):
                raise Deadlock(f"rank {me} waits for {missing}")
            sleep(0.001)
        _store().set(f"{self._run}/waits/{me}", "[]")

    def _reaches_circle(self, rank: int, path: tuple[int, ...]) -> bool:
        if rank in path:
            return True
        key = f"{self._run}/waits/{rank}"
        waits = json.loads(_store().get(key)) if _store().check([key]) else []
        return any(
            _is_missing(*edge) and self._reaches_circle(edge[0], (*path, rank)) for edge in waits
        )


class _Received:
    """The work of a posted receive."""

    def __init__(self, work: Any, receives: Receives, source: int, key: str, number: int):
        self._work = work
        self._receives = receives
        self.source = source
        self.key = key
        self.number = number

    def wait(self) -> None:
        self._receives.await_sent([self])
        self._work.wait()
        self._receives.forget(self)

    def is_done(self) -> bool:
        return bool(self._work.is_done())


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _is_missing(source: int, key: str, number: int) -> bool:
    return bool(_store().add(key, 0) < number)


class fake_graph:
    """torch.cuda.graph, which synchronizes the device before it captures."""

    def __init__(self, graph: Graph, pool: int, stream: Stream, capture_error_mode: str):
        self._graph = graph
        self._pool = pool
        self._mode = capture_error_mode

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *args: object) -> None:
        self._graph.capture_end()


def install(monkeypatch: pytest.MonkeyPatch, run: str = "") -> None:
    """Put the stand-ins into torch.cuda. `run`: another text for each engine of a process group."""
    receives = Receives(run)
    pools = iter(range(10**6))
    Graph.allocator, Graph.generator = Allocator(), Generator()
    Graph.number = 0
    Graph.breaks = None
    Graph.recording = None
    Event.watched = Event.awaited = Stream.current = None

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before = Event.awaited, Stream.current
        Event.awaited = None
        Stream.current = stream
        try:
            yield
        finally:
            Event.awaited, Stream.current = before

    def synchronize(device: object = None) -> None:
        if Graph.recording is not None:
            Graph.recording.refuse("synchronize")
        receives.await_all()

    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": stream,
        "CUDAGraph": Graph,
        "graph": fake_graph,
        "Event": Event,
        "graph_pool_handle": lambda: next(pools),
        "synchronize": synchronize,
        "empty_cache": synchronize,
        "_sleep": lambda cycles: None,
        "default_generators": (Graph.generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *args: Graph.allocator.end(*args)
    )
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: Graph.allocator.release(*args))
    for module in (embedding, cross_entropy):  # on a GPU ids are not looked at, as that waits
        monkeypatch.setattr(module, "check_range", lambda *args: None)
        monkeypatch.setattr(module, "within", lambda *args: False)
    monkeypatch.setattr(executor, "isend", receives.isend)
    monkeypatch.setattr(executor, "irecv", receives.irecv)
