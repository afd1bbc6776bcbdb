"""Files and folders that appear completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import CheckpointError, config_error
from hybridpar.reading import reason


def as_bytes(text: str) -> bytes:
    """Encode a text as UTF-8. Undecodable bytes of file names in it stay what they are."""
    return text.encode("utf-8", "surrogateescape")


def write_text(path: Path, text: str) -> None:
    """Write a text as `write_bytes` does."""
    write_bytes(path, as_bytes(text))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place, so that no reader and no crash meets half of it.

    A device or a pipe is written to directly.

    Raises:
        OSError: The file is unchanged then.
    """
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
    """Yield a folder beside `path` to write into, and rename it to `path` at the end; remove it if
    the block fails.

    Raises:
        ConfigError: `path` has content already.
        CheckpointError: `path` cannot be written.
    """
    given = path
    path = path.absolute()
    aside = path.with_name(f".{path.name}.part")
    try:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise config_error(
                "output", str(given), "exists already, and is not overwritten", f"{path}-2"
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
    """Make a file's content, or a folder's list of names, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(path: Path) -> None:
    """Ask the system to drop a synced file from its cache, so that the next reader reads the
    disk."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
