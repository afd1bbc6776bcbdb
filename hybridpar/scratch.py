"""Temporary folders that do not outlive their processes for long: each process removes the folders
that killed processes have left.

    <prefix>.<kernel>.<random>     locked by the process that made it, as long as it and its forks
                                   live

A process that creates a folder first removes unlocked folders of the same prefix and user. Locks of
a folder are visible to the processes of one running kernel, whatever the file system is. So a
folder of another kernel, which is on another machine or from before a reboot, is removed if nothing
in it has changed for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_UNCHANGED_S = 24 * 3600.0


@contextlib.contextmanager
def scratch_folder(prefix: str = "hybridpar", parent: Path | None = None) -> Iterator[Path]:
    """Create a folder below `parent` (None: the system's temporary folder), and remove it with its
    content at the end of the context.

    Raises:
        OSError: It cannot be created.
    """
    parent = parent or Path(tempfile.gettempdir())
    stem = f"{prefix}.{_kernel()}."
    remove_left_folders(prefix, parent)
    path, lock = _make(stem, parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_left_folders(prefix: str, parent: Path) -> None:
    """Remove folders below `parent` that killed processes of this user made with that prefix."""
    pattern = re.compile(rf"{re.escape(prefix)}\.(?P<kernel>[0-9a-f]{{32}})\.[a-z0-9_]{{8}}")
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            name = pattern.fullmatch(entry.name)
            if name is not None:
                with contextlib.suppress(OSError, ImportError):
                    _remove_if_left(Path(entry.path), is_ours=name["kernel"] == _kernel())


def _make(stem: str, parent: Path) -> tuple[Path, int]:
    """Create and lock a folder; return it and the handle of its lock. Another process may remove a
    folder before it is locked; then another one is created.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=stem, dir=parent))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            handle = _open(path)
            try:
                _lock(handle)
            except BlockingIOError:
                os.close(handle)
                raise
            except (OSError, ImportError):  # without locks no process can remove it either
                return path, handle
            if _is_same(path, handle):
                return path, handle
            os.close(handle)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))


def _lock(handle: int) -> None:
    """Lock a folder. Raises: BlockingIOError if another process has it; OSError or ImportError
    without locks.
    """
    fcntl = importlib.import_module("fcntl")
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same(path: Path, handle: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    return False


def _remove_if_left(path: Path, *, is_ours: bool) -> None:
    """Remove a folder of this user that no process uses. Raises: OSError if a process does;
    ImportError without locks.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    if not is_ours and time.time() - _last_change(path) < _UNCHANGED_S:
        return
    handle = _open(path)
    try:
        _lock(handle)
        if _is_same(path, handle):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _last_change(path: Path) -> float:
    """Return the time of the last change in a folder, in seconds since 1970. Raises: OSError."""
    return max(one.lstat().st_mtime for one in (path, *path.rglob("*")))


def _kernel() -> str:
    """Return a name of the running kernel, 32 hexadecimal digits: its boot id, or a hash of the
    host's name.
    """
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        name = ""
    if re.fullmatch("[0-9a-f]{32}", name):
        return name
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]
