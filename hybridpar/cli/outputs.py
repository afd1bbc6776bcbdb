"""Output files that flags name: checked before the command does anything slow, and replaced
atomically."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import config_error


def check_outputs(read: Iterable[str | Path], **paths: str | None) -> None:
    """Check that the files that flags name can be written, and leave no trace.

    Args:
        read: The files that the command reads; no output may replace them.
        **paths: The path by flag; None if the flag is not used.

    Raises:
        ConfigError: A file cannot be written.
    """
    taken = {
        os.path.realpath(path): "is what is read, and would be lost" for path in read if str(path)
    }
    for flag, path in paths.items():
        if path is None:
            continue
        with _naming(flag, path):
            place = _place(path)
            _try(place)
        if rule := taken.get(str(place)):
            raise config_error(
                flag, path, rule, str(Path(path).with_name(f"new-{Path(path).name}"))
            )
        if not _is_special(place):
            taken[str(place)] = f"is what {flag} writes"


def write_output(flag: str, path: str, content: str | bytes) -> None:
    """Write the file that a flag names, creating its folders and following a symbolic link.

    Raises:
        ConfigError: The file cannot be written.
    """
    from hybridpar.checkpoint.format.files import as_bytes, write_bytes

    with _naming(flag, path):
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place, as_bytes(content) if isinstance(content, str) else content)


@contextmanager
def _naming(flag: str, path: str) -> Iterator[None]:
    """Turn the system's error about a path into an error that names the flag."""
    try:
        yield
    except IsADirectoryError:
        raise config_error(flag, path, "is a folder, not a file", str(Path(path, "FILE"))) from None
    except OSError as error:
        works = str(Path(tempfile.gettempdir(), Path(path).name[:32]))
        raise config_error(flag, path, f"cannot be written ({error.strerror})", works) from None


def _place(path: str) -> Path:
    return Path(path if _is_special(Path(path)) else os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """Return whether the path is neither a file nor a folder, such as a device or a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _try(place: Path) -> None:
    """Raise OSError if no file can be written at `place`."""
    if place.is_dir():
        raise IsADirectoryError
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not _is_special(place):
        folder = next(parent for parent in place.parents if parent.exists())
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{place.name}."):
            pass
