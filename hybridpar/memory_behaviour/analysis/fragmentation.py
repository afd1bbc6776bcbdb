"""Memory that a caching allocator reserves for a trace: a model of torch's CUDA allocator, driven
by mallocs and frees.

sizes       rounded up to 512 bytes
pools       up to 1 MiB: segments of 2 MiB; above: of 20 MiB for less than 10 MiB, else the size
            in steps of 2 MiB
a malloc    takes the smallest free block that is large enough, at the lowest address among
            equals, and leaves the rest free if it is at least 512 bytes in small segments, or
            more than 1 MiB in large ones
a free      joins the block with free neighbours in its segment; segments stay reserved
a limit     if a new segment would exceed it, all unused segments are released first

One stream, and the allocator's default settings: without max_split_size_mb and expandable segments.

Source: torch's c10/cuda/CUDACachingAllocator.cpp, and c10/core/AllocatorConfig.h of torch 2.13.
Units: bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridpar.memory_behaviour.events import MemoryEvent, What

ROUND = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LEAST_OWN_SEGMENT = 10 << 20
SEGMENT_STEP = 2 << 20


@dataclass(frozen=True)
class Usage:
    """Peak bytes that the allocator reserves, and peak bytes of blocks.

    `fits`: whether the limit was kept; False means that the replay ended where it could not be.
    """

    reserved: int
    largest_live: int
    fits: bool = True


def replay(events: Iterable[MemoryEvent], limit: int | None = None) -> Usage:
    """Return the memory that the modelled allocator reserves for these events; reads and writes do
    not matter.

    Needs memory for living blocks and free pieces.

    Args:
        events: The events.
        limit: Bytes that the allocator may reserve.
    """
    allocator = _Allocator(limit)
    live = largest = 0
    pieces: dict[int, _Piece] = {}
    for event in events:
        if event.what is What.MALLOC and event.num_bytes:
            piece = allocator.malloc(event.num_bytes)
            if piece is None:
                return Usage(allocator.most_reserved, largest, fits=False)
            pieces[event.block] = piece
            live += event.num_bytes
            largest = max(largest, live)
        elif event.what is What.FREE and event.num_bytes:
            allocator.free(pieces.pop(event.block))
            live -= event.num_bytes
    return Usage(allocator.most_reserved, largest)


def round_up(num_bytes: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-num_bytes // step) * step


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a segment, with its neighbours there."""

    size: int
    address: int
    pool: _Pool
    used: bool = False
    before: _Piece | None = None
    after: _Piece | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """Free pieces sorted by size and address. `split`: smallest remainder in bytes that is split
    off."""

    split: int
    free: list[tuple[int, int]] = field(default_factory=list)
    at: dict[int, _Piece] = field(default_factory=dict)

    def add(self, piece: _Piece) -> None:
        piece.used = False
        insort(self.free, (piece.size, piece.address))
        self.at[piece.address] = piece

    def remove(self, piece: _Piece) -> None:
        del self.free[bisect_left(self.free, (piece.size, piece.address))]
        del self.at[piece.address]

    def best(self, size: int) -> _Piece | None:
        """Return the smallest free piece of at least `size` bytes."""
        index = bisect_left(self.free, (size, -1))
        return self.at[self.free[index][1]] if index < len(self.free) else None


class _Allocator:
    def __init__(self, limit: int | None):
        self._limit = limit
        self._end = 0
        self._small = _Pool(ROUND)
        self._large = _Pool(SMALL + 1)
        self._reserved = self.most_reserved = 0

    def malloc(self, num_bytes: int) -> _Piece | None:
        """Return a piece, or None if it does not fit under the limit."""
        size = round_up(num_bytes, ROUND)
        pool = self._small if size <= SMALL else self._large
        piece = pool.best(size)
        if piece is not None:
            pool.remove(piece)
        elif (piece := self._segment(size, pool)) is None:
            return None
        piece.used = True
        if piece.size - size >= pool.split:
            rest = _Piece(
                piece.size - size, piece.address + size, pool, before=piece, after=piece.after
            )
            if rest.after is not None:
                rest.after.before = rest
            piece.size = size
            piece.after = rest
            pool.add(rest)
        return piece

    def free(self, piece: _Piece) -> None:
        pool = piece.pool
        if (before := piece.before) is not None and not before.used:
            pool.remove(before)
            piece.address = before.address
            piece.size = before.size + piece.size
            piece.before = before.before
            if piece.before is not None:
                piece.before.after = piece
        if (after := piece.after) is not None and not after.used:
            pool.remove(after)
            piece.size = piece.size + after.size
            piece.after = after.after
            if piece.after is not None:
                piece.after.before = piece
        pool.add(piece)

    def _segment(self, size: int, pool: _Pool) -> _Piece | None:
        wanted = segment_bytes(size)
        if self._limit is not None and self._reserved + wanted > self._limit:
            self._release()
            if self._reserved + wanted > self._limit:
                return None
        piece = _Piece(wanted, self._end, pool)
        self._end += wanted
        self._reserved += wanted
        self.most_reserved = max(self.most_reserved, self._reserved)
        return piece

    def _release(self) -> None:
        """Release every segment that is one free piece."""
        for pool in (self._small, self._large):
            for piece in [
                piece for piece in pool.at.values() if piece.before is None and piece.after is None
            ]:
                pool.remove(piece)
                self._reserved -= piece.size


def segment_bytes(size: int) -> int:
    """Return the bytes of the segment that is reserved for a rounded size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else round_up(size, SEGMENT_STEP)
