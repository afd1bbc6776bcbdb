"""What micro-batches keep from forward to backward, and its way to the slow tier and back.

    F          notes the memory of what autograd keeps                              (hooks of saved tensors)
    OFFLOAD    starts to write it; EVICT waits for that, and empties it
    RELOAD     takes memory again, and starts to read; the backward waits for that

Memory stays what it is to all who hold it: views of it, of whatever number, move once, and are there again afterwards.
So only that moves which is the micro-batch's alone. What anybody else holds stays: weights, an output that is being
sent. So do integers, and what is smaller than a page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybridpar.pipeline.plan.action import Action
from hybridpar.state.device_tier import HostStore
from hybridpar.state.host import host_work
from hybridpar.state.pages import Region
from hybridpar.state.store import PAGE, DiskStore

_PIECE = 1 << 20
_Place = list[tuple[Any, int]]  # stores, and items of them
_Pieces = list[list[tuple[Tensor, int]]]
_Move = Callable[[_Place, _Pieces], None]


class Blocks(Protocol):
    """What tells of tensors which memory they are on."""

    def key(self, tensor: Tensor) -> object:
        """Equal for tensors that share memory; None: this memory cannot move."""
    def num_holders(self, tensor: Tensor) -> int:
        """Number of tensors that share the memory of this one, itself included."""
    def num_bytes(self, tensor: Tensor) -> int:
        """Of all of that memory."""
    def content(self, tensor: Tensor) -> Tensor:
        """All of that memory, flat."""
    def resize(self, content: Tensor, num_bytes: int) -> None:
        """Gives that memory back (0), or takes it anew."""


class _Storages:
    """Memory of real tensors."""

    def key(self, tensor: Tensor) -> object:
        storage = tensor.untyped_storage()
        return storage._cdata if storage.resizable() else None

    def num_holders(self, tensor: Tensor) -> int:
        holders: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return holders - 1  # what asks

    def num_bytes(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def content(self, tensor: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    def resize(self, content: Tensor, num_bytes: int) -> None:
        content.untyped_storage().resize_(num_bytes)


STORAGES = _Storages()


@dataclass(slots=True)
class _Block:
    """A block of memory. tensor: any on it; num_holders: of those that are known."""

    tensor: Tensor
    num_holders: int = 0


class Notes:
    """The memory of what autograd keeps of the code that runs while it is noting."""

    def __init__(self, blocks: Blocks = STORAGES):
        self._blocks, self._found = blocks, dict[object, _Block]()

    @contextmanager
    def noting(self, leaf: Tensor | None) -> Iterator[None]:
        """leaf: what the code starts from, if anything, which autograd's caller keeps."""
        with saved_tensors_hooks(self._pack, _same):
            yield
        if leaf is not None and (block := self._found.get(self._blocks.key(leaf))) is not None:
            block.num_holders += 1

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # an output that is kept itself would keep its own graph
        if tensor.is_floating_point() and self._blocks.num_bytes(tensor) >= PAGE:
            key = self._blocks.key(tensor)
            if key is not None:
                self._found.setdefault(key, _Block(tensor)).num_holders += 1
        return tensor

    def alone(self) -> list[Tensor]:
        """A tensor for each block of memory that nobody else holds."""
        return [block.tensor for block in self._found.values()
                if self._blocks.num_holders(block.tensor) == block.num_holders]

    def num_bytes(self) -> int:
        """Bytes of all these."""
        return sum(map(self._blocks.num_bytes, self.alone()))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class SlowTier(Protocol):
    """Where the bytes of tensors can be that have no memory. What goes on is waited for by `result`."""

    def write(self, content: Sequence[Tensor]) -> tuple[Any, Future[None]]:
        """Starts to take it, as flat tensors of bytes; what to read it by."""
    def read(self, place: Any, into: Sequence[Tensor]) -> Future[None]:
        """Starts to bring it back, once: its place is then free."""
    def seconds_per_move(self) -> tuple[float, float]:
        """How long a write and a read took so far, on average, without waiting for their turn; 0: there was none."""
    def work_per_move(self) -> tuple[float, float]:
        """CPU time of a write and of a read so far, on average."""
    def close(self) -> None:
        """Ends what is under way, and gives back the room."""


class FileTier:
    """A file in `folder`, which grows as it must. Raises: HybridparError from `result`, where there is no room."""

    def __init__(self, folder: Path):
        self._folder, self._stores, self._free = folder, list[Any](), deque[tuple[Any, int]]()
        self._threads = {move: ThreadPoolExecutor(1, f"activations {move}") for move in ("out", "in")}
        self._bounce = {move: Region(_PIECE) for move in self._threads}  # pages that a disk can take
        self._took = dict.fromkeys(self._threads, (0, 0.0, 0.0))  # moves that are over, their seconds and CPU time

    def write(self, content: Sequence[Tensor]) -> tuple[_Place, Future[None]]:
        pieces = _pieces(content)
        place = self._take(len(pieces))
        return place, self._submit("out", self._write, place, pieces)

    def read(self, place: _Place, into: Sequence[Tensor]) -> Future[None]:
        return self._submit("in", self._read, place, _pieces(into))

    def seconds_per_move(self) -> tuple[float, float]:
        writes, reads = (seconds / max(1, number) for number, seconds, _ in self._took.values())
        return writes, reads

    def work_per_move(self) -> tuple[float, float]:
        writes, reads = (work / max(1, number) for number, _, work in self._took.values())
        return writes, reads

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        for store in self._stores:
            store.close()

    def _take(self, count: int) -> _Place:
        """Room for so many pieces."""
        if (lacking := count - len(self._free)) > 0:
            self._stores.append(self._make_store([_PIECE] * lacking))
            self._free.extend((self._stores[-1], item) for item in range(lacking))
        return [self._free.popleft() for _ in range(count)]

    def _make_store(self, sizes: Sequence[int]) -> Any:
        return DiskStore(self._folder, sizes)

    def _submit(self, way: str, move: _Move, place: _Place, pieces: _Pieces) -> Future[None]:
        return self._threads[way].submit(self._timed, way, move, place, pieces)

    def _timed(self, way: str, move: _Move, place: _Place, pieces: _Pieces) -> None:
        start, worked = time.perf_counter(), time.thread_time()
        move(place, pieces)
        number, seconds, work = self._took[way]
        self._took[way] = number + 1, seconds + time.perf_counter() - start, work + time.thread_time() - worked

    def _write(self, place: _Place, pieces: _Pieces) -> None:
        bounce = self._bounce["out"]
        for (store, item), piece in zip(place, pieces, strict=True):
            for part, at in piece:
                bounce.tensor[at : at + len(part)].copy_(part)
            store.write(item, bounce.view)

    def _read(self, place: _Place, pieces: _Pieces) -> None:
        bounce = self._bounce["in"]
        for (store, item), piece in zip(place, pieces, strict=True):
            store.read(item, bounce.view)
            for part, at in piece:
                part.copy_(bounce.tensor[at : at + len(part)])
        self._free.extend(place)


class HostTier(FileTier):
    """Memory of the host of a GPU, pinned, which grows as it must; a stream for copies each way.

    They begin behind what the launch thread had started when it asked for them, and are over when its future is.
    """

    def __init__(self, device: torch.device):
        super().__init__(Path())
        self._device, self._work = device, host_work(device)

    def _make_store(self, sizes: Sequence[int]) -> HostStore:
        return HostStore(sizes, self._device)

    def _submit(self, way: str, move: _Move, place: _Place, pieces: _Pieces) -> Future[None]:
        mark = self._work.mark()

        def behind_it(place: _Place, pieces: _Pieces) -> None:
            with torch.no_grad(), self._work.reach(mark, way):
                move(place, pieces)

        return super()._submit(way, behind_it, place, pieces)

    def _write(self, place: _Place, pieces: _Pieces) -> None:
        self._work.copy([(store.item(item)[at : at + len(part)], part)
                         for (store, item), piece in zip(place, pieces, strict=True) for part, at in piece])

    def _read(self, place: _Place, pieces: _Pieces) -> None:
        self._work.copy([(part, store.item(item)[at : at + len(part)])
                         for (store, item), piece in zip(place, pieces, strict=True) for part, at in piece])
        self._free.extend(place)


def _pieces(content: Sequence[Tensor]) -> _Pieces:
    """Bytes in pieces of equal size: of each what is in it, and where."""
    pieces: _Pieces = []
    at = _PIECE
    for tensor in content:
        start = 0
        while start < len(tensor):
            if at == _PIECE:
                pieces.append([])
                at = 0
            stop = min(start + _PIECE - at, len(tensor))
            pieces[-1].append((tensor[start:stop], at))
            at, start = at + stop - start, stop
    return pieces


@dataclass(slots=True)
class _Kept:
    """What a micro-batch keeps on a stage, and where it is. sizes: bytes by block, of what moves."""

    notes: Notes
    content: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    place: Any = None
    moving: Future[None] | None = None

    def wait(self) -> None:
        if self.moving is not None:
            self.moving.result()
            self.moving = None


class Stash:
    """What the micro-batches of a rank keep, along its plan. listeners: are called with what was emptied or is back."""

    def __init__(self, tier: SlowTier, blocks: Blocks = STORAGES):
        self.tier, self._blocks = tier, blocks
        self.listeners: list[Callable[[Tensor], object]] = []
        self._kept: dict[tuple[int, int], _Kept] = {}  # by stage and micro-batch
        self.num_bytes = 0
        """Bytes that have left so far."""

    def noting(self, action: Action, leaf: Tensor | None) -> AbstractContextManager[None]:
        """To be entered while a forward runs; leaf: its input, if it has one."""
        return self._kept.setdefault((action.stage, action.microbatch), _Kept(Notes(self._blocks))).notes.noting(leaf)

    def offload(self, action: Action) -> Callable[[], bool]:
        """Starts to write what a micro-batch keeps. What it returns says whether that is over."""
        kept = self._of(action)
        tensors = kept.notes.alone()
        kept.content = list(map(self._blocks.content, tensors))
        kept.sizes = list(map(self._blocks.num_bytes, tensors))
        self.num_bytes += sum(kept.sizes)
        kept.place, kept.moving = self.tier.write(kept.content)
        return kept.moving.done

    def evict(self, action: Action) -> None:
        """Waits for that, and gives up the memory."""
        kept = self._of(action)
        kept.wait()
        for content in kept.content:
            self._resize(content, 0)

    def reload(self, action: Action) -> Callable[[], bool]:
        """Takes memory, and starts to bring it back. What it returns says whether that is over."""
        kept = self._of(action)
        for content, size in zip(kept.content, kept.sizes, strict=True):
            self._resize(content, size)
        kept.moving = self.tier.read(kept.place, kept.content)
        return kept.moving.done

    def _resize(self, content: Tensor, num_bytes: int) -> None:
        self._blocks.resize(content, num_bytes)
        for listener in self.listeners:
            listener(content)

    def is_here(self, action: Action) -> bool:
        """Whether a backward need not wait for what it needs."""
        kept = self._kept.get((action.stage, action.microbatch))
        return kept is None or kept.moving is None or kept.moving.done()

    def release(self, action: Action) -> None:
        """Waits until what a backward needs is here, and leaves it to autograd."""
        if (kept := self._kept.pop((action.stage, action.microbatch), None)) is not None:
            kept.wait()

    @property
    def left(self) -> list[tuple[int, int]]:
        """Stages and micro-batches of which anything is kept."""
        return list(self._kept)

    def _of(self, action: Action) -> _Kept:
        return self._kept[action.stage, action.microbatch]
