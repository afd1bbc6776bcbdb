"""The slow tier of kept activations: a file or, for a GPU, pinned host memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpar.state.device_tier import HostStore
from hybridpar.state.host import host_work
from hybridpar.state.pages import Region
from hybridpar.state.store import DiskStore

_PIECE = 1 << 20
_Place = list[tuple[Any, int]]  # stores, and items of them
_Pieces = list[list[tuple[Tensor, int]]]
_Move = Callable[[_Place, _Pieces], None]


class SlowTier(Protocol):
    """Holds the bytes of tensors without memory. A future's `result` waits for its move."""

    def write(self, content: Sequence[Tensor]) -> tuple[Any, Future[None]]:
        """Starts to write flat tensors of bytes; returns the place to read them from, and the move."""
    def read(self, place: Any, into: Sequence[Tensor]) -> Future[None]:
        """Starts to bring them back, once: their place is then free."""
    def seconds_per_move(self) -> tuple[float, float]:
        """Mean seconds of a write and of a read so far, without waiting for their turn; 0: there was none."""
    def work_per_move(self) -> tuple[float, float]:
        """Mean CPU seconds of a write and of a read so far."""
    def close(self) -> None:
        """Ends the moves under way, and gives back the room."""


class FileTier:
    """A file in `folder` that grows as needed. Raises: HybridparError from `result`, if there is no room."""

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
        pieces.clear()  # the thread holds them for a moment after its future is done
        if way == "in":  # only now: beside a GPU the copies are over when `move` is
            self._free.extend(place)
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


class HostTier(FileTier):
    """Pinned host memory of a GPU, which grows as needed, and a stream for copies each way.

    Copies begin after the work that the launch thread had started before, and are over when their future is done.
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


def _pieces(content: Sequence[Tensor]) -> _Pieces:
    """Bytes in pieces of equal size: the tensors in each, and where they begin."""
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
