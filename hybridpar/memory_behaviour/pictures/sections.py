"""The report on a rank's memory, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridpar.errors import ConfigError
from hybridpar.memory_behaviour.analysis.account import Account, offloading, place_text
from hybridpar.memory_behaviour.analysis.behaviour import Behaviour
from hybridpar.memory_behaviour.analysis.distribution import Distribution
from hybridpar.memory_behaviour.analysis.swap import LINKS, Link
from hybridpar.memory_behaviour.events import Category, Header
from hybridpar.memory_behaviour.pictures.chart import lasting, sized
from hybridpar.prediction.knobs import Saving
from hybridpar.prediction.memory_report import aligned, shares
from hybridpar.prediction.walk import StageMemory
from hybridpar.schedules.action import NO_VERSION, parse_action
from hybridpar.schedules.kinds import ACTION_SPECS

_MIB = 2**20
_MOST = 8
"""Most rows of a table of blocks or layers; the rest is summed up in one more row."""
_SAID = 1000
"""Divisor of the peak: smallest saving that is reported."""
_MEANING = {
    Category.MASTER: "weights in fp32",
    Category.OPTIMIZER: "its moments",
    Category.INPUTS: "inputs of stages, kept until the backward",
    Category.ACTIVATIONS: "kept by layers until the backward",
    Category.FACTORS: "inputs and gradients of layers, kept until the weight gradients are computed",
    Category.TEMPORARIES: "used within one action",
    Category.COMMUNICATION: "messages between stages",
}
"""Meanings of categories whose names alone do not say them."""


@dataclass(frozen=True)
class Section:
    """A section of a report.

    Args:
        rows: Rows of a table, starting with its heading.
        num_left: Number of text columns.
        notes: Lines below the table.
        most: Rows that a text has, without the heading; a page has all of them. 0: all.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    num_left: int = 1
    notes: Sequence[str] = ()
    most: int = 0


def report(account: Account, memory: StageMemory, savings: Sequence[Saving]) -> list[Section]:
    """Return the report: owners and time of the peak, knobs, lifetimes, possible swaps,
    fragmentation, stability.

    Args:
        account: The account.
        memory: The predicted memory of the rank.
        savings: Savings of the knobs at the rank's peak.
    """
    return [
        *_peak(account),
        *_knobs(memory, savings),
        *_offloading(account),
        _lifetimes(account),
        *_tensors(account),
        *_swaps(account),
        _fragmentation(account),
        _stability(account.behaviour),
    ]


def ranks_section(traces: Iterable[tuple[Header, Behaviour]]) -> Section:
    """Return a section with the peaks of ranks."""
    rows = []
    for header, behaviour in traces:
        peak = behaviour.peak
        owner, _ = max(peak.by_category.items(), key=lambda item: item[1], default=(None, 0))
        rows.append(
            [
                str(header.rank),
                place_text(header),
                peak.action or "-",
                owner.value if owner else "-",
                str(peak.step),
                _mib(peak.num_bytes),
            ]
        )
    return Section("peaks", [["rank", "place", "in", "most are", "of step", "MiB"], *rows], 4)


def as_json(account: Account, savings: Sequence[Saving]) -> dict[str, Any]:
    """Return the report as plain values. Units: bytes."""
    behaviour = account.behaviour
    usage = account.usage
    peak = behaviour.peak
    return {
        "ok": True,
        "rank": account.header.rank,
        "place": account.header.place,
        "device": account.header.device,
        "predicted": account.header.predicted,
        "num_steps": behaviour.num_steps,
        "stable": [behaviour.stable_from, behaviour.stable_until],
        "peak": {
            "bytes": peak.num_bytes,
            "step": peak.step,
            "action": peak.action,
            "by_category": {c.value: n for c, n in peak.by_category.items()},
            "activations_by_block": peak.by_layer,
        },
        "knobs": [asdict(saving) for saving in savings],
        "offloaded": [asdict(saving) for saving in offloading(account.levels)],
        "tensors": [
            {
                "category": one.category.value,
                "tensor": one.tensor,
                "bytes": one.num_bytes,
                "intervals": len(one.seconds),
                "median": one.median,
                "longest": one.longest,
            }
            for one in account.tensors
        ],
        "swaps": [asdict(swap) for swap in account.swaps],
        "fragmentation": {
            "largest_live": usage.largest_live,
            "reserved": usage.reserved,
            "arena": account.arena.num_bytes,
        },
    }


def as_text(sections: Iterable[Section]) -> str:
    """Return sections below each other, with aligned columns."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections)


def _lines(section: Section) -> list[str]:
    rows = section.rows[: section.most + 1] if section.most else section.rows
    more = len(section.rows) - len(rows)
    return [
        section.title,
        *([aligned(rows, section.num_left)] if rows else []),
        *([f"and {more:,} more, which memory.html (--output) lists"] if more else []),
        *section.notes,
    ]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.2f}"


def _parts(title: str, what: str, parts: Mapping[str, int]) -> Section:
    """Return a table of parts in MiB and percent, and their sum."""
    percent = shares(parts)
    rows = [[name, _mib(part), f"{percent[name]:.1f}"] for name, part in parts.items()]
    return Section(title, [[what, "MiB", "%"], *rows, ["all", _mib(sum(parts.values())), "100.0"]])


def _peak(account: Account) -> Iterator[Section]:
    peak = account.behaviour.peak
    where = f"in {peak.action}" if peak.action else "between two actions"
    when = f", {lasting(peak.time)} into the trace" if account.timed else ""
    categories = {c.value: peak.by_category[c] for c in Category if peak.by_category.get(c)}
    named = "; ".join(
        f"{c.value}: {meaning}" for c, meaning in _MEANING.items() if c.value in categories
    )
    parts = _parts(
        f"{account.name}: a peak of {sized(peak.num_bytes)} {where} of step {peak.step}{when}",
        "category",
        dict(sorted(categories.items(), key=lambda item: -item[1])),
    )
    yield replace(parts, notes=[*action_notes(peak.action), *([f"{named}."] if named else [])])
    layers = sorted(peak.by_layer.items(), key=lambda item: -item[1])
    blocks = {"none" if layer < 0 else str(layer): part for layer, part in layers[:_MOST]}
    if rest := sum(part for _, part in layers[_MOST:]):
        blocks[f"{len(layers) - _MOST} others"] = rest
    if blocks:
        yield _parts("its activations, by the model's block that made them", "block", blocks)
    yield Section(
        "its largest blocks",
        [
            ["category", "made by", "in", "of step", "model's block", "MiB"],
            *(
                [
                    life.category.value,
                    life.op or life.name,
                    life.born_in or "-",
                    str(life.born_step),
                    "-" if life.layer < 0 else str(life.layer),
                    _mib(life.num_bytes),
                ]
                for life in peak.owners[:_MOST]
            ),
        ],
        3,
    )


def action_notes(text: str) -> list[str]:
    """Return a line that explains an action; none for what is not an action of a plan."""
    try:
        action = parse_action(text)
    except ConfigError:
        return []
    row = ACTION_SPECS[action.kind]
    if row.per_item:
        return []
    number = "step" if row.per_batch else "micro-batch"
    version = (
        ""
        if action.version == NO_VERSION or row.makes
        else f", with weight version {action.version}"
    )
    what = f"{row.name} of {number} {action.microbatch} on stage {action.stage}{version}"
    return [f"{text}: {what} (numbers count from 0)."]


def _knobs(memory: StageMemory, savings: Sequence[Saving]) -> Iterator[Section]:
    copy = (
        f"{_mib(memory.checkpoint)} MiB of it are the copy of the state that a checkpoint is "
        "written from, which "
        "is in no trace."
    )
    if savings:
        yield Section(
            f"settings, by what they save of the predicted peak of {_mib(memory.total)} MiB",
            [["", "saves MiB", "leaves MiB"], *map(_saving, savings)],
            notes=[copy] * (memory.checkpoint > 0),
        )


def _offloading(account: Account) -> Iterator[Section]:
    least = account.behaviour.peak.num_bytes / _SAID
    if found := [one for one in offloading(account.levels) if one.saves >= least]:
        yield Section(
            "categories, by what the peak loses if they are offloaded",
            [["", "saves MiB", "leaves MiB"], *map(_saving, found)],
        )


def _saving(one: Saving) -> list[str]:
    return [one.knob, _mib(one.saves), _mib(one.peak)]


def _lifetimes(account: Account) -> Section:
    """Return a section of percentiles; a gap is the time between two accesses of a tensor."""
    gaps: dict[Category, Distribution] = defaultdict(Distribution)
    for gap in account.gaps:
        gaps[gap.category].add(gap.seconds)
    behaviour = account.behaviour
    time = lasting if account.timed else "{:.3g}".format
    rows = [
        [
            "category",
            "blocks",
            "MiB in all",
            "reads",
            "writes",
            "lives 50 %",
            "90 %",
            "interval 50 %",
            "90 %",
        ]
    ]
    for category in (c for c in Category if c in behaviour.breakdown):
        totals = behaviour.breakdown[category]
        cells = [
            f"{totals.num_blocks:,}",
            _mib(totals.num_bytes),
            f"{totals.reads:,}",
            f"{totals.writes:,}",
        ]
        for table in (behaviour.lifetimes, gaps):
            found = table.get(category)
            cells += (
                [time(found.percentile(p)) for p in (50, 90)]
                if found and found.count
                else ["-", "-"]
            )
        rows.append([category.value, *cells])
    unit = "" if account.timed else f" Times are in {account.time_unit}."
    return Section(
        "lifetimes and access intervals",
        rows,
        notes=[
            "50 % and 90 % are percentiles: half of the blocks live no longer than the first says. "
            "An interval is the time between two accesses of a tensor: a block, or a weight or "
            f"gradient in it.{unit}"
        ],
    )


def _tensors(account: Account) -> Iterator[Section]:
    """Yield a section on the named tensors, if there are any."""
    time = lasting if account.timed else "{:.3g}".format
    rows = [
        [
            one.category.value,
            one.tensor,
            _mib(one.num_bytes),
            f"{len(one.seconds):,}",
            time(one.median),
            time(one.longest),
        ]
        for one in account.tensors
    ]
    if rows:
        heading = ["category", "tensor", "MiB", "intervals", "50 %", "longest"]
        yield Section("access intervals of tensors", [heading, *rows], 2, most=_MOST)


def _swaps(account: Account) -> Iterator[Section]:
    if not account.timed:
        yield Section(
            "what could be swapped",
            notes=[
                "Nothing ran, so no time is known: --profile or --cluster gives estimated times, a "
                "run measured ones."
            ],
        )
        return
    yield Section(
        "what could leave over a link and be back without costing time",
        [
            ["link", "intervals", "of", "saves MiB of the peak"],
            *(
                [swap.link, f"{swap.num_intervals:,}", f"{len(account.gaps):,}", _mib(swap.saves)]
                for swap in account.swaps
            ),
        ],
        notes=[
            "intervals: those long enough to copy the tensor to the host and back. "
            f"{', '.join(_link(LINKS[swap.link]) for swap in account.swaps)}."
        ],
    )


def _link(link: Link) -> str:
    return f"{link.name}: {link.d2h / 1e9:.3g} GB/s to the host, {link.h2d / 1e9:.3g} back"


def _fragmentation(account: Account) -> Section:
    usage = account.usage
    arena = account.arena
    rows = [
        ("largest living set", usage.largest_live),
        ("planned arena", arena.num_bytes),
        ("modelled caching allocator", usage.reserved),
    ]
    return Section(
        "fragmentation",
        [
            ["", "MiB", "of the largest set"],
            *(
                [name, _mib(part), f"{part / max(1, usage.largest_live):.3f}"]
                for name, part in rows
            ),
        ],
    )


def _stability(behaviour: Behaviour) -> Section:
    number = behaviour.num_steps
    first = behaviour.stable_from
    last = behaviour.stable_until
    if number == 1:
        text = "One step only: nothing to compare it with"
    elif first is None:
        text = "No two steps in a row do the same"
    else:
        text = f"Steps {first} to {last} do the same, event by event"
    return Section("stability", notes=[f"{text} (of {number})."])
