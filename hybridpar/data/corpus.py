"""Read documents from files, folders, patterns, Hugging Face datasets, or the source text of the
Python standard library.

A source is 'stdlib', a file, a folder (all files below it with one of SUFFIXES), a folder that
`datasets` has saved (its selected rows, in order), or a pattern such as 'books/*.txt'. The first
bytes of a file decide its format (formats.py): plain text is one document; in other formats each
record has one, under `text_key`. The files of a folder, a pattern or the standard library are
ordered by a hash of their names. The order is always the same, yet any part is a fair sample, so
the end of a corpus can serve for validation. Empty documents are left out.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hybridpar.data.files.bad_records import BadRecords
from hybridpar.data.files.columns import SavedDataset, saved_dataset
from hybridpar.data.files.formats import SUFFIXES
from hybridpar.data.files.pieces import Ends, Part
from hybridpar.data.files.readers import Sized, detect_format, read_file, read_saved
from hybridpar.data.files.record_place import TextFrom
from hybridpar.errors import DataError, shown
from hybridpar.reading import errors_as, nearest_path

STDLIB = "stdlib"
TEXT_KEY = "text"
_ANY = "name a file or folder that has text or conversations, or stdlib"
_LEFT_OUT = {"encodings", "pydoc_data", "test", "tests", "idle_test"}
"""Folders of the standard library that are not text to learn from: tables of character codes, help
texts as data, and Python's own tests, which are half of the source and which some systems install
apart."""
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "_bundled"}
_MACHINE_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a corpus."""

    path: Path
    name: str
    optional: bool = False
    """The file belongs to the standard library, whose few files that are not UTF-8 are left out."""
    named: bool = False
    """The user named this very file, so it must not be empty."""
    text_key: str = TEXT_KEY
    """The field or column with the text, if the format has any."""
    selects_from: tuple[Path, ...] = ()
    """Arrow files whose rows this file of indices selects; empty if the file has the text
    itself."""


def source_files(source: str | Path, text_key: str = TEXT_KEY) -> list[SourceFile]:
    """Return the files of one source, in reading order.

    Raises:
        DataError: There are none.
    """
    text = str(source)
    if text == STDLIB:
        return _stdlib_files()
    path = Path(text)
    if path.is_file():
        _check_alone([path])
        return [SourceFile(path, path.name, named=True, text_key=text_key)]
    if (dataset := saved_dataset(path)) is not None:
        return _dataset_files(dataset, text_key)
    if path.is_dir():
        found = _folder_files(path, text_key)
        plain = [suffix for suffix in SUFFIXES if suffix.count(".") == 1]
        rule = f"contains no files ending in {', '.join(plain)} (or one of these plus .gz or .zst)"
    else:
        matches = [p for p in map(Path, glob.glob(text, recursive=True)) if p.is_file()]
        _check_alone(matches)
        found = [SourceFile(p, p.as_posix(), text_key=text_key) for p in matches]
        rule = (
            "matches no file"
            if glob.has_magic(text)
            else "does not exist, and neither do .bin/.idx files with this prefix"
        )
    if not found:
        if text == "-" or (path.exists() and not path.is_dir()):
            raise DataError(
                f"{text}: is not a regular file; a corpus is read more than once, so save the "
                f"text in a file"
            )
        near = nearest_path(path) or next(iter(get_close_matches(text, [STDLIB])), "")
        raise DataError(f"{text}: {rule}; " + (f"try {near}" if near else _ANY))
    return sorted(found, key=_shuffled)


def _folder_files(root: Path, text_key: str) -> list[SourceFile]:
    """Return the files below a folder that may hold text; for a dataset in it, the files that
    naming its own folder would give."""
    found: list[SourceFile] = []
    for folder, names, files in _folders(root):
        if (dataset := saved_dataset(folder)) is not None:
            names.clear()  # the dataset lists its own files below it
            found += _dataset_files(dataset, text_key, root)
            continue
        found += [
            SourceFile(path, path.relative_to(root).as_posix(), text_key=text_key)
            for path in files
            if path.name.lower().endswith(SUFFIXES)
        ]
    return found


def _dataset_files(
    dataset: SavedDataset, text_key: str, root: Path | None = None
) -> list[SourceFile]:
    """Return the files of a dataset, each with its name below `root` (None: its own name)."""
    files = dataset.indices or dataset.files
    selects_from = tuple(dataset.files) if dataset.indices else ()
    return [
        SourceFile(
            path,
            path.name if root is None else path.relative_to(root).as_posix(),
            text_key=text_key,
            selects_from=selects_from,
        )
        for path in files
    ]


def _check_alone(paths: Sequence[Path]) -> None:
    """Raise a DataError for a file of a dataset whose other files select its rows."""
    for folder, path in {path.parent: path for path in paths if path.suffix == ".arrow"}.items():
        dataset = saved_dataset(folder)
        if dataset is not None and dataset.indices:
            raise DataError(
                f"{path}: is a file of a Hugging Face dataset, of which "
                f"{shown(dataset.indices[0].name)} selects rows; name the folder {folder}"
            )


def corpus_files(sources: Sequence[str | Path], text_key: str = TEXT_KEY) -> list[SourceFile]:
    """Return the files of all sources.

    Raises:
        DataError: A source has no files.
    """
    return [file for source in sources for file in source_files(source, text_key)]


def corpus_key(files: Sequence[SourceFile]) -> str:
    """Return a hash that changes when a file is added, removed or modified (by names, sizes and
    times; contents are not read).

    Raises:
        DataError: A file cannot be accessed.
    """
    digest = hashlib.sha256()
    for file in files:
        status = _status(file.path)
        digest.update(
            json.dumps([file.name, file.text_key, status.st_size, status.st_mtime_ns]).encode()
        )
        for path in file.selects_from:
            status = _status(path)
            digest.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Return the size of all files together.

    Raises:
        DataError: A file cannot be accessed.
    """
    paths = {path for file in files for path in (file.path, *file.selects_from)}
    return sum(_status(path).st_size for path in paths)


def read_parts(
    files: Sequence[SourceFile],
    max_bytes: int | None = None,
    bad: BadRecords | None = None,
    text_from: TextFrom | None = None,
) -> Iterator[Part]:
    """Yield the documents of the files in parts, until there are `max_bytes` of text (None: all).
    Empty documents are left out.

    Args:
        bad: Told of records that cannot be read, such as ones without text under the file's
            `text_key`. None: the first one is an error.
        text_from: Makes the text of a record; None: it is under the file's `text_key`.

    Raises:
        DataError: A file or record cannot be read, a file that the user named is empty, or there is
            no document. Names the file, its format, and the line.
    """
    bad = bad or BadRecords()
    taken = 0
    begins = True
    formats: set[str] = set()
    for file in files:
        for part, num_bytes in _read(file, formats, bad, text_from):
            if max_bytes is not None and taken and taken + num_bytes > max_bytes:
                if not begins:
                    yield Part("", Ends.DOCUMENT)
                return
            taken += num_bytes
            begins = bool(part.ends)
            yield part
    if not taken:
        what = f" ({', '.join(sorted(formats))})" if formats else ""
        skipped = (
            f"; {bad.count} bad records were left out, such as {bad.first[0]}" if bad.count else ""
        )
        kind = "conversations" if text_from else "text"
        where = "it" if len(files) == 1 else f"{len(files)} files"
        raise DataError(
            f"{', '.join(file.name for file in files[:3])}: no {kind} in {where}{what}{skipped}; "
            f"{_ANY}"
        )


def check_source(source: str | Path, text_key: str) -> None:
    """Check that a source exists, and that its first file can be read and is not empty.

    Raises:
        DataError: One of these is not so.
    """
    first = source_files(source, text_key)[0]
    if not first.optional:
        found = detect_format((*first.selects_from, first.path)[0], text_key)
        if found is None and first.named:
            raise _is_empty(first.path)


def _is_empty(path: Path) -> DataError:
    return DataError(f"{path}: is empty; {_ANY}")


def _read(
    file: SourceFile, formats: set[str], bad: BadRecords, text_from: TextFrom | None
) -> Iterator[Sized]:
    """Yield the documents of a file, and add its format to `formats`."""
    if file.selects_from:
        formats.add("Arrow by indices")
        yield from read_saved(file.path, file.selects_from, file.text_key, bad, text_from)
        return
    found = detect_format(file.path, file.text_key)
    if found is None:
        if file.named:
            raise _is_empty(file.path)
        return
    formats.add(str(found))
    bad = BadRecords(skips=True) if file.optional else bad
    yield from read_file(file.path, file.text_key, found, bad, text_from)


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for _, names, files in _folders(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        paths += files
    found = [
        SourceFile(p, p.relative_to(root).as_posix(), optional=True)
        for p in paths
        if p.suffix == ".py" and not p.name.startswith(_MACHINE_FILES)
    ]
    if not found:
        raise DataError(
            f"{root}: this Python's standard library has no source files; name text files as "
            f"the corpus"
        )
    return sorted(found, key=_shuffled)


def _folders(root: Path) -> Iterator[tuple[Path, list[str], list[Path]]]:
    """Yield the folders from `root` on, except hidden ones and installed Python packages.

    Each comes with the names of its subfolders still to be visited, which the caller may remove,
    and with its files, except hidden ones and links.
    """
    for name, names, files in os.walk(root):
        folder = Path(name)
        names[:] = [
            n for n in names if n not in _FOREIGN_FOLDERS and not n.startswith((".", "config-"))
        ]
        paths = [folder / file for file in files if not file.startswith(".")]
        yield folder, names, [path for path in paths if not path.is_symlink()]


def _shuffled(file: SourceFile) -> tuple[bytes, str]:
    return hashlib.blake2s(file.name.encode("utf-8", "surrogateescape")).digest(), file.name


def _status(path: Path) -> os.stat_result:
    with errors_as(DataError, path):
        return path.stat()
