"""The slow tier of offloaded activations: a file or, for a GPU, pinned host memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.cpu import host_room
from hybridpar.errors import HybridparError
from hybridpar.state.host import host_work
from hybridpar.state.residency.device_tier import HostStore
from hybridpar.state.residency.pages import Region
from hybridpar.state.residency.store import DiskStore

_PIECE = 1 << 20
_PINNED_PIECE = 16 << 20
"""Bytes of a piece of pinned memory: copies reach the speed of the link, and few are queued."""
_Place = list[tuple[Any, int]]  # stores, and items of them
_Pieces = list[list[tuple[Tensor, int]]]
_Totals = tuple[int, float, float]
"""Number of moves, their wall-clock seconds, and their CPU seconds."""


@dataclass(frozen=True)
class MoveTimes:
    """Mean times of the moves of a micro-batch's activations, in seconds.

    Attributes:
        write, read: Elapsed time, without waits for their turn.
        write_work, read_work: Time of a CPU core.
    """

    write: float = 0.0
    read: float = 0.0
    write_work: float = 0.0
    read_work: float = 0.0


class SlowTier:
    """Holds the bytes of tensors whose memory is freed. A future's `result` waits for its move.

    This class moves nothing, for tensors without content.
    """

    def write(self, content: Sequence[Tensor]) -> tuple[Any, Future[None]]:
        """Start to write flat tensors of bytes; return where to read them, and the move."""
        return None, self.read(None, content)

    def read(self, place: Any, into: Sequence[Tensor]) -> Future[None]:
        """Start to read tensors back. This can be done once, because it frees their place."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def restart(self) -> None:
        """Restart the means of `times`, without the moves that are complete."""

    def times(self) -> MoveTimes:
        """Return the mean times of the moves since the last restart; 0 without any."""
        return MoveTimes()

    def close(self) -> None:
        """End the moves under way, and free the space."""


class _PiecedTier(SlowTier):
    """A slow tier in pieces of so many bytes, with a thread each way. It grows as needed."""

    def __init__(self, piece: int):
        self._piece = piece
        self._stores = list[Any]()
        self._free = deque[tuple[Any, int]]()
        self._threads = {
            move: ThreadPoolExecutor(1, f"activations {move}") for move in ("out", "in")
        }
        # moves that are complete, by direction
        self._totals: dict[str, _Totals] = dict.fromkeys(self._threads, (0, 0.0, 0.0))
        self._before = dict(self._totals)  # at the last restart

    def write(self, content: Sequence[Tensor]) -> tuple[_Place, Future[None]]:
        pieces = self._pieces(content)
        if (lacking := len(pieces) - len(self._free)) > 0:
            self._add_room(lacking)
        place = [self._free.popleft() for _ in pieces]
        return place, self._submit("out", place, pieces)

    def read(self, place: _Place, into: Sequence[Tensor]) -> Future[None]:
        return self._submit("in", place, self._pieces(into))

    def restart(self) -> None:
        self._before = dict(self._totals)

    def times(self) -> MoveTimes:
        means = [
            (now[column] - before[column]) / max(1, now[0] - before[0])
            for column in (1, 2)
            for now, before in zip(self._totals.values(), self._before.values(), strict=True)
        ]
        return MoveTimes(*means)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        for store in self._stores:
            store.close()

    def _add_room(self, count: int) -> None:
        self._stores.append(self._make_store([self._piece] * count))
        self._free.extend((self._stores[-1], item) for item in range(count))

    def _make_store(self, sizes: Sequence[int]) -> Any:
        raise NotImplementedError

    def _mark(self) -> Any:
        """Return a marker of the work after which a move may start."""

    def _copy(self, way: str, mark: Any, place: _Place, pieces: _Pieces) -> float:
        """Copy pieces to a place (out) or from it (in); return the seconds it took."""
        raise NotImplementedError

    def _submit(self, way: str, place: _Place, pieces: _Pieces) -> Future[None]:
        return self._threads[way].submit(self._run, way, self._mark(), place, pieces)

    def _run(self, way: str, mark: Any, place: _Place, pieces: _Pieces) -> None:
        worked = time.thread_time()
        took = self._copy(way, mark, place, pieces)
        pieces.clear()  # the thread holds them for a moment after its future is done
        if way == "in":  # not before: with a GPU the copies are complete when `_copy` returns
            self._free.extend(place)
        number, seconds, work = self._totals[way]
        self._totals[way] = number + 1, seconds + took, work + time.thread_time() - worked

    def _pieces(self, content: Sequence[Tensor]) -> _Pieces:
        """Cut bytes into pieces of equal size; return the tensors in each, and where they start."""
        pieces: _Pieces = []
        at = self._piece
        for tensor in content:
            start = 0
            while start < len(tensor):
                if at == self._piece:
                    pieces.append([])
                    at = 0
                stop = min(start + self._piece - at, len(tensor))
                pieces[-1].append((tensor[start:stop], at))
                at = at + stop - start
                start = stop
        return pieces


class FileTier(_PiecedTier):
    """A file in `folder` that grows as needed.

    Raises:
        HybridparError: From a future's `result`, if the disk is full.
    """

    def __init__(self, folder: Path):
        super().__init__(_PIECE)
        self._folder = folder
        # page-aligned buffers, which direct I/O requires
        self._bounce = {way: Region(self._piece) for way in self._threads}

    def _make_store(self, sizes: Sequence[int]) -> DiskStore:
        return DiskStore(self._folder, sizes)

    def _copy(self, way: str, mark: Any, place: _Place, pieces: _Pieces) -> float:
        start = time.perf_counter()
        bounce = self._bounce[way]
        for (store, item), piece in zip(place, pieces, strict=True):
            if way == "in":
                store.read(item, bounce.view)
            for part, at in piece:
                copy = bounce.tensor[at : at + len(part)]
                part.copy_(copy) if way == "in" else copy.copy_(part)
            if way == "out":
                store.write(item, bounce.view)
        return time.perf_counter() - start


def in_host_memory(device: torch.device) -> bool:
    """Return whether a device's activations go to its host's memory, rather than to a file."""
    return device.type == "cuda"


class HostTier(_PiecedTier):
    """Pinned host memory of a GPU, and a stream for each copy direction.

    Copies start after the work that the launch thread had queued before, and are complete when
    their future is done. The time of a move is the time of its copies on their stream: it includes
    neither the earlier work nor a thread's turn.

    Args:
        device: The GPU.
        num_bytes: Bytes of the micro-batches that are offloaded at once, each rounded by `rounded`.
            This much is allocated before training, because pinning memory takes long and may wait
            for all work on the GPU. More is allocated as needed.

    Raises:
        HybridparError: The host does not have enough memory.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0):
        super().__init__(_PINNED_PIECE)
        self._device = device
        self._work = host_work(device)
        if num_bytes:
            self._add_room(-(-num_bytes // self._piece))

    @staticmethod
    def rounded(num_bytes: int) -> int:
        """Return the bytes that the tier allocates for a micro-batch that keeps `num_bytes`."""
        return -(-num_bytes // _PINNED_PIECE) * _PINNED_PIECE

    def _make_store(self, sizes: Sequence[int]) -> HostStore:
        needed = sum(sizes)
        room = host_room()
        if needed > room:
            raise HybridparError(
                f"memory.offload_activations: offloaded activations need {needed >> 20:,} MiB "
                f"more host memory, and only {room >> 20:,} MiB are free; offload fewer "
                f"micro-batches"
            )
        return HostStore(sizes, self._device)

    def _mark(self) -> Any:
        return self._work.mark()

    def _copy(self, way: str, mark: Any, place: _Place, pieces: _Pieces) -> float:
        pairs = [
            (store.item(item)[at : at + len(part)], part)
            for (store, item), piece in zip(place, pieces, strict=True)
            for part, at in piece
        ]
        if way == "in":
            pairs = [(part, stored) for stored, part in pairs]
        with torch.no_grad(), self._work.reach(mark, way) as took:
            self._work.copy(pairs)
        return took.seconds
