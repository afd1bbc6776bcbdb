"""Growing files of JSON lines, read from where the last look ended, and curves of bounded
length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridpar.reading import open_regular, parse_json, reason

_CHUNK = 1 << 20
"""Bytes that are read at once; a longer line is left out."""
_LEAST_LINE = 64
"""Bytes that a line counts for at least, since very short lines take more time per byte."""
GREATEST = 1e100
"""The largest number that is drawn, so that sums do not overflow."""


class Tail:
    """The lines of a file of a run folder since the last look.

    A line counts once it is complete. If the file was cut off (by a run that resumed from a
    checkpoint) or replaced, reading starts from the beginning, and `begins` counts it.

    Attributes:
        problem: What is wrong with the file, as a line; empty if it is missing.
    """

    def __init__(self, path: Path):
        self.begins = 0
        self.problem = ""
        self._path = path
        self._place = 0
        self._last = b""

    def rows(self, most_bytes: int = 1 << 62) -> Iterator[dict[str, Any]]:
        """Yield the new lines that are JSON objects, from the next `most_bytes` of the file;
        other lines are skipped."""
        self.problem = ""
        try:
            with open_regular(self._path, within=self._path.parent) as file:
                size = file.seek(0, 2)
                if not self._is_where_it_was(file, size):
                    self._place = 0
                    self._last = b""
                    self.begins = self.begins + 1
                file.seek(self._place)
                while most_bytes > 0 and (
                    chunk := file.read(min(_CHUNK, size - file.tell(), most_bytes))
                ):
                    whole = chunk.rfind(b"\n") + 1
                    if not whole and len(chunk) < _CHUNK:
                        break  # the line is not complete yet
                    self._place += whole or len(chunk)
                    self._last = chunk[:whole][-64:]
                    most_bytes -= max(len(chunk), _LEAST_LINE * chunk.count(b"\n"))
                    yield from _objects(chunk[:whole])
                    file.seek(self._place)
                if size - self._place >= _CHUNK:
                    self.problem = (
                        f"{self._path.name}: the last {size - self._place:,} bytes are not read yet"
                    )
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self.problem = f"{self._path.name}: cannot be read ({reason(error)})"

    def _is_where_it_was(self, file: Any, size: int) -> bool:
        """Return whether the file still has the content that was read last."""
        if size < self._place:
            return False
        file.seek(self._place - len(self._last))
        return bool(file.read(len(self._last)) == self._last)


def _objects(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        if not line.lstrip().startswith(b"{"):
            continue
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


class Curve:
    """A row of values over steps, kept as at most `most` points (an even number), each with the
    mean, minimum and maximum of its steps. When there are more, pairs of neighbours are merged."""

    def __init__(self, most: int = 1024):
        self.points: list[tuple[int, float, float, float]] = []
        self._most = most
        self._width = 1
        self._open: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Add the next value. A value that is not finite, or too large to be drawn, is left out."""
        if not abs(value) <= GREATEST:
            return
        self._open.append((step, value))
        if len(self._open) == self._width:
            self.points.append(_mean(self._open))
            self._open = []
        if len(self.points) == self._most:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [
                (b[0], (a[1] + b[1]) / 2, min(a[2], b[2]), max(a[3], b[3])) for a, b in pairs
            ]
            self._width *= 2

    def shown(self) -> list[tuple[int, float, float, float]]:
        """Return all points, and one for the values since the last point."""
        return [*self.points, *([_mean(self._open)] if self._open else [])]


def _mean(values: list[tuple[int, float]]) -> tuple[int, float, float, float]:
    numbers = [value for _, value in values]
    return values[-1][0], math.fsum(numbers) / len(numbers), min(numbers), max(numbers)
