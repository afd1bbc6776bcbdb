"""The report on a rank's memory as tables, and these as text or HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

from hybridpar.memory.account import Account
from hybridpar.memory.chart import lasting, sized
from hybridpar.memory.events import Category
from hybridpar.memory.knobs import Saving
from hybridpar.memory.predict import StageMemory
from hybridpar.memory.report import aligned

_MIB = 2**20
_MOST = 8
"""Rows of a table of blocks or layers; what is left over is one more."""
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Section:
    """A part of a report. rows: of a table, the first its heading; notes: lines below it."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


def report(account: Account, savings: Sequence[Saving] = ()) -> list[Section]:
    """Who owns the peak and when it is, how long blocks live, what could leave, fragmentation, stability, knobs.

    savings: of the knobs; those of offloading included.
    """
    return [*_peak(account), _lifetimes(account), _swaps(account), _fragmentation(account), _stability(account),
            *_knobs(savings)]


def as_text(sections: Iterable[Section]) -> str:
    """Sections below each other, columns aligned."""
    return "\n\n".join("\n".join([section.title, *([aligned(section.rows)] if section.rows else []), *section.notes])
                       for section in sections)


def as_html(sections: Iterable[Section]) -> Iterator[str]:
    """Yields a heading, a table and paragraphs for each section."""
    for section in sections:
        yield f"<h2>{escape(section.title)}</h2>"
        if section.rows:
            head, *rows = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
                           for row, tag in zip(section.rows, ("th", *["td"] * len(section.rows)), strict=False))
            yield f"<table><thead><tr>{head}</tr></thead><tbody>"
            yield from (f"<tr>{row}</tr>" for row in rows)
            yield "</tbody></table>"
        yield from (f"<p>{escape(text)}</p>" for text in section.notes)


def shares(parts: Mapping[_Key, int]) -> dict[_Key, float]:
    """The percentage of each part, in tenths that add up to 100."""
    total = sum(parts.values()) or 1
    tenths = {key: 1000 * part // total for key, part in parts.items()}
    by_rest = sorted(parts, key=lambda key: -(1000 * parts[key] % total))
    for key in by_rest[: 1000 - sum(tenths.values())]:
        tenths[key] += 1
    return {key: count / 10 for key, count in tenths.items()}


def short_form(memory: Sequence[StageMemory], rank_name: str, saving: Saving | None) -> list[str]:
    """The fullest rank of a prediction, who owns its peak, and what a knob saves there."""
    rank = max(range(len(memory)), key=lambda number: memory[number].total)
    stage = memory[rank]
    owners = sorted(shares(stage.columns).items(), key=lambda item: -item[1])
    whose = ", ".join(f"{name} {share:.0f} %" for name, share in owners[:4] if share >= 1)
    lines = [f"the fullest is {rank_name} {rank}, {stage.total / _MIB:,.1f} MiB in {stage.during}: {whose}"]
    if saving is not None:
        lines.append(f"{saving.knob} would save {saving.saves / _MIB:,.1f} MiB of it; "
                     "`hybridpar memory` says what all knobs save")
    return lines


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.2f}"


def _parts(title: str, what: str, parts: Mapping[str, int]) -> Section:
    """A table of parts in MiB and percent, and their sum."""
    percent = shares(parts)
    rows = [[name, _mib(part), f"{percent[name]:.1f}"] for name, part in parts.items()]
    return Section(title, [[what, "MiB", "%"], *rows, ["all", _mib(sum(parts.values())), "100.0"]])


def _peak(account: Account) -> Iterator[Section]:
    peak = account.behaviour.peak
    where = f"in {peak.action}" if peak.action else "between two actions"
    when = f" ({lasting(peak.time)} into the trace)" if account.timed else ""
    categories = {c.value: peak.by_category[c] for c in Category if peak.by_category.get(c)}
    yield _parts(f"{account.name}: a peak of {sized(peak.num_bytes)}, {where} of step {peak.step}{when}", "category",
                 dict(sorted(categories.items(), key=lambda item: -item[1])))
    layers = sorted(peak.by_layer.items(), key=lambda item: -item[1])
    named = {"none" if layer < 0 else str(layer): part for layer, part in layers[:_MOST]}
    if rest := sum(part for _, part in layers[_MOST:]):
        named[f"{len(layers) - _MOST} others"] = rest
    yield _parts("at the peak, by the model's block that made it", "block", named)
    owners = sorted(peak.owners, key=lambda life: -life.num_bytes)[:_MOST]
    yield Section("the largest there", [
        ["MiB", "category", "made by", "in", "of step", "model's block"],
        *([_mib(life.num_bytes), life.category.value, life.op or life.name, life.born_in or "-", str(life.born_step),
           "-" if life.layer < 0 else str(life.layer)] for life in owners)])
