"""Stream documents from one file: plain text, JSON lines, JSON and CSV, also compressed, and
columns.py's formats.

Everything but a single record (a line of JSON lines, an element of JSON, a row of CSV: _MAX_RECORD
bytes at most) is read in pieces, so neither a long file nor a small compressed one that expands
takes much memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.data.files.bad_records import BadRecords
from hybridpar.data.files.columns import Row, import_pyarrow, read_columns, read_selected
from hybridpar.data.files.formats import (
    HEAD,
    SKIPPABLE,
    Format,
    compression_of,
    foreign_format,
    format_of,
)
from hybridpar.data.files.pieces import PART, Ends, Part, in_parts
from hybridpar.data.files.record_place import ESCAPED, RecordPlace, TextFrom, half_of_pair
from hybridpar.errors import DataError, shown
from hybridpar.reading import BoundedReader, errors_as, open_regular

_MAX_RECORD = 1 << 30
_VISIBLE = re.compile(r"\S")


class Sized(NamedTuple):
    """A part of a document, and about how many bytes of the file it took."""

    part: Part
    num_bytes: int


def detect_format(path: Path, text_key: str) -> Format | None:
    """Return the format of a file; None if it is empty. Raises: DataError naming the format if
    it cannot be read."""
    with _opened(path) as raw:
        start = _start_of_data(raw)
        raw.seek(start)
        head = raw.read(HEAD)
        compression = compression_of(head)
        if (
            start and not compression and not foreign_format(head)
        ):  # only skippable frames, or damaged
            compression = "zstandard"
        if compression:
            raw.seek(0)
            with _inflated(raw, path, compression) as stream:
                head = stream.read(HEAD)
        if not head:
            return None
        found = format_of(path, head, text_key, compression)
    if found.kind not in _READERS:
        import_pyarrow(path, str(found))
    return found


def _start_of_data(raw: BoundedReader) -> int:
    """Return the position in a file after the skippable frames at its start."""
    start = 0
    while SKIPPABLE.match(header := raw.read(8)):
        start += 8 + int.from_bytes(header[4:], "little")
        raw.seek(start)
    return start


def read_file(
    path: Path,
    text_key: str,
    found: Format,
    bad: BadRecords,
    text_from: TextFrom | None = None,
) -> Iterator[Sized]:
    """Yield the documents of a file with this format, in parts; empty ones are left out.

    Args:
        bad: Told of each record that cannot be read.
        text_from: Makes the text of a record of JSON; None: it is under `text_key`.

    Raises:
        DataError: The file cannot be read; names the file, its format, and the line if it has
            lines.
    """
    place = RecordPlace(path, found, text_key, bad, text_from)
    if text_from is not None and found.kind in ("plain text", "CSV"):
        raise DataError(
            f"{path}: is {found}; conversations must be JSON lines, JSON, parquet or Arrow"
        )
    if bad.skips and found.kind == "plain text" and not _is_all_text(place):
        return
    with _opened(path) as raw:
        if found.kind not in _READERS:
            yield from _rows(read_columns(raw, path, found.kind, place.column), place)
            return
        with _inflated(raw, path, found.compression) as stream:
            yield from _READERS[found.kind](stream, place)


def read_saved(
    indices: Path,
    files: Sequence[Path],
    text_key: str,
    bad: BadRecords,
    text_from: TextFrom | None = None,
) -> Iterator[Sized]:
    """Yield the documents in the rows of Arrow `files` that a file of indices selects, in its
    order, in parts.

    Args:
        bad, text_from: See `read_file`.

    Raises:
        DataError: As for `read_file`.
    """
    place = RecordPlace(files[0].parent, Format("Arrow"), text_key, bad, text_from)
    return _rows(read_selected(indices, files, place.column), place)


@contextmanager
def _opened(path: Path) -> Iterator[BoundedReader]:
    """Open a file to read its bytes. Raises: DataError, here and while it is read."""
    with errors_as(DataError, path), BoundedReader(open_regular(path)) as raw:
        yield raw


@contextmanager
def _inflated(raw: BoundedReader, path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """Decompress a file. Raises: DataError, also while it is read."""
    if not compression:
        yield raw
        return
    source: Any = (
        gzip.GzipFile(fileobj=raw)
        if compression == "gzip"
        else import_pyarrow(path, compression).CompressedInputStream(raw, "zstd")
    )
    damage = f"is damaged {compression}"
    with errors_as(DataError, path, damage, EOFError, zlib.error, failure=damage):
        yield io.BufferedReader(source, PART)


def _rows(rows: Iterator[Row], place: RecordPlace) -> Iterator[Sized]:
    """Yield the documents in rows."""
    for number, value in rows:
        try:
            if place.text_from is not None:
                text = place.text_of(_without_nulls(value), number, "row")
            elif value is None:
                raise place.error(number, "is null, not text", "row")
            else:
                text = value.decode()
        except UnicodeDecodeError as error:
            what = (
                f"byte 0x{error.object[error.start]:02x} is not UTF-8; a corpus must be UTF-8 text"
            )
            place.bad.add(place.error(number, what, "row"))
        except DataError as error:
            place.bad.add(error)
        else:
            yield from _document(text, len(text))


def _without_nulls(value: Any) -> Any:
    """Return a row as the JSON that it was made from: a table has a null for a key that only other
    records have."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _document(text: str, num_bytes: int) -> Iterator[Sized]:
    if text:
        for part in in_parts(text):
            yield Sized(part, num_bytes if part.ends else 0)


def _is_all_text(place: RecordPlace) -> bool:
    """Return whether a file is UTF-8 text to its end; if not, report it as a bad record."""
    with _opened(place.path) as raw, _inflated(raw, place.path, place.format.compression) as stream:
        try:
            for _ in _decoded(stream, place):
                pass
        except DataError as error:
            place.bad.add(error)
            return False
    return True


def _read_text(stream: io.BufferedReader, place: RecordPlace) -> Iterator[Sized]:
    """Yield the file as one document."""
    any_text = False
    for text, num_bytes in _decoded(stream, place):
        if text:
            any_text = True
            yield Sized(Part(text, Ends.NOTHING), num_bytes)
    if any_text:
        yield Sized(Part("", Ends.DOCUMENT), 0)


def _decoded(
    stream: io.BufferedReader, place: RecordPlace, errors: str = "strict"
) -> Iterator[tuple[str, int]]:
    """Yield text in blocks, and their sizes in bytes. `errors`: an error handler of Python's
    decoders."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    line = 1
    block = b"-"
    begins_line = True
    while block:
        block = stream.read(PART)
        text = place.decode(partial(decoder.decode, block, not block), line, begins_line)
        line += text.count("\n")
        begins_line = False
        yield text, len(block)


def _read_json_lines(stream: io.BufferedReader, place: RecordPlace) -> Iterator[Sized]:
    number = 0
    while raw := stream.readline(_MAX_RECORD + 1):
        number = number + 1
        num_bytes = len(raw)
        try:
            if num_bytes > _MAX_RECORD:
                raise place.error(number, f"has more than {_MAX_RECORD} bytes")
            line = place.decode(
                partial(raw.decode, "utf-8-sig" if number == 1 else "utf-8"), number
            )
            text = "" if line.isspace() else place.text_of(json.loads(line), number)
        except DataError as error:
            place.bad.add(error)
            while not raw.endswith(b"\n") and (
                raw := stream.readline(PART)
            ):  # the rest of a record that is too long
                pass
        except json.JSONDecodeError as error:
            place.bad.add(
                place.error(number, f"is not JSON ({error.msg}, at column {error.pos + 1})")
            )
        except (ValueError, RecursionError) as error:
            place.bad.add(place.error(number, f"is not JSON ({error})"))
        else:
            del raw, line  # white space may be very long
            yield from _document(text, num_bytes)


def _read_json(stream: io.BufferedReader, place: RecordPlace) -> Iterator[Sized]:
    """Yield the objects of an array, or objects one after another."""
    # bytes that are not UTF-8 then stand for themselves, so that they damage one element alone
    values = _Values(
        _decoded(stream, place, "surrogateescape" if place.bad.skips else "strict"), place
    )
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
        value = values.value(number)
        try:
            text = place.text_of(value, number, "element")
        except DataError as error:
            place.bad.add(error)
        else:
            yield from _document(text, len(text))
    if in_array:
        if not mark:
            raise place.error(number, "is the last one, but the array is not closed", "element")
        values.skip()
        if mark := values.peek():
            raise place.error(
                number, f"ends the array, which must not be followed by {mark!r}", "element"
            )


class _Values:
    """Parses values from a stream of JSON."""

    def __init__(self, blocks: Iterator[tuple[str, int]], place: RecordPlace):
        self._blocks = blocks
        self._place = place
        self._text = ""
        self._at = 0
        # of the first character of `_text`
        self._line = 1
        self._column = 1

    def _place_of(self, error: ValueError) -> str:
        """Return what is wrong with a value, and where in the file."""
        if not isinstance(error, json.JSONDecodeError):
            return str(error)
        line, column = self._after(error.pos)
        return f"{error.msg}, at line {line}, column {column}"

    def _after(self, number: int) -> tuple[int, int]:
        """Return line and column of the character after the first `number`."""
        lines = self._text.count("\n", 0, number)
        behind = number - 1 - self._text.rfind("\n", 0, number)
        return self._line + lines, behind + (1 if lines else self._column)

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while not (found := _VISIBLE.search(self._text, self._at)):
            self._at = len(self._text)
            if not self._more(1):
                return ""
        self._at = found.start()
        return found[0]

    def skip(self) -> None:
        self._at += 1

    def value(self, number: int) -> object:
        """Return the next value. Raises: DataError if it is missing or too long."""
        while True:
            try:
                found, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
                return found
            except RecursionError as error:
                raise self._place.error(number, f"is not JSON ({error})", "element") from None
            except ValueError as error:
                where = self._place_of(error)  # before reading more text moves the position
                length = len(self._text) - self._at
                if length > _MAX_RECORD:
                    raise self._place.error(
                        number, f"has more than {_MAX_RECORD} characters", "element"
                    ) from None
                # twice as many, so that what is parsed again adds up to little
                if self._text[self._at : self._at + 1] not in ("{", "[") or not self._more(
                    max(length, 1)
                ):
                    raise self._place.error(number, f"is not JSON ({where})", "element") from None

    def _more(self, num_characters: int) -> bool:
        """Read at least so many more characters, as far as there are any."""
        self._line, self._column = self._after(self._at)
        taken = [self._text[self._at :]]
        length = 0
        while length < num_characters and (block := next(self._blocks, None)):
            taken.append(block[0])
            length += len(block[0])
        self._text = "".join(taken)
        self._at = 0
        return length > 0


def _read_csv(stream: io.BufferedReader, place: RecordPlace) -> Iterator[Sized]:
    """Yield the cells of the text column, which the first row names."""
    rows = _CsvRows(stream, place)
    header = rows.next()
    if header is None:
        return
    if place.text_key not in header:
        raise place.error(
            1,
            f"has no column {place.text_key!r}; set data.text_key to one of {shown(header)}",
        )
    column = header.index(place.text_key)
    while True:
        try:
            if (row := rows.next()) is None:
                return
            if 0 < len(row) <= column:
                raise rows.error(
                    f"has only {len(row)} cells, but {place.text_key!r} is column {column + 1}"
                )
        except DataError as error:
            if rows.damage is not None:
                raise
            place.bad.add(error)
        else:
            yield from _document(row[column] if row else "", sum(map(len, row)))


class _CsvRows:
    """The rows of a CSV file, one at a time; reading can continue after an error in a row."""

    def __init__(self, stream: io.BufferedReader, place: RecordPlace):
        self._stream = stream
        self._place = place
        self._first_line = 1
        self.damage: DataError | None = None
        """The error behind which no row can be read."""
        self._rows = csv.reader(self._lines(), delimiter=place.format.delimiter, strict=True)

    def next(self) -> list[str] | None:
        """Return the next row; None at the end. Raises: DataError naming its lines if it cannot
        be read."""
        self._first_line = self._rows.line_num + 1
        usual = csv.field_size_limit(_MAX_RECORD)  # process-wide setting: restore it at once
        try:
            row = next(self._rows, None)
        except csv.Error as error:
            raise self.error(f"is damaged ({error})") from None
        finally:
            csv.field_size_limit(usual)
        for cell in row or ():
            if (place := half_of_pair(cell)) >= 0:
                raise self.error(
                    f"byte 0x{ESCAPED[cell[place]]:02x} is not UTF-8; a corpus must be UTF-8 text"
                )
            if "\0" in cell:
                raise self.error("contains a zero byte, so it is not text")
        return row

    def error(self, what: str) -> DataError:
        """Return an error about the row that was read last."""
        last = self._rows.line_num
        if last > self._first_line:
            return self._place.error(self._first_line, f"which continues to line {last}, {what}")
        return self._place.error(max(last, 1), what)

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the file. Bytes that are not UTF-8 are kept escaped, since a row
        may span several lines."""
        number = 0
        while raw := self._stream.readline(_MAX_RECORD + 1):
            number += 1
            if len(raw) > _MAX_RECORD:
                self.damage = self._place.error(number, f"has more than {_MAX_RECORD} bytes")
                raise self.damage
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")


_READERS: dict[str, Callable[[io.BufferedReader, RecordPlace], Iterator[Sized]]] = {
    "plain text": _read_text,
    "JSON lines": _read_json_lines,
    "JSON": _read_json,
    "CSV": _read_csv,
}
