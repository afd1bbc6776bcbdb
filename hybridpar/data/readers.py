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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.data.columns import import_pyarrow, read_columns
from hybridpar.data.formats import HEAD, Format, compression_of, format_of
from hybridpar.data.pieces import PART, Ends, Part, in_parts
from hybridpar.errors import DataError, shown
from hybridpar.reading import open_regular

_MAX_RECORD = 1 << 30
_SPACE = re.compile(r"\s*")


class Sized(NamedTuple):
    """A part of a document, and about how many bytes of a file it took."""

    part: Part
    num_bytes: int


def look(path: Path, text_key: str) -> Format | None:
    """What a file is; None: it is empty. Raises: DataError naming what it is, if it cannot be read."""
    with closing(_opened(path)) as raw:
        head = _head(raw)
        compression = compression_of(head)
        if compression:
            with closing(_inflated(raw, path, compression)) as inside:
                head = inside.read(HEAD)
        if not head and not compression:
            return None
        found = format_of(path, head, text_key, compression)
    if found.kind not in _READERS:
        import_pyarrow(path, str(found))
    return found


def read_file(path: Path, text_key: str, found: Format) -> Iterator[Sized]:
    """The documents of a file that `look` has seen, in parts; none of them is empty.

    Raises: DataError naming the file, what it is, and the line where there are lines, for what cannot be read.
    """
    place = _Place(path, found, text_key)
    if found.kind not in _READERS:
        with closing(_opened(path)) as raw:
            for text in read_columns(raw, place.path, found.kind, text_key):
                yield from _document(text, len(text))
        return
    with closing(_opened(path)) as raw, closing(_inflated(raw, path, found.compression)) as stream:
        yield from _READERS[found.kind](stream, place)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    format: Format
    text_key: str

    def error(self, line: int, what: str, unit: str = "line") -> DataError:
        return DataError(f"{self.path}, {unit} {line} of {self.format}: {what}")

    def decode(self, raw: bytes, line: int) -> str:
        """Raises: DataError naming the line if this is not UTF-8 text."""
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise self.not_utf8(error, line) from None
        if "\0" in text:
            raise self.error(line, "holds a zero byte, so it is no text")
        return text

    def not_utf8(self, error: UnicodeDecodeError, first_line: int) -> DataError:
        line = first_line + error.object.count(b"\n", 0, error.start)
        return self.error(line, f"byte 0x{error.object[error.start]:02x} is not UTF-8; corpora are UTF-8 text")

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


class _Inflating(io.RawIOBase):
    """What a decompressor gives, whose errors are ours."""

    def __init__(self, source: Any, path: Path, what: str):
        self._source, self._path, self._what = source, path, what

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            return self._source.readinto(buffer) or 0
        except (EOFError, OSError, ValueError, zlib.error) as error:  # Arrow's are OSError and ValueError
            what = f"is damaged {self._what}" if self._what else "cannot be read"
            raise DataError(f"{self._path}: {what} ({error})") from None


def _opened(path: Path) -> io.FileIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _head(raw: io.FileIO) -> bytes:
    try:
        head = raw.read(HEAD) or b""
        raw.seek(0)
    except OSError as error:
        raise DataError(f"{raw.name}: cannot be read ({error.strerror})") from None
    return head


def _inflated(raw: io.FileIO, path: Path, compression: str) -> io.BufferedReader:
    """The bytes of a file, decompressed."""
    raw.seek(0)
    source: Any = raw
    if compression == "gzip":
        source = gzip.GzipFile(fileobj=io.BufferedReader(raw, HEAD), mode="rb")
    elif compression == "zstandard":
        source = import_pyarrow(path, compression).CompressedInputStream(raw, "zstd")
    return io.BufferedReader(_Inflating(source, path, compression), PART)


def _document(text: str, num_bytes: int) -> Iterator[Sized]:
    if text:
        for part in in_parts(text):
            yield Sized(part, num_bytes if part.ends else 0)


def _read_text(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    """One document."""
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
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise place.not_utf8(error, line) from None
        if (zero := text.find("\0")) >= 0:
            raise place.error(line + text.count("\n", 0, zero), "holds a zero byte, so it is no text")
        line += text.count("\n")
        yield text, len(block)


def _lines(stream: io.BufferedReader, place: _Place) -> Iterator[tuple[str, int, int]]:
    """The lines of a file, their numbers and their sizes in bytes."""
    number = 0
    while line := _line(stream, place, number + 1):
        number += 1
        yield *line, number


def _line(stream: io.BufferedReader, place: _Place, number: int) -> tuple[str, int] | None:
    raw = stream.readline(_MAX_RECORD + 1)
    if len(raw) > _MAX_RECORD:
        raise place.error(number, f"has more than {_MAX_RECORD} bytes")
    return (place.decode(raw, number), len(raw)) if raw else None


def _read_json_lines(stream: io.BufferedReader, place: _Place) -> Iterator[Sized]:
    for line, num_bytes, number in _lines(stream, place):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise place.error(number, f"is not JSON ({error})") from None
        del line  # it may be very long
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
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(1):
                return ""

    def skip(self) -> None:
        self._at += 1

    def value(self, number: int) -> object:
        """Raises: DataError if there is none, or it is too long."""
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
    """The column that the first row names."""
    rows = csv.reader((line for line, _, _ in _lines(stream, place)), delimiter=place.format.delimiter, strict=True)
    header = _next_row(rows, place)
    if header is None:
        return
    if place.text_key not in header:
        rule = f"has the columns {shown(header)}, and none is {place.text_key!r}; data.text_key names another"
        raise place.error(1, rule)
    column = header.index(place.text_key)
    while (row := _next_row(rows, place)) is not None:
        if not row:
            continue
        if len(row) <= column:
            rule = f"has {len(row)} cells, and {place.text_key!r} is number {column + 1}"
            raise place.error(rows.line_num, rule)
        yield from _document(row[column], sum(map(len, row)))


def _next_row(rows: Any, place: _Place) -> list[str] | None:
    usual = csv.field_size_limit(_MAX_RECORD)  # of the whole process: back to what it was, at once
    try:
        row: list[str] | None = next(rows, None)
    except csv.Error as error:
        raise place.error(rows.line_num, f"is damaged ({error})") from None
    finally:
        csv.field_size_limit(usual)
    return row


_READERS: dict[str, Callable[[io.BufferedReader, _Place], Iterator[Sized]]] = {
    "plain text": _read_text, "JSON lines": _read_json_lines, "JSON": _read_json, "CSV": _read_csv}
