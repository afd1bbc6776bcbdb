"""The slow tier of a rank's state; on a machine without a GPU one file, read and written past the
page cache.

The file has no name, so a killed run leaves nothing behind, and a restart does not depend on it.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from hybridpar.errors import HybridparError

PAGE = mmap.PAGESIZE
_PIECE = 4 << 20
_THREADS = 4
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def padded(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Store:
    """The slow tier; the base class is a slow tier without items."""

    def read(self, item: int, into: Any) -> None:
        """Read an item."""
        raise NotImplementedError

    def write(self, item: int, content: Any) -> None:
        """Write an item's content."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the space."""


class DiskStore(Store):
    """Space for items of these sizes (bytes) in a file in `folder`, zeros until written.

    Reads and writes are of whole pages, in pieces that several threads move at a time.

    Raises:
        HybridparError: Names the folder, if it is full or cannot be written to.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]):
        self.folder = folder
        self._sizes = [padded(size) for size in sizes]
        *self._offsets, self.num_bytes = accumulate(self._sizes, initial=0)
        self._threads = ThreadPoolExecutor(_THREADS, "slow tier")
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # on Linux this file never has a name
            with tempfile.TemporaryFile(prefix="state.", dir=folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
            if self.num_bytes:
                os.posix_fallocate(self._file, 0, self.num_bytes)
            self._direct = self._go_direct()
        except OSError as error:
            self.close()
            raise self._failure("make the file of the state", error) from None

    def _go_direct(self) -> bool:
        """Reopen the file past the page cache; return False if its file system cannot do that."""
        try:
            direct = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno in _NO_DIRECT:
                return False
            raise
        os.close(self._file)
        self._file = direct
        return True

    def read(self, item: int, into: memoryview) -> None:
        """Read an item into whole pages, from a page boundary on. Raises: HybridparError."""
        self._move(os.preadv, "read", item, into)

    def write(self, item: int, content: memoryview) -> None:
        """Write an item's content. Raises: HybridparError."""
        self._move(os.pwritev, "write", item, content)

    def _move(self, call: object, what: str, item: int, memory: memoryview) -> None:
        at = self._offsets[item]
        size = self._sizes[item]
        assert memory.nbytes == size, (memory.nbytes, size)

        def piece(start: int) -> None:
            stop = min(start + _PIECE, size)
            while start < stop:
                moved = call(self._file, [memory[start:stop]], at + start)  # type: ignore[operator]
                if moved <= 0:
                    raise OSError(errno.EIO, "nothing was moved")
                start += moved

        try:
            if size <= _PIECE:  # waking threads would take longer
                piece(0)
            for done in [
                self._threads.submit(piece, start)
                for start in range(0, size, _PIECE)
                if size > _PIECE
            ]:
                done.result()
            if not self._direct:
                os.posix_fadvise(self._file, at, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failure(f"{what} a part of the state", error) from None

    def _failure(self, what: str, error: OSError) -> HybridparError:
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            room = (
                f"; it takes {self.num_bytes / 1e9:.3g} GB: make room, or set memory.folder to a "
                "folder that has it"
            )
        return HybridparError(f"{self.folder}: cannot {what}: {error}{room}")

    def close(self) -> None:
        self._threads.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
