"""Memory at fixed addresses, whose pages are allocated, freed, and moved from one region to
another.

The kernel zeroes a page that it hands out. Reading a file into such pages takes eight times the CPU
time of reading into pages in use, so a region takes over the pages that another one gives up.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

from hybridpar.state.residency.store import padded

HUGE_PAGE = 2 << 20
# flags of mremap, Linux 5.7
_MAYMOVE = 1
_FIXED = 2
_DONTUNMAP = 4


class Region:
    """Memory at a fixed address that is allocated and freed.

    It starts at a huge page boundary, so that regions have equally sized `pieces`.

    Attributes:
        tensor: A view of the memory, as bytes, in whole pages.
        pieces: Address and bytes of each huge page, and of the rest.
    """

    def __init__(self, num_bytes: int):
        size = padded(max(num_bytes, 1))
        ahead = HUGE_PAGE if size >= HUGE_PAGE else 0
        self._map = mmap.mmap(-1, size + ahead, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._start = -address % HUGE_PAGE if ahead else 0
        self.view = memoryview(self._map)[self._start : self._start + size]
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, offset=self._start, count=size)
        address += self._start
        self.pieces = tuple(
            (address + at, min(HUGE_PAGE, size - at)) for at in range(0, size, HUGE_PAGE)
        )
        # The kernel merges adjacent mappings, and a huge page across two of them would be allocated
        # with either.
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        if whole := size // HUGE_PAGE * HUGE_PAGE:
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, whole)

    def another(self) -> Region:
        return Region(len(self.view))

    def clear(self) -> None:
        self.tensor.zero_()

    def give_back(self) -> None:
        """Free the memory. It reads as zeros when it is next used."""
        self._map.madvise(mmap.MADV_DONTNEED, self._start, len(self.view))


class Spare:
    """Takes over the memory of regions that items give up, and frees it."""

    def add(self, region: Any) -> None:
        """Take over the memory of a region, whose content becomes void."""
        region.give_back()

    def hand_to(self, region: Any) -> None:
        """Give memory to a region without any; its content is undefined."""
        region.take()

    def shrink_to(self, num_bytes: int) -> None:
        """Free all memory beyond this many bytes."""


class SparePages(Spare):
    """Pages that regions have given up, kept until another region takes them. Regions must live as
    long as this object.

    Attributes:
        num_bytes: Bytes of these pages.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, None]] = {}  # addresses, by bytes
        self.num_bytes = 0

    def add(self, region: Region) -> None:
        if _kernel() is None:
            region.give_back()
            return
        for address, num_bytes in region.pieces:
            self._pieces.setdefault(num_bytes, {})[address] = None
        self.num_bytes += len(region.view)

    def hand_to(self, region: Region) -> None:
        for address, num_bytes in region.pieces:
            if found := self._pieces.get(num_bytes):
                source = address if address in found else next(reversed(found))
                del found[source]
                self.num_bytes -= num_bytes
                if source != address:
                    _move(source, address, num_bytes)

    def shrink_to(self, num_bytes: int) -> None:
        for size, found in self._pieces.items():
            while found and self.num_bytes > num_bytes:
                _free(next(iter(found)), size)
                del found[next(iter(found))]
                self.num_bytes -= size


@cache
def _kernel() -> ctypes.CDLL | None:
    """Return the C library; None if it cannot move pages."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mremap"):
        return None
    library.mremap.restype = library.mmap.restype = ctypes.c_void_p
    library.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _move(source: int, target: int, num_bytes: int) -> None:
    """Move pages to an address that has none. If the kernel cannot move them, they are freed."""
    kernel = _kernel()
    assert kernel is not None
    if (
        kernel.mremap(source, num_bytes, num_bytes, _MAYMOVE | _FIXED | _DONTUNMAP, target)
        == target
    ):
        return
    # the failed call may have unmapped the target
    _free(source, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    found = kernel.mmap(target, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if found != target:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {ctypes.get_errno()}")


def _free(address: int, num_bytes: int) -> None:
    kernel = _kernel()
    assert kernel is not None
    kernel.madvise(address, num_bytes, mmap.MADV_DONTNEED)
