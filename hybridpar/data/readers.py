"""Documents of one file, as streams: of plain text, JSON lines, JSON and CSV, also compressed, and of columns.py's.

All but a single record (a line of JSON lines, an element of JSON, a row of CSV: _MAX_RECORD bytes at most) is read in
pieces, so neither the length of a file nor what a small compressed one expands to takes memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.data.columns import import_pyarrow, read_columns
from hybridpar.data.formats import HEAD, Format, compression_of, format_of
from hybridpar.data.pieces import PART, Ends, Part, in_parts
from hybridpar.errors import DataError, shown
from hybridpar.reading import BoundedReader, errors_as, open_regular

_MAX_RECORD = 1 << 30
_VISIBLE = re.compile(r"\S")


class Sized(NamedTuple):
    """A part of a document, and about how many bytes of a file it took."""

    part: Part
    num_bytes: int


def detect_format(path: Path, text_key: str) -> Format | None:
    """The format of a file; None: it is empty. Raises: DataError naming what it is, if it cannot be read."""
    with _opened(path) as raw:
        head = raw.read(HEAD)
        raw.seek(0)
        compression = compression_of(head)
        if not head:
            return None
        with _inflated(raw, path, compression) as stream:
            found = format_of(path, stream.read(HEAD), text_key, compression)
    if found.kind not in _READERS:
        import_pyarrow(path, str(found))
    return found


def read_file(path: Path, text_key: str, found: Format) -> Iterator[Sized]:
    """The documents of a file of this format, in parts; none of them is empty.

    Raises: DataError naming the file, what it is, and the line where there are lines, for what cannot be read.
    """
    with _opened(path) as raw:
        if found.kind not in _READERS:
            for text in read_columns(raw, path, found.kind, text_key):
                yield from _document(text, len(text))
            return
        with _inflated(raw, path, found.compression) as stream:
            yield from _READERS[found.kind](stream, _Place(path, found, text_key))


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    format: Format
    text_key: str

    def error(self, line: int, what: str, unit: str = "line") -> DataError:
        return DataError(f"{self.path}, {unit} {line} of {self.format}: {what}")

    def decode(self, decode: Callable[[], str], first_line: int) -> str:
        """The text that `decode` returns. Raises: DataError naming the line if it is not UTF-8 text."""
        try:
            text = decode()
        except UnicodeDecodeError as error:
            line, byte = first_line + error.object.count(b"\n", 0, error.start), error.object[error.start]
            raise self.error(line, f"byte 0x{byte:02x} is not UTF-8; corpora are UTF-8 text") from None
        if (zero := text.find("\0")) >= 0:
            raise self.error(first_line + text.count("\n", 0, zero), "holds a zero byte, so it is no text")
        return text

    def text_of(self, record: object, number: int, unit: str = "line") -> str:
        """The text of a JSON object. Raises: DataError if it has none."""
        text = record.get(self.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            quoted = json.dumps(self.text_key)
            what = f"is not an object with text under {quoted}, such as {{{quoted}: \"...\"}}"
            keys = [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
            raise self.error(number, what + (f"; data.text_key names one of {shown(keys)}" if keys else ""), unit)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self.error(number, f"character {error.start} of the text is half of a surrogate pair", unit) from None
        return text


@contextmanager
def _opened(path: Path) -> Iterator[BoundedReader]:
    """The bytes of a file, as they are. Raises: DataError, here and while they are read."""
    with errors_as(DataError, path), BoundedReader(open_regular(path)) as raw:
        yield raw


@contextmanager
def _inflated(raw: BoundedReader, path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed. Raises: DataError, also while they are read."""
    if not compression:
        yield raw
        return
    source: Any = (gzip.GzipFile(fileobj=raw) if compression == "gzip" else
                   import_pyarrow(path, compression).CompressedInputStream(raw, "zstd"))
    damage = f"is damaged {compression}"
    with errors_as(DataError, path, damage, EOFError, zlib.error, failure=damage):
        yield io.BufferedReader(source, PART)


def _document(text: str, num_bytes: int) -> Iterator[Sized]:
    if text:
        for part in in_parts(text):
            yield Sized(part, num_bytes if part.ends else 0)


def _read_text(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    """The file as one document."""
    any_text = False
    for text, num_bytes in _decoded(stream, place):
        if text:
            any_text = True
            yield Sized(Part(text, Ends.NOTHING), num_bytes)
    if any_text:
        yield Sized(Part("", Ends.DOCUMENT), 0)


def _decoded(stream: io.BufferedReader, place: _Place) -> Iterator[tuple[str, int]]:
    """Text in blocks, and their sizes in bytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, block = 1, b"-"
    while block:
        block = stream.read(PART)
        text = place.decode(partial(decoder.decode, block, not block), line)
        line += text.count("\n")
        yield text, len(block)


def _lines(stream: io.BufferedReader, place: _Place) -> Iterator[tuple[str, int]]:
    """The lines of a file and their sizes in bytes."""
    number = 0
    while raw := stream.readline(_MAX_RECORD + 1):
        number += 1
        if len(raw) > _MAX_RECORD:
            raise place.error(number, f"has more than {_MAX_RECORD} bytes")
        num_bytes, line = len(raw), place.decode(partial(raw.decode, "utf-8-sig" if number == 1 else "utf-8"), number)
        del raw  # it may be very long
        yield line, num_bytes


def _read_json_lines(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    for number, (line, num_bytes) in enumerate(_lines(stream, place), 1):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise place.error(number, f"is not JSON ({error})") from None
        yield from _document(place.text_of(record, number), num_bytes)


def _read_json(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    """The objects of an array, or objects one after another."""
    values = _Values(_decoded(stream, place), place)
    in_array = values.peek() == "["
    if in_array:
        values.skip()
    number = 0
    while (mark := values.peek()) and not (in_array and mark == "]"):
        number += 1
        if in_array and number > 1:
            if mark != ",":
                raise place.error(number - 1, f"is followed by {mark!r}, not by a comma", "element")
            values.skip()
            values.peek()
        text = place.text_of(values.value(number), number, "element")
        yield from _document(text, len(text))
    if in_array:
        if not mark:
            raise place.error(number, "is the last one, and the array does not end", "element")
        values.skip()
        if mark := values.peek():
            raise place.error(number, f"is the last one of the array, which is followed by {mark!r}", "element")


class _Values:
    """Takes values off a stream of JSON."""

    def __init__(self, blocks: Iterator[tuple[str, int]], place: _Place):
        self._blocks, self._place = blocks, place
        self._text, self._at = "", 0

    def peek(self) -> str:
        """The next character that is no space; empty: there is none."""
        while not (found := _VISIBLE.search(self._text, self._at)):
            self._at = len(self._text)
            if not self._more(1):
                return ""
        self._at = found.start()
        return found[0]

    def skip(self) -> None:
        self._at += 1

    def value(self, number: int) -> object:
        """The next value. Raises: DataError if there is none, or it is too long."""
        while True:
            try:
                found, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
                return found
            except RecursionError as error:
                raise self._place.error(number, f"is not JSON ({error})", "element") from None
            except ValueError as error:
                length = len(self._text) - self._at
                if length > _MAX_RECORD:
                    raise self._place.error(number, f"has more than {_MAX_RECORD} characters", "element") from None
                # twice as many, so that what is parsed again adds up to little
                if self._text[self._at:self._at + 1] not in ("{", "[") or not self._more(max(length, 1)):
                    raise self._place.error(number, f"is not JSON ({error})", "element") from None

    def _more(self, num_characters: int) -> bool:
        """Takes at least so many more, as far as there are any."""
        taken, length = [self._text[self._at:]], 0
        while length < num_characters and (block := next(self._blocks, None)):
            taken.append(block[0])
            length += len(block[0])
        self._text, self._at = "".join(taken), 0
        return length > 0


def _read_csv(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    """The cells of the column that the first row names."""
    rows = csv.reader((line for line, _ in _lines(stream, place)), delimiter=place.format.delimiter, strict=True)
    header = _next_row(rows, place)
    if header is None:
        return
    if place.text_key not in header:
        raise place.error(1, f"has the columns {shown(header)}, and none is {place.text_key!r}; data.text_key names "
                          "another")
    column = header.index(place.text_key)
    while (row := _next_row(rows, place)) is not None:
        if 0 < len(row) <= column:
            raise place.error(rows.line_num, f"has {len(row)} cells, and {place.text_key!r} is number {column + 1}")
        yield from _document(row[column] if row else "", sum(map(len, row)))


def _next_row(rows: Any, place: _Place) -> list[str] | None:
    usual = csv.field_size_limit(_MAX_RECORD)  # of the whole process: back to what it was, at once
    try:
        return next(rows, None)  # type: ignore[no-any-return]
    except csv.Error as error:
        raise place.error(rows.line_num, f"is damaged ({error})") from None
    finally:
        csv.field_size_limit(usual)


_READERS: dict[str, Callable[[io.BufferedReader, _Place], Iterator[Sized]]] = {
    "plain text": _read_text, "JSON lines": _read_json_lines, "JSON": _read_json, "CSV": _read_csv}
