"""Documents from text files, folders, patterns, JSONL files, or the Python standard library's own source text.

A source is 'stdlib', a file, a folder (all files below it with one of SUFFIXES), or a pattern such as 'books/*.txt'. A
file is a document, except .jsonl: there each line is an object with the document under "text". The files of a folder, a
pattern or the standard library come in the order of a hash of their names: always the same, yet any stretch is a fair
sample, so that the end of a corpus can serve for validation. Empty documents are left out.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from hybridpar.errors import DataError
from hybridpar.reading import nearest_path, open_regular

STDLIB = "stdlib"
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".jsonl")
_TABLES = "encodings"
"""A folder of the standard library that is tables of character codes, line after line: not text to learn from."""
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


def source_files(source: str | Path) -> list[SourceFile]:
    """The files of one source, in the order in which they are read.

    Raises: DataError if there are none.
    """
    text = str(source)
    if text == STDLIB:
        return _stdlib_files()
    path = Path(text)
    if path.is_file():
        return [SourceFile(path, path.name, named=True)]
    if path.is_dir():
        found = [SourceFile(p, p.relative_to(path).as_posix()) for p in _walk(path) if p.suffix in SUFFIXES]
        rule = f"holds no files ending in {', '.join(SUFFIXES)}"
    else:
        found = [SourceFile(Path(p), Path(p).as_posix()) for p in glob.glob(text, recursive=True) if Path(p).is_file()]
        rule = "matches no file" if glob.has_magic(text) else "does not exist (nor do .bin/.idx files of this prefix)"
    if not found:
        near = nearest_path(path)
        raise DataError(f"{text}: {rule}" + (near and f"; try {near}"))
    return sorted(found, key=_shuffled)


def corpus_files(sources: Sequence[str | Path]) -> list[SourceFile]:
    """The files of all sources. Raises: DataError if one has none."""
    return [file for source in sources for file in source_files(source)]


def corpus_key(files: Sequence[SourceFile]) -> str:
    """Changes when a file is added, removed or modified (names, sizes and times; contents are not read).

    Raises: DataError if a file cannot be looked at.
    """
    digest = hashlib.sha256()
    for file in files:
        status = _status(file)
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Size of all files together. Raises: DataError if a file cannot be looked at."""
    return sum(_status(file).st_size for file in files)


def documents(files: Sequence[SourceFile], max_bytes: int | None = None) -> Iterator[str]:
    """The documents of the files, none of them empty, until there are `max_bytes` of text (None: all).

    Raises: DataError naming file and line for a file that is missing, binary or not UTF-8, for a named file that is
    empty, and for a line of a .jsonl file that is not an object with text under "text"; also if there is no document.
    """
    taken = 0
    for file in files:
        for text, size in _read(file):
            if max_bytes is not None and taken + size > max_bytes and taken:
                return
            taken += size
            yield text
    if not taken:
        raise DataError(f"{', '.join(file.name for file in files[:3])}: no text in {len(files)} files")


def _read(file: SourceFile) -> Iterator[tuple[str, int]]:
    """Documents of a file and their sizes in bytes."""
    if file.path.suffix == ".jsonl":
        yield from _read_jsonl(file)
        return
    try:
        with open_regular(file.path) as stream:
            raw = stream.read()
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from None
    if not raw and file.named:
        raise DataError(f"{file.path}: is empty")
    try:
        text = _decode(raw, file.path, 1)
    except DataError:
        if not file.optional:
            raise
        return
    if text:
        yield text, len(raw)


def _read_jsonl(file: SourceFile) -> Iterator[tuple[str, int]]:
    any_line = False
    try:
        with BufferedReader(open_regular(file.path)) as stream:
            for number, raw in enumerate(stream, 1):
                line = _decode(raw, file.path, number)
                if line.isspace():
                    continue
                any_line = True
                text = _text_of(line, f"{file.path}, line {number}")
                if text:
                    yield text, len(raw)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from None
    if file.named and not any_line:
        raise DataError(f"{file.path}: is empty")


def _text_of(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f'{place}: is not an object with text under "text", such as {{"text": "..."}}')
    text: str = record["text"]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: character {error.start} of the text is half of a surrogate pair") from None
    return text


def _decode(raw: bytes, path: Path, first_line: int) -> str:
    """Raises: DataError naming the line if this is not UTF-8 text."""
    zero = raw.find(b"\0")
    try:
        text = raw.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line, byte = first_line + raw.count(b"\n", 0, error.start), raw[error.start]
        raise DataError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; corpora are UTF-8 text") from None
    if zero >= 0:
        line = first_line + raw.count(b"\n", 0, zero)
        raise DataError(f"{path}, line {line}: holds a zero byte, so it is not a text file")
    return text


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
    try:
        return file.path.stat()
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from None
