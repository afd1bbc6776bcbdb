"""Pictures of a rank's memory: blocks at their planned offsets over time, bytes by category, and
access intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, pairwise

import numpy as np
from numpy.typing import NDArray

from hybridpar.memory_behaviour.analysis.account import Account, Gap
from hybridpar.memory_behaviour.analysis.swap import LINKS, swappable
from hybridpar.memory_behaviour.events import Category, Life
from hybridpar.memory_behaviour.pictures.chart import (
    Axis,
    axes,
    byte_unit,
    lasting,
    legend,
    note,
    sized,
)
from hybridpar.schedules.action import Kind, parse_action
from hybridpar.schedules.draw.shapes import IDLE, INK, Area, page, rect

COLOURS = {
    Category.WEIGHTS: "#2c6ab1",
    Category.GRADIENTS: "#e08a2c",
    Category.MASTER: "#8fb8e6",
    Category.OPTIMIZER: "#774aae",
    Category.INPUTS: "#1c8f8f",
    Category.ACTIVATIONS: "#4c9f52",
    Category.FACTORS: "#b7ce4f",
    Category.TEMPORARIES: "#c94444",
    Category.COMMUNICATION: "#d067a6",
    Category.BATCH: "#8a6a4a",
    Category.OTHER: "#9aa4b1",
}
_LINKS = ("#1f2733", "#b93a3a", "#2c6ab1", "#35843a", "#c7680f", "#774aae")
_SHADES = {
    Kind.F: ("#bdd5f3", ""),
    Kind.B: ("#2c6ab1", "on-dark"),
    Kind.I: ("#2c6ab1", "on-dark"),
    Kind.W: ("#6fa3dc", ""),
    Kind.UPDATE: (INK, "on-dark"),
}
"""Colour of an action in the row above a picture, and style of its number."""
_BESIDE = "#c9d0d8"
"""Colour of all other actions."""
_LEGEND = "actions: forward light, backward dark, update black, others grey"
_WIDTH = 1200
_LEFT = 96
_RIGHT = 24
_TOP = 96
_PLOT = 420
_BOXES = 1500
_TICKS = 20_000
_CELL = 4
"""Largest number of blocks and accesses that are drawn separately; pixels of a cell in which
intervals are drawn as one dot."""
_NAMES = 12
"""Most tensors that the title of a dot names."""
_SEEN = 0.3
"""Smallest width of a visible action in pixels."""
_ROW = 2
"""Height in pixels of a row of blocks that are too small to be drawn separately."""
_COVERED = 0.1
"""Share of a cell that such blocks must cover to be drawn."""
_SMALL = 1.5
"""Height in pixels below which blocks are merged with neighbours of the same category."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Picture:
    """A picture as shapes; all pictures have the same width. Units: pixels."""

    height: float
    shapes: Sequence[str]

    def svg(self) -> str:
        """Return the picture as a file."""
        return stacked([self])


def stacked(pictures: Iterable[Picture]) -> str:
    """Return one SVG file with the pictures below each other."""
    parts = []
    y = 0.0
    for picture in pictures:
        parts += [f'<g transform="translate(0 {y:.0f})">', *picture.shapes, "</g>"]
        y += picture.height
    return page(_WIDTH, y, "\n".join(parts))


def pictures(account: Account) -> list[Picture]:
    """Return all pictures of an account."""
    return [draw_blocks(account), draw_strip(account), draw_intervals(account)]


def draw_blocks(account: Account) -> Picture:
    """Draw blocks over time at their offsets in the planned arena, with their reads and writes.

    The largest blocks are drawn separately. Where blocks are too small to be seen, the category
    with the largest area has the place, so that short temporaries do not hide activations.
    """
    bytes_axis = _bytes_axis(
        "offset in the planned arena", account.arena.num_bytes, _TOP + _PLOT, _TOP
    )
    time = _time_axis(account)
    boxes = sorted(
        (
            _box(life, offset, account, time, bytes_axis)
            for life, offset in zip(account.lives, account.arena.offsets, strict=True)
            if life.num_bytes
        ),
        key=lambda box: -box.height * box.width,
    )
    seen = [box for box in boxes if box.height >= _SMALL][:_BOXES]
    alone = {id(box) for box in seen}
    shapes = [
        *_heading("blocks in a planned arena", account, _LEGEND),
        *axes(time, bytes_axis),
        *_actions(account, time),
    ]
    shapes += _merged([box for box in boxes if id(box) not in alone])
    for box in seen:
        shapes.append(
            rect(
                Area(box.x, box.y, box.width, round(box.height, 2)),
                COLOURS[box.life.category],
                _block_tip(box.life, account),
                ' fill-opacity="0.85" stroke="#fff" stroke-width="0.4"',
            )
        )
    shapes += _accesses(seen, time)
    used = {box.life.category for box in boxes}
    items, bottom = legend(
        ((COLOURS[c], c.value) for c in Category if c in used),
        _LEFT,
        _TOP + _PLOT + 54,
        _WIDTH - _RIGHT,
    )
    marks = [
        f'<path d="M{_LEFT + 3} {bottom - 6} v6" stroke="{INK}"/>',
        note("read", _LEFT + 12, bottom + 2),
        f'<path d="M{_LEFT + 63} {bottom - 6} v10" stroke="#fff" stroke-width="4"/>'
        f'<path d="M{_LEFT + 63} {bottom - 8} v12" stroke="{INK}" stroke-width="2"/>',
        note("write, in blocks large enough to show them", _LEFT + 72, bottom + 2),
    ]
    return Picture(bottom + 24, [*shapes, *items, *marks])


def draw_strip(account: Account) -> Picture:
    """Draw bytes by category over time, with the peak marked."""
    peak = account.behaviour.peak
    time = _time_axis(account)
    held = _columns(account, time)
    most = max((sum(numbers.values()) for numbers in held), default=0)
    bytes_axis = _bytes_axis("bytes", max(most, peak.num_bytes, 1) * 1.06, _TOP + _PLOT, _TOP)
    shapes = [
        *_heading("memory by category", account, _LEGEND),
        *axes(time, bytes_axis),
        *_actions(account, time),
    ]
    below = [0] * len(held)
    for category in Category:
        above = [low + numbers.get(category, 0) for low, numbers in zip(below, held, strict=True)]
        if above != below:
            shapes.append(
                f'<path d="{_band(below, above, bytes_axis)}" fill="{COLOURS[category]}">'
                f"<title>{category.value}</title></path>"
            )
        below = above
    at = time(_within(peak.time, account))
    top = bytes_axis(peak.num_bytes)
    end = "end" if at > _WIDTH / 2 else ""
    action = f" in {peak.action}" if peak.action else ""
    shapes += [
        f'<path d="M{at:.1f} {_TOP + _PLOT} V{_TOP}" stroke="{INK}" stroke-dasharray="4 3"/>',
        f'<circle cx="{at:.1f}" cy="{top:.1f}" r="4" fill="{INK}"/>',
        note(
            f"peak: {sized(peak.num_bytes)}{action}, step {peak.step}",
            at + (-9 if end else 9),
            top - 6,
            end,
        ),
    ]
    shares = sorted(((c, n) for c, n in peak.by_category.items() if n), key=lambda item: -item[1])
    items, bottom = legend(
        ((COLOURS[c], f"{c.value}: {sized(n)} at the peak") for c, n in shares),
        _LEFT,
        _TOP + _PLOT + 54,
        _WIDTH - _RIGHT,
    )
    return Picture(bottom + 12, [*shapes, *items])


def draw_intervals(account: Account) -> Picture:
    """Draw access intervals by length and bytes of the tensor; below a link's line the tensor could
    be swapped out during the interval."""
    points = account.gaps
    unit = "time" if account.timed else f"time in {account.time_unit}"
    shortest, longest = (f((p.seconds for p in points), default=1.0) for f in (min, max))
    least, most = (f((p.num_bytes for p in points), default=1) for f in (min, max))
    x = Axis(
        f"{unit} between two accesses of a tensor",
        shortest / 1.5,
        longest * 1.5,
        _LEFT,
        _WIDTH - _RIGHT,
        lasting if account.timed else "{:g}".format,
        10,
    )
    y = Axis("bytes of the tensor", max(1, least) / 2, most * 2, _TOP + _PLOT, _TOP, sized, 4)
    shapes = [*_heading("access intervals", account, f"{len(points):,} intervals"), *axes(x, y)]
    cells: dict[tuple[int, int, Category], list[str]] = defaultdict(list)
    for p in points:
        cells[int(x(p.seconds) // _CELL), int(y(p.num_bytes) // _CELL), p.category].append(p.tensor)
    for (column, row, category), tensors in sorted(cells.items(), key=lambda item: -len(item[1])):
        count = len(tensors)
        radius = min(3 + count**0.5 / 3, 9)
        tip = escape(f"{count:,} interval{'s' * (count > 1)} of {category.value}{_names(tensors)}")
        shapes.append(
            f'<circle cx="{(column + 0.5) * _CELL:.1f}" cy="{(row + 0.5) * _CELL:.1f}" '
            f'r="{radius:.1f}" '
            f'fill="{COLOURS[category]}" fill-opacity="0.7"><title>{tip}</title></circle>'
        )
    used = {p.category for p in points}
    items, bottom = legend(
        ((COLOURS[c], c.value) for c in Category if c in used),
        _LEFT,
        _TOP + _PLOT + 54,
        _WIDTH - _RIGHT,
    )
    shapes += items
    if account.timed:
        lines, bottom = _swap_lines(points, x, y, bottom)
        shapes += lines
    return Picture(bottom + 12, shapes)


def _names(tensors: Iterable[str]) -> str:
    """Return the names of the named tensors, each once; empty if there are none."""
    names = [name for name in dict.fromkeys(tensors) if name]
    more = len(names) - _NAMES
    if more > 0:
        names = [*names[:_NAMES], f"{more:,} more"]
    return f": {', '.join(names)}" if names else ""


def _swap_lines(points: Sequence[Gap], x: Axis, y: Axis, top: float) -> tuple[list[str], float]:
    """Return the lines S = ATI / (1/B_d2h + 1/B_h2d), and for each a row of text with the number of
    intervals under it."""
    shapes = []
    for number, (link, colour) in enumerate(zip(LINKS.values(), cycle(_LINKS), strict=False)):
        per_second = swappable(1.0, link)
        low = max(per_second * x.low, y.low)
        high = min(per_second * x.high, y.high)
        under = sum(p.num_bytes <= swappable(p.seconds, link) for p in points)
        if low < high:
            end = x(high / per_second)
            shapes += [
                f'<path d="M{x(low / per_second):.1f} {y(low):.1f} L{end:.1f} {y(high):.1f}" '
                f'stroke="{colour}" '
                f'stroke-width="1.5" fill="none"><title>{link.name}</title></path>',
                f'<text class="mid" x="{end:.1f}" '
                f'y="{y(high) - 6 - number % 2 * 13:.1f}">{link.name}</text>',
            ]
        shapes += [
            rect(Area(_LEFT, top + 4, 22, 2), colour),
            note(
                f"{link.name}: in {under:,} intervals, below its line, a tensor could leave and be "
                "back without "
                f"costing time; in {len(points) - under:,}, above it, not",
                _LEFT + 30,
                top + 9,
            ),
        ]
        top += 20
    return shapes, top


# -- parts


def _heading(what: str, account: Account, more: str = "") -> list[str]:
    return [
        note(f"{account.name}: {what}", _LEFT, 30, "title"),
        note("; ".join(filter(None, (account.steps, more))), _LEFT, 50),
    ]


def _time_axis(account: Account) -> Axis:
    unit = 1e-3 if account.timed else 1.0
    return Axis(
        f"time in {account.time_unit}, from the beginning of step {account.first_step}",
        account.start,
        max(account.end, account.start + unit / 1e3),
        _LEFT,
        _WIDTH - _RIGHT,
        unit=unit,
    )


def _bytes_axis(what: str, most: float, first: float, last: float) -> Axis:
    name, size = byte_unit(most)
    return Axis(f"{what} in {name}", 0, max(most, 1), first, last, unit=size)


def _within(time: float, account: Account) -> float:
    return min(max(time, account.start), account.end)


def _actions(account: Account, time: Axis) -> Iterator[str]:
    """Yield the row of actions above a picture."""
    y = _TOP - 30
    height = 18
    yield rect(Area(_LEFT, y, _WIDTH - _RIGHT - _LEFT, height), IDLE)
    drawn = [
        (parse_action(span.action), left, right)
        for span in account.spans
        if span.action
        and (right := time(_within(span.end, account)))
        - (left := time(_within(span.start, account)))
        > _SEEN
    ]
    for action, left, right in drawn:
        colour, css = _SHADES.get(action.kind, (_BESIDE, ""))
        yield rect(Area(left, y, max(right - left - 0.6, 0.3), height), colour, str(action))
        if right - left > 7.5 * len(text := str(action.microbatch)) + 3 and action.kind in _SHADES:
            yield f'<text class="mid {css}" x="{(left + right) / 2:.1f}" y="{y + 13.5}">{text}</text>'
    yield f'<text class="muted end" x="{_LEFT - 8}" y="{y + 13.5}">actions</text>'


@dataclass(frozen=True, slots=True)
class _Box:
    """A block in a picture. Units: pixels."""

    life: Life
    x: float
    y: float
    width: float
    height: float


def _box(life: Life, offset: int, account: Account, time: Axis, place: Axis) -> _Box:
    left = time(_within(life.born, account))
    right = time(_within(account.end if life.died is None else life.died, account))
    top = place(offset + life.num_bytes)
    bottom = place(offset)
    return _Box(life, left, top, right - left, bottom - top)


def _block_tip(life: Life, account: Account) -> str:
    writes = sum(access.writes for access in life.accesses)
    made = (life.op or life.name or "there before") + (
        f" in {life.born_in}" if life.born_in else ""
    )
    layer = f", block {life.layer} of the model" if life.layer >= 0 else ""
    until = f", until {life.died_in}" if life.died_in else ""
    return (
        f"{life.category.value}, {sized(life.num_bytes)}: {made}{until}{layer}; "
        f"{len(life.accesses) - writes} reads, {writes} writes"
    )


def _merged(boxes: Sequence[_Box]) -> Iterator[str]:
    """Yield boxes that are too small to be seen, as a raster whose cells have the colour of the
    category with the largest area in them; neighbours of one colour form one shape."""
    if not boxes:
        return
    categories = list(dict.fromkeys(box.life.category for box in boxes))
    kinds = np.array([categories.index(box.life.category) for box in boxes])
    corners = np.array([(box.x, box.y, box.x + box.width, box.y + box.height) for box in boxes])
    width = float(_ROW)
    while True:
        covered = _covered(kinds, corners, width, len(categories))
        drawn = np.where(covered.sum(0) > _COVERED * _ROW, covered.argmax(0), -1)
        runs = list(_runs(drawn))
        if len(runs) <= _BOXES or width > _WIDTH:
            break
        width *= 2
    for number, category in enumerate(categories):
        path = "".join(
            f"M{first * width:g} {_ROW * row}H{stop * width:g}v{_ROW}H{first * width:g}z"
            for kind, row, first, stop in runs
            if kind == number
        )
        if path:
            yield (
                f'<path d="{path}" fill="{COLOURS[category]}">'
                f"<title>{category.value}, small blocks</title></path>"
            )


def _covered(kinds: Ints, corners: Floats, width: float, num_kinds: int) -> Floats:
    """Return the pixels in height, times the share of the width, that boxes of each kind cover in
    each cell of a raster.

    Args:
        kinds: The kind of each box.
        corners: Left, top, right and bottom of each box, in pixels.
        width: Width of a cell in pixels; _ROW is its height.
        num_kinds: Number of kinds.

    Shapes: kinds [n], corners [n, 4], result [kinds, rows, columns].
    """
    first = (corners[:, 1] // _ROW).astype(np.int64)
    last = (corners[:, 3] // _ROW).astype(np.int64)
    box = np.repeat(np.arange(len(kinds)), last - first + 1)
    begins = np.cumsum(last - first + 1) - (last - first + 1)
    row = first[box] + np.arange(len(box)) - begins[box]
    top = corners[box, 1]
    bottom = corners[box, 3]
    height = np.minimum(bottom, _ROW * (row + 1)) - np.maximum(top, _ROW * row)
    left = corners[box, 0] / width
    right = corners[box, 2] / width
    begin = left.astype(np.int64)
    end = right.astype(np.int64)
    kind = kinds[box]
    covered = np.zeros((num_kinds, int(last.max()) + 1, int(end.max()) + 2))
    # a box covers a part of the cells with its ends, and all cells between them
    np.add.at(covered, (kind, row, begin), height * (begin - left))
    np.add.at(covered, (kind, row, end), height * (right - end))
    change = np.zeros_like(covered)
    np.add.at(change, (kind, row, begin), height)
    np.add.at(change, (kind, row, end), -height)
    return covered + change.cumsum(2)


def _runs(drawn: Ints) -> Iterator[tuple[int, int, int, int]]:
    """Yield the kind, row, first column and end of neighbours of one kind; -1 is none."""
    for row, kinds in enumerate(drawn):
        (steps,) = np.nonzero(np.diff(kinds))
        edges = [0, *(steps + 1).tolist(), len(kinds)]
        for first, stop in pairwise(edges):
            if kinds[first] >= 0:
                yield int(kinds[first]), row, first, stop


def _accesses(boxes: Sequence[_Box], time: Axis) -> Iterator[str]:
    """Yield ticks of reads, in the upper half of a box, and of writes, over its full height; the
    largest boxes first."""
    paths: dict[bool, list[str]] = {False: [], True: []}
    left = _TICKS
    for box in boxes:
        if box.height < 5 or box.width < 5 or left <= 0:
            continue
        marks = {
            (round(time(access.time), 1), access.writes)
            for access in box.life.accesses
            if time.low <= access.time <= time.high
        }
        left -= len(marks)
        for x, writes in sorted(marks):
            height = box.height * (0.9 if writes else 0.45)
            paths[writes].append(f"M{x} {box.y + 0.05 * box.height:.1f}v{height:.1f}")
    for writes, parts in paths.items():
        if parts:
            style = (
                'stroke-width="1.4" stroke-opacity="0.75"'
                if writes
                else 'stroke-width="0.7" stroke-opacity="0.6"'
            )
            yield f'<path d="{"".join(parts)}" stroke="{INK}" fill="none" {style} pointer-events="none"/>'


def _columns(account: Account, time: Axis) -> list[dict[Category, int]]:
    """Return bytes by category in each column of pixels, at the column's maximum."""
    most: list[dict[Category, int]] = [{} for _ in range(_WIDTH - _RIGHT - _LEFT)]
    column = 0
    held = most[0]
    for when, numbers in account.levels:
        if when > account.end:
            break
        now = min(int(time(_within(when, account))) - _LEFT, len(most) - 1)
        for passed in range(column + 1, now + 1):
            most[passed] = held
        if when < account.start or sum(numbers.values()) > sum(most[now].values()):
            most[now] = numbers
        column = now
        held = numbers
    most[column + 1 :] = [held] * (len(most) - column - 1)
    return most


def _band(below: Sequence[int], above: Sequence[int], place: Axis) -> str:
    """Return the outline of the area between two step functions, with one step per pixel."""
    path = f"M{_LEFT} {place(below[0]):.1f}V{place(above[0]):.1f}"
    for i in range(1, len(above)):
        if above[i] != above[i - 1]:
            path += f"H{_LEFT + i}V{place(above[i]):.1f}"
    path += f"H{_LEFT + len(above)}V{place(below[-1]):.1f}"
    for i in range(len(below) - 1, 0, -1):
        if below[i] != below[i - 1]:
            path += f"H{_LEFT + i}V{place(below[i - 1]):.1f}"
    return path + "z"
