"""Documents from files, folders, patterns, Hugging Face datasets, or the Python standard library's own source text.

A source is 'stdlib', a file, a folder (all files below it with one of SUFFIXES), a folder that `datasets` has saved, or
a pattern such as 'books/*.txt'. A file is what its first bytes say (formats.py): plain text is one document, in other
formats each record holds one, under `text_key`. The files of a folder, a pattern or the standard library come in the
order of a hash of their names: always the same, yet any stretch is a fair sample, so that the end of a corpus can serve
for validation. Empty documents are left out.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridpar.data.columns import dataset_files
from hybridpar.data.formats import SUFFIXES
from hybridpar.data.pieces import Ends, Part
from hybridpar.data.readers import Sized, detect_format, read_file
from hybridpar.errors import DataError
from hybridpar.reading import errors_as, nearest_path

STDLIB = "stdlib"
TEXT_KEY = "text"
_TABLES = "encodings"
"""Folder of the standard library with tables of character codes: not text to learn from."""
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "_bundled"}
_MACHINE_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a corpus."""

    path: Path
    name: str
    optional: bool = False
    """Part of the standard library, a few of whose files are not UTF-8: those are left out."""
    named: bool = False
    """The user named this very file, so it must not be empty."""
    text_key: str = TEXT_KEY
    """The field or column that holds the text, where the file has those."""


def source_files(source: str | Path, text_key: str = TEXT_KEY) -> list[SourceFile]:
    """The files of one source, in the order in which they are read. Raises: DataError if there are none."""
    text = str(source)
    if text == STDLIB:
        return _stdlib_files()
    path = Path(text)
    if path.is_file():
        return [SourceFile(path, path.name, named=True, text_key=text_key)]
    if dataset := dataset_files(path):
        return [SourceFile(p, p.name, text_key=text_key) for p in dataset]
    if path.is_dir():
        found = [(p, p.relative_to(path)) for p in _walk(path) if p.name.lower().endswith(SUFFIXES)]
        rule = f"holds no files ending in {', '.join(SUFFIXES)}"
    else:
        found = [(p, p) for p in map(Path, glob.glob(text, recursive=True)) if p.is_file()]
        rule = "matches no file" if glob.has_magic(text) else "does not exist (nor do .bin/.idx files of this prefix)"
    if not found:
        near = nearest_path(path)
        raise DataError(f"{text}: {rule}" + (near and f"; try {near}"))
    return sorted((SourceFile(p, name.as_posix(), text_key=text_key) for p, name in found), key=_shuffled)


def corpus_files(sources: Sequence[str | Path], text_key: str = TEXT_KEY) -> list[SourceFile]:
    """The files of all sources. Raises: DataError if one has none."""
    return [file for source in sources for file in source_files(source, text_key)]


def corpus_key(files: Sequence[SourceFile]) -> str:
    """Changes when a file is added, removed or modified (names, sizes and times; contents are not read).

    Raises: DataError if a file cannot be looked at.
    """
    digest = hashlib.sha256()
    for file in files:
        status = _status(file)
        digest.update(json.dumps([file.name, file.text_key, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Size of all files together. Raises: DataError if a file cannot be looked at."""
    return sum(_status(file).st_size for file in files)


def read_parts(files: Sequence[SourceFile], max_bytes: int | None = None) -> Iterator[Part]:
    """The documents of the files, none of them empty, in parts, until there are `max_bytes` of text (None: all).

    Raises: DataError naming the file, what it is, and the line, for what cannot be read, for a named file that is
    empty, and for records without text under the file's `text_key`; also if there is no document.
    """
    taken, begins = 0, True
    formats: set[str] = set()
    for file in files:
        for part, num_bytes in _read(file, formats):
            if max_bytes is not None and taken and taken + num_bytes > max_bytes:
                if not begins:
                    yield Part("", Ends.DOCUMENT)
                return
            taken += num_bytes
            begins = bool(part.ends)
            yield part
    if not taken:
        what = f" ({', '.join(sorted(formats))})" if formats else ""
        raise DataError(f"{', '.join(file.name for file in files[:3])}: no text in {len(files)} files{what}")


def check_source(source: str | Path, text_key: str) -> None:
    """Raises: DataError if a source is not there, or its first file is nothing that can be read."""
    first = source_files(source, text_key)[0]
    if not first.optional:
        detect_format(first.path, text_key)


def _read(file: SourceFile, formats: set[str]) -> Iterator[Sized]:
    """The documents of a file, whose format is added to `formats`."""
    found = detect_format(file.path, file.text_key)
    if found is None:
        if file.named:
            raise DataError(f"{file.path}: is empty")
        return
    formats.add(str(found))
    parts: Iterable[Sized] = read_file(file.path, file.text_key, found)
    if file.optional:
        try:
            parts = list(parts)
        except DataError:
            return
    yield from parts


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [SourceFile(p, p.relative_to(root).as_posix(), optional=True) for p in _walk(root)
             if p.suffix == ".py" and not p.name.startswith(_MACHINE_FILES) and p.parent != root / _TABLES]
    if not found:
        raise DataError(f"{root}: this Python has no standard library in source form; name text files as the corpus")
    return sorted(found, key=_shuffled)


def _walk(root: Path) -> Iterator[Path]:
    """Files below root, without hidden ones, links, and what is installed for Python in it."""
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if n not in _FOREIGN_FOLDERS and not n.startswith((".", "config-"))]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and not path.is_symlink():
                yield path


def _shuffled(file: SourceFile) -> tuple[bytes, str]:
    return hashlib.blake2s(file.name.encode("utf-8", "surrogateescape")).digest(), file.name


def _status(file: SourceFile) -> os.stat_result:
    with errors_as(DataError, file.path):
        return file.path.stat()
