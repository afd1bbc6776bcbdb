"""Open files of unknown origin: regular files only, whose size is checked before anything is read.

A pipe or a device in a file's place would make a reader hang, or never end. Files of a run folder
or of a checkpoint are opened with `within`, the folder, so that no symbolic link leads out of it.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from hybridpar.errors import HybridparError
from hybridpar.toml_advice import toml_advice

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BUFFER_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LIKE = 0.7
"""Similarity from which on another file's name counts as possibly meant, as difflib measures it,
without the suffix."""
_MOST_PARTS = 16
_MOST_LISTED = 1 << 14
"""Upper bound of the names of a folder that are looked at."""
_MOST_NAMED = 8
"""Upper bound of the runs that a message names."""
_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\[^\n]|[^"\\\n])*"|'[^'\n]*')"""
_TOML = re.compile(
    rf"""#[^\n]*|"{{3}}(?:\\.|[^\\])*?"{{3}}|'{{3}}.*?'{{3}}|(?P<open>"{{3}}|'{{3}})"""
    rf"""|(?P<key>{_PART}(?:[ \t]*\.[ \t]*{_PART})*)|(?P<quote>["'])""",
    re.DOTALL,
)
"""Text that can contain a dot, in turn: a comment, a multi-line string, an unterminated multi-line
string, a key with its parts (or a value that looks like one), an unterminated quote."""


def open_regular(path: Path, *, within: Path | None = None) -> FileIO:
    """Open a file for reading bytes, unbuffered and without blocking.

    Args:
        path: The file.
        within: A folder that contains `path`. A symbolic link may lead to another file in this
            folder, but not out of it. The folder itself may be a link. None: the user has named
            `path`, and links may lead anywhere.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    try:
        handle = os.open(path, _FLAGS) if within is None else _open_within(path, within)
    except ValueError:  # a name with a zero byte
        raise OSError(errno.EINVAL, "not a valid file name", repr(str(path))) from None
    file = FileIO(handle, "r")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _open_within(path: Path, folder: Path) -> int:
    """Return a descriptor of `path`. Raises: OSError, also if the path leads out of `folder`."""
    root = os.path.realpath(folder)
    inside = os.path.relpath(os.path.realpath(path), root)
    parts = Path(inside).parts
    if not parts or os.pardir in parts or os.path.isabs(inside):
        raise OSError(errno.ELOOP, "a symbolic link that leads out of its folder", str(path))
    # Each component is opened in its parent folder, so a link that replaces a component from now on
    # is refused.
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(parts[-1], _FLAGS | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)


def names_in(folder: Path, most: int) -> list[str]:
    """Return the names of a folder's entries in order, limited to the first `most` that the system
    lists.

    The list is empty if there is no such folder.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, most))
    except (OSError, ValueError):
        return []


class BoundedReader(BufferedReader):
    """A reader that allocates no more memory than its file has bytes, whatever sizes a damaged file
    claims.
    """

    def __init__(self, raw: FileIO):
        super().__init__(raw, _BUFFER_BYTES)
        self._size = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes; all remaining bytes without `size`."""
        left = max(self._size - self.tell(), 0)
        return super().read(left if size is None or not 0 <= size <= left else size)


@contextmanager
def errors_as(
    error: type[HybridparError],
    path: Path | str,
    damage: str = "",
    *others: type[Exception],
    failure: str = "cannot be read",
) -> Iterator[None]:
    """Convert errors in this context to `error`, which names the file: an OSError with `failure`, a
    ValueError or one of `others` with `damage`.
    """
    try:
        yield
    except OSError as found:
        raise error(f"{path}: {failure} ({reason(found)})") from None
    except Exception as found:
        if not damage or not isinstance(found, (ValueError, *others)):
            raise
        raise error(f"{path}: {damage} ({found})") from None


def read_limited(path: Path, most: int, *, within: Path | None = None) -> bytes:
    """Return all bytes of a file. Raises: OSError as `open_regular`; ValueError if it has more than
    `most` bytes.
    """
    with open_regular(path, within=within) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size} bytes; at most {most} are allowed")
        return file.read(size)


def nearest_path(path: Path) -> str:
    """Return the path that was probably meant by one that does not exist; empty if no path is
    similar.

    It lies in the same folder, or in a folder with a similar name. A ~ becomes the home folder,
    because a shell expands it at the beginning of a word only.
    """
    try:
        if str(path).startswith("~"):
            return str(path.expanduser())
        if path.exists():
            return ""
        if not path.parent.exists():
            parent = nearest_path(path.parent)
            inside = Path(parent, path.name)
            if not parent:
                return ""
            return str(inside) if inside.exists() else nearest_path(inside)
        known = os.listdir(path.parent)
    except (OSError, RuntimeError, ValueError):  # no home folder; a name with a zero byte
        return ""
    others = (path.with_name(name) for name in _like(path, known))
    # a dangling link is similar to itself
    return next((str(other) for other in others if other.exists()), "")


def _like(path: Path, known: list[str]) -> list[str]:
    """Return the names of files that `path` may stand for, the most similar first."""
    same = sorted(
        name for name in known if name.lower() == path.name.lower() or Path(name).stem == path.name
    )
    near = []
    for alike in (True, False):  # with the same suffix first
        stems = {
            Path(name).stem: name for name in known if (Path(name).suffix == path.suffix) is alike
        }
        near += [stems[stem] for stem in difflib.get_close_matches(path.stem, stems, cutoff=_LIKE)]
    return [*same, *near]


def runs_in(folder: Path) -> list[str]:
    """Return the names of the run folders in a folder, in order."""
    return [
        name for name in names_in(folder, _MOST_LISTED) if (folder / name / "config.toml").is_file()
    ]


def runs_near(path: Path) -> str:
    """Return the run folders that may have been meant by a path that is not one, in words; empty if
    there are none.

    They are searched in the path, in its parent, and in runs, which is the default of run.dir. The
    most similar come first.
    """
    for folder in dict.fromkeys((path, path.parent, Path("runs"))):
        if names := runs_in(folder):
            near = difflib.get_close_matches(path.name, names)
            runs = [str(folder / name) for name in dict.fromkeys([*near, *names])]
            more = len(runs) - _MOST_NAMED
            return ", ".join(runs[:_MOST_NAMED]) + (
                f" or {more} more in {folder}" if more > 0 else ""
            )
    return ""


def reason(error: Exception) -> str:
    """Return the message of a read error without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_text(path: Path, most: int, *, within: Path | None = None) -> str:
    """Return a file as text, without a byte order mark. Raises: OSError; ValueError if it is too
    large or not UTF-8.
    """
    content = read_limited(path, most, within=within)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_not_text(content, error.start)) from None


def _not_text(content: bytes, start: int) -> str:
    """Return why bytes are not UTF-8 text. start: the first invalid byte."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16 text; save it as UTF-8"
    if b"\0" in content:
        return "it is a binary file, not text"
    line = content.count(b"\n", 0, start) + 1
    column = start - content.rfind(b"\n", 0, start)
    return (
        f"line {line}, column {column}: byte 0x{content[start]:02x} is not UTF-8; save the file as "
        "UTF-8"
    )


def read_json(path: Path, most: int, *, within: Path | None = None) -> Any:
    """Return the value in a JSON file. Raises: OSError; ValueError, also if it is too large or
    nested too deeply.
    """
    return parse_json(read_limited(path, most, within=within), dict)


def parse_json(
    text: str | bytes, make: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text; `make` creates its objects.

    Raises:
        ValueError: Also if it is nested too deeply or, without `make`, if an object has a key
            twice.
    """
    try:
        return json.loads(text, object_pairs_hook=make or _object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def to_json(value: Any, **layout: Any) -> str:
    """Return JSON with null for numbers that are not finite, which JSON does not have. layout:
    arguments of json.dumps.
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(value), **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_toml(path: Path, most: int, *, within: Path | None = None) -> dict[str, Any]:
    """Return the content of a TOML file. Raises: OSError; ValueError, also if it is too large or a
    key is nested too deeply; RecursionError.
    """
    text = read_text(path, most, within=within)
    _check_keys(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(toml_advice(text, str(error))) from None


def _check_keys(text: str) -> None:
    """Reject keys of very many parts, because the parser's time is quadratic in their number.

    Raises:
        ValueError: There is such a key.
    """
    for found in _TOML.finditer(text):
        if found["open"] or found["quote"]:
            return  # the parser stops there
        if (
            (key := found["key"])
            and key.count(".") >= _MOST_PARTS
            and len(re.findall(_PART, key)) > _MOST_PARTS
        ):
            line = text.count("\n", 0, found.start()) + 1
            raise ValueError(f"the key at line {line} has more than {_MOST_PARTS} parts")
