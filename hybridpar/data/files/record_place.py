"""The place of a record in a file of a corpus, for errors, and the text in the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridpar.data.files.bad_records import BadRecords
from hybridpar.data.files.formats import Format
from hybridpar.errors import DataError, shown

ESCAPED = {chr(0xDC00 + byte): byte for byte in range(0x80, 0x100)}
"""Characters that replace bytes that are not UTF-8 when decoded with "surrogateescape"."""


TextFrom = Callable[[object], str]
"""Makes the text of a document from a JSON value. Raises: DataError if it cannot."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """A file of records, which names a record in an error. `bad` is told of records that cannot
    be read. `text_from` makes text from a record; None: it is under `text_key`."""

    path: Path
    format: Format
    text_key: str
    bad: BadRecords
    text_from: TextFrom | None = None

    @property
    def column(self) -> str | None:
        """The column of a table with the text; None: text is made from whole rows."""
        return self.text_key if self.text_from is None else None

    def error(self, line: int, what: str, unit: str = "line") -> DataError:
        return DataError(f"{self.path}, {unit} {line} of {self.format}: {what}")

    def decode(self, decode: Callable[[], str], first_line: int, begins_line: bool = True) -> str:
        """Return the text that `decode` returns. `begins_line`: whether it is the beginning of its
        first line.

        Raises:
            DataError: It is not UTF-8; names the line, and the column in bytes if known.
        """
        try:
            text = decode()
        except UnicodeDecodeError as error:
            line = first_line + error.object.count(b"\n", 0, error.start)
            byte = error.object[error.start]
            start = error.object.rfind(b"\n", 0, error.start)
            column = f" (column {error.start - start})" if start >= 0 or begins_line else ""
            rule = (
                f"byte 0x{byte:02x} is not UTF-8{column}; a corpus must be UTF-8 text, so "
                f"save the file as UTF-8"
            )
            raise self.error(line, f"{rule} (such as by iconv -f latin1 -t utf-8)") from None
        if (zero := text.find("\0")) >= 0:
            raise self.error(
                first_line + text.count("\n", 0, zero), "contains a zero byte, so it is not text"
            )
        return text

    def text_of(self, record: object, number: int, unit: str = "line") -> str:
        """Return the text of a JSON object. Raises: DataError if it has none."""
        text: object
        if self.text_from is not None:
            try:
                text = self.text_from(record)
            except DataError as error:
                raise self.error(number, str(error), unit) from None
        else:
            text = record.get(self.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise self.error(number, self._no_text(record), unit)
        if (place := half_of_pair(text)) >= 0:
            half = f"character {place} of the text is half of a surrogate pair"
            byte = ESCAPED.get(text[place]) if unit == "element" and self.bad.skips else None
            raise self.error(
                number,
                half if byte is None else f"byte 0x{byte:02x} of the text is not UTF-8",
                unit,
            )
        return text

    def _no_text(self, record: object) -> str:
        quoted = json.dumps(self.text_key)
        rule = f'is not an object with text under {quoted}, such as {{{quoted}: "..."}}'
        if not isinstance(record, dict):
            return rule
        if self.text_key in record:
            value = record[self.text_key]
            return f"{rule}; it has {'null' if value is None else shown(value)} there"
        keys = [key for key, value in record.items() if isinstance(value, str)]
        return rule + (f"; set data.text_key to one of {shown(keys)}" if keys else "")


def half_of_pair(text: str) -> int:
    """Return the position of the first character that is half of a surrogate pair, which UTF-8
    does not have; -1 if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1
