"""The format of a file of text and its compression, found by its first bytes.

In this order, with `key` for data.text_key, on the first 64 KiB (of what is decompressed):

    gzip, zstandard      by their magic bytes, behind skippable frames; then what is inside, by the
                         same rules
    parquet, Arrow       by their magic bytes; a file that is named so and is not is refused
    known binary files   images, archives, PDF, UTF-16, ..: refused, by name
    JSON lines           named .jsonl or .ndjson; or each of the first lines is a JSON object with
                         text under `key`
    JSON                 named .json: one array of objects, or objects one after another; or a "["
                         with such an object behind it
    CSV                  named .csv or .tsv; or the first line is two or more plain names, `key`
                         among them, and the second record has as many cells
    plain text           everything else

So a text that begins with "{" or "[" is plain text, unless whole objects that have text under `key`
come first. A file whose first lines are objects without it is plain text where its name says so
(.txt, .md, ..), else JSON lines, whose reader then says which keys there are.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridpar.errors import DataError

HEAD = 1 << 16
PLAIN = (".txt", ".text", ".md", ".rst", ".py")
_FORMAT_OF = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".parquet": "parquet",
    ".arrow": "Arrow",
}
_COMPRESSED = (".gz", ".zst")
SUFFIXES = tuple(
    s + c
    for s in (*PLAIN, *_FORMAT_OF)
    for c in ("", *_COMPRESSED)
    if not (c and s in (".parquet", ".arrow"))
)
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)
"""Magic bytes of a frame that zstandard and LZ4 skip; the next four bytes are its length."""
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard"}
_COLUMNS = {b"PAR1": "parquet", b"ARROW1\0\0": "Arrow", b"\xff\xff\xff\xff": "Arrow stream"}
_FOREIGN = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"RIFF": "RIFF (WebP, WAV, AVI)",
    b"%PDF-": "PDF",
    b"PK\x03\x04": "a ZIP archive (also .docx, .npz, .pt)",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x04\x22\x4d\x18": "LZ4",
    b"SQLite format 3\0": "an SQLite database",
    b"\x89HDF": "HDF5",
    b"\x7fELF": "a program (ELF)",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"MMIDIDX": "the index of a Megatron token file, which is named without its ending",
    b"Obj\x01": "Avro",
    b"ORC": "ORC",
    b"ID3": "MP3 audio",
    b"OggS": "Ogg audio",
    b"fLaC": "FLAC audio",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_NUM_LINES = 8
_NAME = re.compile(r"[^\W\d][\w .-]{0,63}")
_DELIMITERS = ",\t;|"
_OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:')


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a file. `delimiter`: for CSV."""

    kind: str
    compression: str = ""
    delimiter: str = ","

    def __str__(self) -> str:
        kind = "TSV" if self.kind == "CSV" and self.delimiter == "\t" else self.kind
        return f"{self.compression} of {kind}" if self.compression else kind


def compression_of(head: bytes) -> str:
    """Return the name of a compression, or ""."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), "")


def format_of(path: Path, head: bytes, key: str, compression: str = "") -> Format:
    """Return the format of a file that begins with `head`, its first HEAD bytes (or all),
    decompressed.

    Raises:
        DataError: It is not readable text; names the format that was recognized.
    """
    suffix = next((s.lower() for s in reversed(path.suffixes) if s.lower() not in _COMPRESSED), "")
    inside = f"{compression} of " if compression else ""
    if columns := next((name for magic, name in _COLUMNS.items() if head.startswith(magic)), ""):
        if compression:
            raise DataError(f"{path}: is {inside}{columns}; decompress it first")
        return Format(columns)
    if name := foreign_format(head):
        raise DataError(
            f"{path}: is {inside}{name}; a corpus must be UTF-8 text, JSON, CSV, parquet or Arrow"
        )
    found = _of_text(head.decode("utf-8-sig", "replace"), len(head) >= HEAD, suffix, key)
    if _FORMAT_OF.get(suffix) in _COLUMNS.values():
        raise DataError(f"{path}: is {inside}{found}, not {_FORMAT_OF[suffix]} as its name says")
    return Format(found.kind, compression, found.delimiter)


def foreign_format(head: bytes) -> str:
    """Return the name of a known format that is not text, from the first bytes of a file; "" if
    none is recognized."""
    if not is_binary(head):
        return ""
    return next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), "")


def is_binary(head: bytes) -> bool:
    """Return whether the first bytes of a file are not UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return b"\0" in head


def _of_text(text: str, is_cut: bool, suffix: str, key: str) -> Format:
    """Return the format of a text. `is_cut`: the file continues after it."""
    lines = [
        line for line in (text.rpartition("\n")[0] if is_cut else text).split("\n") if line.strip()
    ][:_NUM_LINES]
    records = [_object(line) for line in lines]
    named = _FORMAT_OF.get(suffix, "")
    start = text.lstrip()
    have_text = all(isinstance(record.get(key), str) for record in records)
    one_long = not lines and is_cut and _begins_object(start, key, is_cut)
    if named == "JSON lines" or one_long or (records and have_text):
        return Format("JSON lines")
    if records and all(records) and named != "CSV" and suffix not in PLAIN:
        return Format("JSON lines")
    if named == "JSON" or (
        start.startswith("[") and _begins_object(start[1:].lstrip(), key, is_cut)
    ):
        return Format("JSON")
    usual = "\t" if suffix == ".tsv" else ","
    tables = [d for d in (usual, *_DELIMITERS) if key in _cells(lines[:1], d)]
    if named == "CSV":
        return Format("CSV", delimiter=next(iter(tables), usual))
    found = next((d for d in tables if _is_table(lines, d)), "")
    return Format("CSV", delimiter=found) if found else Format("plain text")


def _object(line: str) -> dict[str, object]:
    """Return the JSON object in a line; empty if the line is not one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _begins_object(start: str, key: str, is_cut: bool) -> bool:
    """Return whether `start` begins with an object that has text under `key`; of an object that
    is cut, only its beginning is checked."""
    if not start.startswith("{"):
        return False
    try:
        found, _ = json.JSONDecoder().raw_decode(start)
    except RecursionError:
        return False
    except ValueError:
        return is_cut and bool(
            _OBJECT.match(start) and re.search(rf'{re.escape(json.dumps(key))}\s*:\s*"', start)
        )
    return isinstance(found.get(key), str)


def _cells(lines: Sequence[str], delimiter: str) -> list[str]:
    """Return the cells of the first record."""
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _is_table(lines: Sequence[str], delimiter: str) -> bool:
    header = _cells(lines[:1], delimiter)
    plain = (
        len(header) > 1 and len(set(header)) == len(header) and all(map(_NAME.fullmatch, header))
    )
    return plain and len(_cells(lines[1:], delimiter)) == len(header)
