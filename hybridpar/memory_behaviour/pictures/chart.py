"""Parts of charts: axes with ticks, a legend, and formatted bytes and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log, log10

from hybridpar.schedules.draw.shapes import IDLE, Area, rect

_APART = 56
"""Smallest distance in pixels between two ticks of an axis."""
_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """Return the largest unit that is not above `num_bytes`: its name and its bytes."""
    return next((unit for unit in _BYTES if num_bytes >= unit[1]), _BYTES[-1])


def sized(num_bytes: float) -> str:
    """Format bytes, such as 1.5 MiB."""
    name, size = byte_unit(num_bytes)
    return f"{_short(num_bytes / size)} {name}"


def lasting(seconds: float) -> str:
    """Format seconds, such as 1.5 ms."""
    name, size = next((unit for unit in _SECONDS if seconds >= 0.9995 * unit[1]), _SECONDS[-1])
    return f"{_short(seconds / size)} {name}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A mapping from values `low` to `high` to pixels `first` to `last`.

    Args:
        base: Base of a logarithmic axis; 0 for a linear one, whose ticks count from `low` in units
            of `unit`.
        label: Function that returns the text of a tick; on a linear axis, of its number of units.
    """

    title: str
    low: float
    high: float
    first: float
    last: float
    label: Callable[[float], str] = "{:,.10g}".format
    base: int = 0
    unit: float = 1.0

    def __call__(self, value: float) -> float:
        low, high, value = (
            (log(x) for x in (self.low, self.high, value))
            if self.base
            else (self.low, self.high, value)
        )
        return self.first + (value - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[tuple[float, str]]:
        """Return pixels and texts of labels, at round numbers with enough distance."""
        pixels = abs(self.last - self.first)
        if self.base:
            first = ceil(log(self.low, self.base) - 1e-9)
            last = floor(log(self.high, self.base) + 1e-9)
            every = ceil(_APART * log(self.high / self.low, self.base) / pixels)
            values = [float(self.base) ** n for n in range(first, last + 1) if n % every == 0]
            return [(self(value), self.label(value)) for value in values]
        span = (self.high - self.low) / self.unit
        least = span * _APART / pixels
        power = 10.0 ** floor(log10(least))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999)
        return [
            (self(self.low + n * step * self.unit), self.label(n * step))
            for n in range(floor(span / step) + 1)
        ]


def axes(x: Axis, y: Axis) -> Iterator[str]:
    """Yield grid lines, labels and titles of a chart; y grows upwards."""
    for at, text in y.ticks():
        yield rect(Area(x.first, at, x.last - x.first, 1), IDLE)
        yield f'<text class="muted end" x="{x.first - 8:.1f}" y="{at + 4:.1f}">{escape(text)}</text>'
    for at, text in x.ticks():
        yield rect(Area(at, y.last, 1, y.first - y.last + 4), IDLE)
        yield f'<text class="muted mid" x="{at:.1f}" y="{y.first + 18:.1f}">{escape(text)}</text>'
    yield f'<text class="muted" x="{x.first}" y="{y.first + 36:.1f}">{escape(x.title)}</text>'
    middle = (y.first + y.last) / 2
    yield (
        f'<text class="muted mid" transform="translate(18 {middle:.1f}) '
        f'rotate(-90)">{escape(y.title)}</text>'
    )


def legend(
    items: Iterable[tuple[str, str]], x: float, y: float, until: float
) -> tuple[list[str], float]:
    """Return colours and their names in rows between pixels `x` and `until`, and where the rows
    end."""
    parts = []
    at = x
    for colour, name in items:
        width = 24 + 6.6 * len(name) + 18
        if at + width > until and at > x:
            at = x
            y = y + 22
        parts += [
            rect(Area(at, y, 14, 14), colour),
            f'<text x="{at + 21:.1f}" y="{y + 11.5}">{escape(name)}</text>',
        ]
        at += width
    return parts, y + 30


def note(text: str, x: float, y: float, css: str = "muted") -> str:
    """Return a line of text."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
