"""Files and folders that are there completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import CheckpointError, config_error
from hybridpar.reading import reason


def as_bytes(text: str) -> bytes:
    """Encode a text as UTF-8; the name of a file in it may have other bytes, which stay what they
    are."""
    return text.encode("utf-8", "surrogateescape")


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it there, so that a reader or a crash never meets
    half of it.

    A device or a pipe is written into: it stays what it is. Raises: OSError, and nothing has
    changed then.
    """
    content = as_bytes(text)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into, which then becomes it; removed where that fails.

    Raises: ConfigError if `path` holds something already; CheckpointError if it cannot be written.
    """
    given = path
    path = path.absolute()
    aside = path.with_name(f".{path.name}.part")
    try:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise config_error(
                "output", str(given), "is there already, and nothing is overwritten", f"{path}-2"
            )
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        if path.is_dir():
            path.rmdir()
        aside.rename(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({reason(error)}); name another folder"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's list of names, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(path: Path) -> None:
    """Has the next reader of a file that was synced read it from its disk, where the system takes
    such a hint."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
