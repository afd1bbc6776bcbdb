"""Files for viewing: a self-contained HTML page with report and pictures, and a trace for
ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hybridpar.memory_behaviour.analysis.account import Account
from hybridpar.memory_behaviour.pictures.drawing import pictures
from hybridpar.memory_behaviour.pictures.sections import Section
from hybridpar.schedules.action import parse_action
from hybridpar.schedules.draw.perfetto import Slice, counter_entries, process_entries, trace_json
from hybridpar.schedules.draw.shapes import INK, MUTED

_SEEN = 500
"""Divisor of the peak: smallest change that is shown."""
_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{title}</title>
<style>
body {{ font: 14px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: {ink}; max-width: 1200px;
       margin: 2em auto; padding: 0 1em; }}
h2 {{ font-size: 15px; margin: 1.6em 0 0.4em; }}
p {{ color: {muted}; margin: 0.4em 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 2px 12px; border-bottom: 1px solid #e3e7ec; white-space: nowrap; }}
th {{ color: {muted}; font-weight: 500; }}
.text {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; margin-top: 1.5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
{body}
</body>
</html>
"""


def html_page(account: Account, sections: Iterable[Section]) -> str:
    """Return the page of an account and its report."""
    body = [
        *(picture.svg() for picture in pictures(account)),
        *(line for part in sections for line in _lines(part)),
    ]
    return _HTML.format(
        title=escape(f"Memory of {account.name}"),
        subtitle=escape(account.steps),
        ink=INK,
        muted=MUTED,
        body="\n".join(body),
    )


def _lines(section: Section) -> Iterator[str]:
    """Yield a heading, a table and paragraphs."""
    yield f"<h2>{escape(section.title)}</h2>"
    if section.rows:
        yield f"<table><thead>{_row(section.rows[0], section.num_left, 'th')}</thead><tbody>"
        yield from (_row(row, section.num_left, "td") for row in section.rows[1:])
        yield "</tbody></table>"
    yield from (f"<p>{escape(text)}</p>" for text in section.notes)


def _row(cells: Sequence[str], num_left: int, tag: str) -> str:
    parts = (f"{tag} class='text'" if i < num_left else tag for i in range(len(cells)))
    row = "".join(
        f"<{part}>{escape(cell)}</{tag}>" for part, cell in zip(parts, cells, strict=True)
    )
    return f"<tr>{row}</tr>"


def perfetto(account: Account) -> str:
    """Return a trace of actions, and below them bytes by category. Without times, one forward is
    shown as 1 ms."""
    rank = account.header.rank
    per_second = 1.0 if account.timed else 1e3
    slices = (
        Slice(span.action, parse_action(span.action).kind.value, span.start, span.end)
        for span in account.spans
        if span.action
    )
    return trace_json(
        [
            *process_entries(rank, account.name, slices, per_second),
            *counter_entries(rank, "memory", _samples(account), per_second),
        ]
    )


def _samples(account: Account) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield bytes by category at every change that is large enough to be seen."""
    least = account.behaviour.peak.num_bytes / _SEEN
    last = 0
    for time, numbers in account.levels:
        total = sum(numbers.values())
        if abs(total - last) >= least or time == account.behaviour.peak.time:
            last = total
            yield (
                time,
                {
                    category.value: numbers.get(category, 0)
                    for category in account.behaviour.breakdown
                },
            )
