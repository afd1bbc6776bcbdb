"""Pictures of memory: they parse, say what is on their axes, no text lies on another, and shapes
are bounded."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import combinations

import pytest
from memory_behaviour.pipeline_trace import HEADER, KIB, trace

from hybridpar.memory_behaviour.analysis.account import Account, examine
from hybridpar.memory_behaviour.analysis.behaviour import analyse
from hybridpar.memory_behaviour.analysis.swap import LINKS, swappable
from hybridpar.memory_behaviour.events import Category, Life, MemoryEvent, Span, What
from hybridpar.memory_behaviour.pictures import drawing
from hybridpar.memory_behaviour.pictures.drawing import (
    COLOURS,
    draw_blocks,
    draw_intervals,
    draw_strip,
    pictures,
    stacked,
)
from hybridpar.memory_behaviour.pictures.page import html_page, perfetto
from hybridpar.memory_behaviour.pictures.sections import Section, _swaps, _tensors, as_json, as_text

SVG = "{http://www.w3.org/2000/svg}"


def account_of(spans: list[Span], *, timed: bool = True) -> Account:
    return examine(HEADER, analyse(spans), lambda: spans, timed=timed)


@pytest.fixture(scope="module")
def account() -> Account:
    return account_of(trace(3))


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")
    ]


def boxes(svg: str) -> list[tuple[float, float, float, float, str]]:
    """About where horizontal texts are: left, top, right, bottom."""
    found = []

    def walk(element: ElementTree.Element, down: float) -> None:
        if move := re.fullmatch(r"translate\(0 (\d+)\)", element.get("transform", "")):
            down += float(move[1])
        if element.tag == f"{SVG}text" and "transform" not in element.attrib:
            css = element.get("class", "")
            text = element.text or ""
            width = len(text) * (8.6 if "title" in css else 6.0)
            x = float(element.get("x", 0))
            y = down + float(element.get("y", 0))
            left = x - width * (0.5 if "mid" in css else 1.0 if "end" in css else 0.0)
            found.append((left, y - 10, left + width, y + 2, text))
        for child in element:
            walk(child, down)

    walk(ElementTree.fromstring(svg), 0.0)
    return found


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_texts_lie_in_the_page_and_not_on_each_other(schedule: str, timed: bool) -> None:
    svg = stacked(pictures(account_of(trace(3, schedule=schedule), timed=timed)))
    height = float(ElementTree.fromstring(svg).get("height", 0))
    placed = boxes(svg)
    for left, top, right, bottom, text in placed:
        assert left >= 0, text
        assert right <= 1200, text
        assert 0 <= top <= bottom <= height, text
    for a, b in combinations(placed, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_every_picture_has_a_title_axes_with_units_and_a_legend(account: Account) -> None:
    said = {draw: texts(draw(account).svg()) for draw in (draw_blocks, draw_strip, draw_intervals)}
    for found in said.values():
        assert found[0].startswith("rank 1 (pp=1 dp=0 tp=0): ")
        assert any(text.startswith("activations") for text in found)
    for draw in (draw_blocks, draw_strip):
        assert "time in milliseconds, from the beginning of step 2" in said[draw]
    assert "offset in the planned arena in MiB" in said[draw_blocks]
    assert "bytes in MiB" in said[draw_strip]
    assert {"time between two accesses of a tensor", "bytes of the tensor"} <= set(
        said[draw_intervals]
    )
    counted = texts(draw_strip(account_of(trace(3), timed=False)).svg())
    assert any("forwards of one micro-batch" in text for text in counted)


def test_the_strip_marks_the_peak_and_says_who_owns_it(account: Account) -> None:
    svg = draw_strip(account).svg()
    peak = account.behaviour.peak
    assert f"peak: {peak.num_bytes / 2**20:.3g} MiB in {peak.action}, step {peak.step}" in texts(
        svg
    )
    owners = [re.fullmatch(r"(.*): ([\d.]+) (MiB|KiB) at the peak", text) for text in texts(svg)]
    total = sum(float(m[2]) * {"MiB": 2**20, "KiB": KIB}[m[3]] for m in owners if m)
    assert total == pytest.approx(peak.num_bytes, rel=0.01)  # three digits each
    paths = [
        p
        for p in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if p.find(f"{SVG}title") is not None
    ]
    top = min(float(y) for p in paths for y in re.findall(r"V([\d.]+)", p.get("d", "")))
    circle = next(ElementTree.fromstring(svg).iter(f"{SVG}circle"))
    assert top == pytest.approx(float(circle.get("cy", 0)), abs=0.1)


def test_blocks_are_drawn_at_their_offsets_and_none_overlap(account: Account) -> None:
    root = ElementTree.fromstring(draw_blocks(account).svg())
    drawn = [e for e in root.iter(f"{SVG}rect") if e.get("fill-opacity")]
    assert len(drawn) == sum(life.num_bytes > 64 * KIB for life in account.lives)
    places = [[float(e.get(name, 0)) for name in ("x", "y", "width", "height")] for e in drawn]
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(places, 2):
        apart = x + w <= x2 + 0.2 or x2 + w2 <= x + 0.2 or y + h <= y2 + 0.1 or y2 + h2 <= y + 0.1
        assert apart, "up to the rounding of pixels"
    tips = [e.findtext(f"{SVG}title", "") for e in drawn]
    assert any(
        re.match(
            r"activations, 512 KiB: aten::gelu in F4@1v1, until B4@1v1, block 2 of the model; 1 "
            r"reads, "
            r"1 writes",
            tip,
        )
        for tip in tips
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("unit", [64, 256 * KIB])
def test_shapes_are_bounded_however_many_blocks_there_are(unit: int) -> None:
    account = account_of(trace(4, layers=150, unit=unit))
    assert len(account.lives) > 3600
    svg = stacked(pictures(account))
    assert sum(1 for _ in ElementTree.fromstring(svg).iter()) < 12_000
    assert len(svg) < 2_000_000


def test_intervals_above_and_below_the_line_of_a_link_are_all(account: Account) -> None:
    said = "\n".join(texts(draw_intervals(account).svg()))
    gaps = account.gaps
    for name, link in LINKS.items():
        fit = sum(gap.num_bytes <= swappable(gap.seconds, link) for gap in gaps)
        assert f"{name}: in {fit:,} intervals, below its line" in said
        assert f"in {len(gaps) - fit:,}, above it, not" in said
    untimed = "\n".join(texts(draw_intervals(account_of(trace(2), timed=False)).svg()))
    assert "pcie" not in untimed


def test_the_report_and_the_picture_count_the_same_intervals() -> None:
    """An operator that reads and writes a block accesses it at one time."""
    spans = [
        Span(
            step,
            f"F{step - 1}@0v0",
            float(step),
            step + 0.9,
            [
                *([MemoryEvent(What.MALLOC, 0, 4096, "aten::empty", 1.0)] if step == 1 else []),
                MemoryEvent(What.READ, 0, 4096, "aten::add_", step + 0.2),
                MemoryEvent(What.WRITE, 0, 4096, "aten::add_", step + 0.2),
                MemoryEvent(What.READ, 0, 4096, "aten::mul", step + 0.5),
            ],
        )
        for step in (1, 2)
    ]
    account = account_of(spans)
    assert [gap.seconds for gap in account.gaps] == pytest.approx([0.3, 0.7, 0.3])
    assert account.behaviour.intervals.distribution.count == 3
    (swaps,) = _swaps(account)
    assert {row[2] for row in swaps.rows[1:]} == {"3"}
    assert any("3 intervals" in text for text in texts(draw_intervals(account).svg()))


def test_every_category_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Category)
    assert len(set(COLOURS.values())) == len(Category)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = []
        self.seen = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_other_file(account: Account) -> None:
    page = html_page(
        account, [Section("a < b & c", [["x", "MiB"], ["<i>", "1"]], notes=["so & so"])]
    )
    parser = _Page()
    parser.feed(page)
    parser.close()
    assert not parser.open
    assert {"svg", "table", "h1", "h2", "title"} <= parser.seen
    assert not parser.seen & {"script", "link", "img", "i"}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<td class='text'>&lt;i&gt;</td><td>1</td>" in page
    assert (
        as_text([Section("title", [["x", "MiB"], ["long name", "1"]])])
        == "title\nx          MiB\nlong name    1"
    )


def test_perfetto_shows_actions_and_a_counter_of_all_categories(account: Account) -> None:
    entries = json.loads(perfetto(account))["traceEvents"]
    counters = [e for e in entries if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"memory"}
    assert {e["pid"] for e in entries} == {1}
    peak = account.behaviour.peak
    assert max(sum(e["args"].values()) for e in counters) == peak.num_bytes
    assert all(set(e["args"]) == {c.value for c in account.behaviour.breakdown} for e in counters)
    slices = [e for e in entries if e["ph"] == "X"]
    assert [e["name"] for e in slices] == [span.action for span in account.spans if span.action]
    at_peak = next(e for e in counters if sum(e["args"].values()) == peak.num_bytes)
    inside = next(e for e in slices if e["name"] == peak.action)
    assert inside["ts"] <= at_peak["ts"] <= inside["ts"] + inside["dur"]


def _small(category: Category, x: float, y: float, width: float, height: float) -> drawing._Box:
    life = Life(0, 1024, "mul", 0, category.value, x, "F0@0", 1)
    assert life.category is category
    return drawing._Box(life, x, y, width, height)


def _areas(shapes: Iterable[str]) -> dict[str, float]:
    """Pixels of each colour."""
    found = {}
    for shape in shapes:
        colour = re.search(r'fill="(#\w+)"', shape)[1]  # type: ignore[index]
        runs = re.findall(r"M([\d.]+) [\d.]+H([\d.]+)v2H", shape)
        found[colour] = sum(2 * (float(stop) - float(first)) for first, stop in runs)
    return found


@pytest.mark.thorough
def test_short_temporaries_do_not_hide_small_activations() -> None:
    """A large model: 200 rows of activations that live long, each with 400 temporaries of a
    thousandth of the time."""
    activations = [_small(Category.ACTIVATIONS, 100, 2 * row, 1000, 1.2) for row in range(200)]
    temporaries = [
        _small(Category.TEMPORARIES, 100 + 2.5 * i, 2 * row + 1.2, 1, 0.8)
        for row in range(200)
        for i in range(400)
    ]
    areas = _areas(drawing._merged([*activations, *temporaries]))
    assert areas[COLOURS[Category.ACTIVATIONS]] > 0.95 * 1000 * 400
    assert areas.get(COLOURS[Category.TEMPORARIES], 0.0) < 0.05 * 1000 * 400


def test_small_blocks_cover_their_area() -> None:
    """A band of many thin blocks, and one box that is taller than a row."""
    band = [_small(Category.MASTER, 200, 100 + 0.25 * i, 300, 0.25) for i in range(80)]
    tall = [_small(Category.OTHER, 700, 41, 100, 30)]
    areas = _areas(drawing._merged([*band, *tall]))
    assert areas[COLOURS[Category.MASTER]] == pytest.approx(300 * 20, rel=0.05)
    assert areas[COLOURS[Category.OTHER]] == pytest.approx(100 * 30, rel=0.1)
    assert list(drawing._merged([])) == []


@pytest.mark.thorough
def test_shapes_of_small_blocks_are_bounded() -> None:
    kinds = [Category.ACTIVATIONS, Category.TEMPORARIES, Category.MASTER]
    many = [
        _small(kinds[(i + row) % len(kinds)], 100 + 2 * i, 2 * row, 2, 1.4)
        for row in range(200)
        for i in range(500)
    ]
    path = "".join(drawing._merged(many))
    assert path.count("z") <= drawing._BOXES


def test_text_page_and_picture_name_the_tensors_of_a_block() -> None:
    """A stage's weights, all read in F and B: the larger the tensor, the earlier it is listed."""
    names = [f"weights/0/blocks.{number}.w" for number in range(1, 11)]
    sizes = {name: KIB * (number + 1) for number, name in enumerate(names)}
    total = sum(sizes.values())

    def read(start: float) -> list[MemoryEvent]:
        return [
            MemoryEvent(What.READ, 0, sizes[name], "aten::mm", start + i / 100, name=name)
            for i, name in enumerate(names)
        ]

    spans = [
        Span(1, "", 0.0, 0.0, [MemoryEvent(What.MALLOC, 0, total, "", 0.0, name="weights 0")]),
        Span(1, "F0@0v0", 1.0, 2.0, read(1.0)),
        Span(1, "B0@0v0", 3.0, 4.0, read(3.0)),
    ]
    account = account_of(spans)
    assert [(one.tensor, one.num_bytes, one.longest) for one in account.tensors] == [
        (name, sizes[name], pytest.approx(2.0)) for name in reversed(names)
    ]
    (section,) = _tensors(account)
    assert [row[1] for row in section.rows[1:]] == names[::-1]
    lines = as_text([section]).splitlines()
    assert [line.split()[1] for line in lines[2:10]] == names[:1:-1]
    assert lines[10] == "and 2 more, which memory.html (--output) lists"
    page = html_page(account, [section])
    assert all(page.count(name) == 2 for name in names), "in the table, and in the picture"
    assert [one["tensor"] for one in as_json(account, [])["tensors"]] == names[::-1]
    assert "10 intervals" in "".join(texts(draw_intervals(account).svg()))
    assert account.behaviour.intervals.distribution.count == 10
