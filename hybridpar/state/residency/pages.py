"""Memory at fixed addresses, whose pages are taken, given back, and handed from one region to
another.

The kernel clears a page that it gives out. Reading into such pages takes eight times the CPU time
of reading into pages in use, so a region takes the pages that another one gives up.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpar.state.residency.store import padded

HUGE_PAGE = 2 << 20
# of mremap, Linux 5.7
_MAYMOVE = 1
_FIXED = 2
_DONTUNMAP = 4


class AnyRegion(Protocol):
    """Memory that is taken and given back. tensor: all of it, in bytes, in whole pages. view: as
    its store has it."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def view(self) -> Any: ...
    def another(self) -> AnyRegion:
        """One of the same size, of zeros."""

    def clear(self) -> None:
        """Makes it zeros."""


class Region:
    """Memory at one address that is taken and given back. tensor: a view of it, in bytes, in whole
    pages.

    It begins at a huge page, so regions have like `pieces`: address and bytes of each huge page and
    of the rest.
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
        # mappings that touch are one to the kernel, and a huge page across both would come with
        # either
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        if whole := size // HUGE_PAGE * HUGE_PAGE:
            self._map.madvise(mmap.MADV_HUGEPAGE, self._start, whole)

    def another(self) -> Region:
        return Region(len(self.view))

    def clear(self) -> None:
        self.tensor.zero_()

    def give_back(self) -> None:
        """Frees the memory. It reads as zeros when it is next used."""
        self._map.madvise(mmap.MADV_DONTNEED, self._start, len(self.view))


class SparePages:
    """Pages that regions have given up, kept until another region takes them.

    num_bytes: of these pages. Regions must live as long as this.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, None]] = {}  # addresses, by bytes
        self.num_bytes = 0

    def add(self, region: Region) -> None:
        """Takes over the pages of a region, whose content is void."""
        if _kernel() is None:
            region.give_back()
            return
        for address, num_bytes in region.pieces:
            self._pieces.setdefault(num_bytes, {})[address] = None
        self.num_bytes += len(region.view)

    def hand_to(self, region: Region) -> None:
        """Gives a region without pages as many as it takes; their content is anything."""
        for address, num_bytes in region.pieces:
            if found := self._pieces.get(num_bytes):
                source = address if address in found else next(reversed(found))
                del found[source]
                self.num_bytes -= num_bytes
                if source != address:
                    _move(source, address, num_bytes)

    def shrink_to(self, num_bytes: int) -> None:
        """Gives the kernel all pages beyond these bytes."""
        for size, found in self._pieces.items():
            while found and self.num_bytes > num_bytes:
                _free(next(iter(found)), size)
                del found[next(iter(found))]
                self.num_bytes -= size


@cache
def _kernel() -> ctypes.CDLL | None:
    """The C library, where it can move pages."""
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
    """Moves pages to an address that has none; where the kernel does not, they are freed."""
    kernel = _kernel()
    assert kernel is not None
    if (
        kernel.mremap(source, num_bytes, num_bytes, _MAYMOVE | _FIXED | _DONTUNMAP, target)
        == target
    ):
        return
    # what failed may have unmapped the target
    _free(source, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    found = kernel.mmap(target, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if found != target:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {ctypes.get_errno()}")


def _free(address: int, num_bytes: int) -> None:
    kernel = _kernel()
    assert kernel is not None
    kernel.madvise(address, num_bytes, mmap.MADV_DONTNEED)
