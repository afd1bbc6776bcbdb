"""Draw a plan as an SVG picture, in the style of pipeline papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.draw.draw_text import as_timeline, number_of
from hybridpar.schedules.draw.excerpt import excerpt
from hybridpar.schedules.draw.shapes import IDLE, INK, MUTED, Area, page, rect
from hybridpar.schedules.kinds import ACTION_SPECS, COMPUTE, MOVES, PER_BATCH, PER_ITEM, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.schedules.simulate.timeline import Timeline

_COLOURS = (  # by weight version: forward, backward
    ("#bdd5f3", "#2c6ab1"),
    ("#fcd9ae", "#c7680f"),
    ("#c4e6c1", "#35843a"),
    ("#dfcef2", "#774aae"),
    ("#f7c8c5", "#b93a3a"),
    ("#b8e4e4", "#1c7d7d"),
    ("#f6cbe3", "#b23c83"),
    ("#e6d6c3", "#7d5636"),
)
# pixels
_LEFT = 74
_RIGHT = 92
_TOP = 58
_HEIGHT = 30
_LINES = {
    Kind.SEND_F: (9, "#6fa3dc"),
    Kind.SEND_B: (12, "#1d4f8b"),
    Kind.FETCH: (15, "#3aa17e"),
    Kind.RELEASE: (18, "#c7772e"),
    Kind.RELOAD: (15, "#3aa17e"),
    Kind.OFFLOAD: (18, "#c7772e"),
    Kind.HOST: (15, "#8a4fc7"),
}
"""Transfers of a stage, moves between its tiers, and the host's work: pixels below its row, and
colour."""
_STALL = "#f3cfcb"
_SHOWN_PIXELS = 0.5
_WIDEST = 3000
"""Pixels of the longest window of time in a picture."""
FORWARDS = "forwards of one micro-batch on the costliest rank"
"""The unit of time of plans whose costs are relative, not measured."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts time and rank to pixels."""

    shape: PipelineShape
    rows: Mapping[int, int]  # by rank
    per_unit: float
    pitch: int  # from one row to the next
    # CSS class of the numbers in boxes of a kind; kinds without an entry have boxes too narrow
    labels: dict[Kind, str]

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_unit

    def y(self, stage: int) -> float:
        """Return the row of the rank that holds the stage."""
        return self.row_y(self.shape.rank_of(stage))

    def row_y(self, rank: int) -> float:
        return _TOP + self.rows[rank] * self.pitch


def _scale(timeline: Timeline, per_unit: float, *, widens: bool) -> _Scale:
    """Return the scale. widens: every box is visible; a kind's boxes all have numbers or none."""
    narrowest: dict[Kind, float] = {}
    digits = 1
    for rank in timeline.plan:
        for action, start, end in timeline.shown(rank):
            if action.kind in COMPUTE and end > start:
                narrowest[action.kind] = min(narrowest.get(action.kind, end - start), end - start)
                digits = max(digits, len(number_of(action, len(timeline.plan))))
    if widens:
        per_unit = max(per_unit, 4 / min(narrowest.values(), default=1.0))
    labels = {}
    for kind, length in narrowest.items():
        fitting = [
            css
            for css, digit in (("", 7.5), ("small", 5.6))
            if digits * digit + 3 <= length * per_unit
        ]
        if fitting:
            labels[kind] = fitting[0]
    more = {*MOVES, Kind.HOST}
    moves = any(action.kind in more for actions in timeline.plan.values() for action in actions)
    shape = timeline.shape
    rows = {rank: row for row, rank in enumerate(sorted(timeline.plan))}
    return _Scale(shape, rows, per_unit, 58 if moves else 50, labels)


def draw_svg(
    drawn: Plan | Timeline,
    *,
    title: str = "",
    unit: str = FORWARDS,
    width: int = 1200,
    widens: bool = True,
    steady_idle: Sequence[float] = (),
) -> str:
    """Draw a plan as a self-contained SVG picture, `width` pixels wide or, with `widens`, as wide
    as its micro-batches need. A picture that would be too wide to look at shows a window of the
    steady state, and one of many ranks the first and the last ones (excerpt.py).

    A box is a micro-batch on a stage: light forward, dark backward (W less dark). Its colour is the
    weight version; a letter b (and so on) marks the rank's second stage. The bar below a row runs
    from the end of a batch's gradients to the update, and is dark while a reduction is under way.
    The thin lines below it are the transfers that the stage sends, then moves of items or
    activations to and from its fast tier, or the time in which the host makes its weights, if they
    take visible time. Red marks where a stage waits for these. Every part has a tooltip.

    Beside each row is the share of time in which the rank is idle: `steady_idle`, which is the share
    in the steady state, or without it the share of the drawn time.
    """
    full = as_timeline(drawn)
    span = full.makespan or 1.0
    scale = _scale(full, (width - _LEFT - _RIGHT) / span, widens=widens)
    what = full.shape.rank_name
    shown = excerpt(full, _WIDEST / scale.per_unit if widens else span)
    timeline = shown.timeline
    ranks = sorted(timeline.plan)
    span = timeline.makespan or 1.0
    scale = replace(scale, rows={rank: row for row, rank in enumerate(ranks)})
    idle = [steady_idle[rank] if steady_idle else timeline.idle_share(rank) for rank in ranks]
    rows = [
        part
        for rank, share in zip(ranks, idle, strict=True)
        for part in _svg_row(timeline, rank, what, share, scale)
    ]
    axis = _TOP + len(ranks) * scale.pitch
    full_width = max(scale.x(span) + _RIGHT, 640)
    legend, bottom = _svg_legend(timeline, axis + 50, full_width, _visible(timeline, scale))
    heading = title or f"{len(full.plan)} {what}s, makespan {full.makespan:.6g}"
    if shown.text:
        heading += f" ({shown.text})"
    origin = f" from {shown.since:,.6g} on" if shown.since else ""
    body = "\n".join(
        [
            f'<text class="title" x="{_LEFT}" y="30">{escape(heading)}</text>',
            f'<text class="muted" x="{scale.x(span) + 12:.1f}" y="{_TOP - 10}">'
            f"{'idle, steady' if steady_idle else 'idle'}</text>",
            *rows,
            *_svg_axis(scale, span, axis),
            f'<text class="muted" x="{_LEFT}" y="{axis + 28}">time in {escape(unit)}{origin}</text>',
            *legend,
        ]
    )
    return page(full_width, bottom, body)


def _colours(version: int) -> tuple[str, str]:
    return _COLOURS[max(version, 0) % len(_COLOURS)]


def _svg_row(
    timeline: Timeline, rank: int, what: str, idle_share: float, scale: _Scale
) -> Iterator[str]:
    y = scale.row_y(rank)
    yield f'<text class="end" x="{_LEFT - 12}" y="{y + 20}">{what} {rank}</text>'
    yield rect(Area(scale.x(0), y, timeline.makespan * scale.per_unit, _HEIGHT), IDLE)
    idle = f"{100 * abs(idle_share):.1f} %"
    yield f'<text class="muted" x="{scale.x(timeline.makespan) + 12:.1f}" y="{y + 20}">{idle}</text>'
    for action, start, stall in timeline.item_waits(rank):
        yield rect(
            Area(scale.x(start - stall), y, stall * scale.per_unit, _HEIGHT),
            _STALL,
            f"{action} waits for the slow tier, {start - stall:.6g} to {start:.6g}",
        )
    reduced: dict[int, float] = {}  # batch: when its reduction began
    normed: dict[int, float] = {}  # and when it ended
    for action, start, end in timeline.shown(rank):
        if action.kind in COMPUTE:
            yield from _svg_compute(action, start, end, scale)
        elif action.kind in _LINES:
            yield from _svg_transfer(action, start, end, scale)
        elif action.kind is Kind.REDUCE:
            reduced[action.microbatch] = start
            normed[action.microbatch] = end
        elif action.kind is Kind.NORM:
            normed[action.microbatch] = end
        elif action.kind is Kind.UPDATE:
            batch = action.microbatch
            yield from _svg_update(
                action, reduced.get(batch, start), normed.get(batch, start), start, end, scale
            )


def _svg_compute(action: Action, start: float, end: float, scale: _Scale) -> Iterator[str]:
    x = scale.x(start)
    y = scale.y(action.stage)
    width = (end - start) * scale.per_unit
    weights = f" with W{action.version}" if action.version >= 0 else ""
    tip = (
        f"{action}: micro-batch {action.microbatch} {ACTION_SPECS[action.kind].name}{weights}, "
        f"{start:.6g} to {end:.6g}"
    )
    gap = min(1.0, width / 8)
    forward = action.kind is Kind.F
    shade = ' rx="2"' + ' fill-opacity="0.7"' * (action.kind is Kind.W)
    yield rect(Area(x, y, width - gap, _HEIGHT), _colours(action.version)[not forward], tip, shade)
    if action.kind in scale.labels:
        css = f"mid {scale.labels[action.kind]} {'' if forward else 'on-dark'}".strip()
        label = number_of(action, scale.shape.num_ranks)
        yield f'<text class="{css}" x="{x + (width - gap) / 2:.1f}" y="{y + 19.5:.1f}">{label}</text>'


def _svg_transfer(action: Action, start: float, end: float, scale: _Scale) -> Iterator[str]:
    below, colour = _LINES[action.kind]
    if (width := (end - start) * scale.per_unit) >= _SHOWN_PIXELS:
        number = "micro-batch"
        if action.kind in PER_ITEM:
            number = "item"
        elif action.kind in PER_BATCH:
            number = "batch"
        tip = (
            f"{action}: {ACTION_SPECS[action.kind].name} of {number} {action.microbatch} on its "
            f"way, {start:.6g} to {end:.6g}"
        )
        yield rect(
            Area(scale.x(start), scale.y(action.stage) + _HEIGHT + below, width, 2), colour, tip
        )


def _svg_update(
    action: Action, reduced: float, normed: float, start: float, end: float, scale: _Scale
) -> Iterator[str]:
    """Draw the path of a batch's gradients into the weights: a bar, then a mark."""
    y = scale.y(action.stage)
    batch = action.microbatch
    light, dark = _colours(action.version)
    yield rect(
        Area(scale.x(reduced), y + _HEIGHT + 3, (start - reduced) * scale.per_unit, 4),
        light,
        f"batch {batch} could make W{action.version} from {normed:.6g} on; it is needed at "
        f"{start:.6g}",
    )
    yield rect(
        Area(scale.x(reduced), y + _HEIGHT + 3, (normed - reduced) * scale.per_unit, 4),
        dark,
        f"gradients and norm of batch {batch} are reduced, {reduced:.6g} to {normed:.6g}",
    )
    if end > start:
        yield rect(
            Area(scale.x(start), y, (end - start) * scale.per_unit, _HEIGHT),
            INK,
            f"{action}: makes W{action.version}, {start:.6g} to {end:.6g}",
            ' rx="2"',
        )
    x = scale.x(start)
    yield (
        f'<path d="M{x - 5:.1f} {y - 5} h10 l-5 9 z" fill="{dark}" stroke="#fff" '
        'stroke-width="1"><title>'
        f"{action}: makes W{action.version} at {start:.6g}</title></path>"
    )


def _svg_axis(scale: _Scale, span: float, y: float) -> Iterator[str]:
    steps = (digit * 10.0**power for power in count() for digit in (1, 2, 5))
    step = next(step for step in steps if step * scale.per_unit >= 60)
    for i in range(int(span / step) + 1):
        yield f'<text class="muted mid" x="{scale.x(i * step):.1f}" y="{y + 12}">{i * step:g}</text>'


def _visible(timeline: Timeline, scale: _Scale) -> set[Kind]:
    """Return the kinds of which some action takes time; for transfers, enough time to be drawn."""
    return {
        action.kind
        for rank in timeline.plan
        for action, start, end in timeline.shown(rank)
        if end > start
        and (action.kind not in _LINES or (end - start) * scale.per_unit >= _SHOWN_PIXELS)
    }


def _svg_legend(
    timeline: Timeline, y: float, full_width: float, visible: set[Kind]
) -> tuple[list[str], float]:
    """Return the legend of colours and marks, and the y position at which the picture ends."""
    microbatches: dict[int, list[int]] = {}
    for actions in timeline.plan.values():
        for action in actions:
            if action.kind in COMPUTE:
                microbatches.setdefault(action.version, []).append(action.microbatch)
    items = [
        (_swatch(version), f"W{version}: {min(used)}-{max(used)}" if version >= 0 else "evaluation")
        for version, used in sorted(microbatches.items())[: len(_COLOURS)]
    ]
    if len(microbatches) > len(_COLOURS):
        items.append(([], "... and so on"))
    items += [
        (_swatch(0), "forward, backward"),
        ([f'<path d="M8 3 h10 l-5 9 z" fill="{INK}"/>'], "update"),
        *[([rect(Area(0, 0, 26, 14), INK)], "optimizer makes the new weights")]
        * (Kind.UPDATE in visible),
        (
            [rect(Area(0, 5, 13, 4), MUTED), rect(Area(13, 5, 13, 4), "#c9d0d8")],
            "gradients reduced, then ready for the update",
        ),
        ([rect(Area(0, 0, 26, 14), IDLE)], "idle"),
    ]
    for kinds, what in (
        ((Kind.SEND_F, Kind.SEND_B), "activation, gradient on its way"),
        ((Kind.FETCH, Kind.RELEASE), "fetched, released"),
        ((Kind.RELOAD, Kind.OFFLOAD), "activations reloaded, offloaded"),
        ((Kind.HOST,), "the host makes the new weights"),
    ):
        if visible & set(kinds):
            lines = [
                rect(Area(0, 4 + 4 * i, 26, 2), _LINES[kind][1]) for i, kind in enumerate(kinds)
            ]
            items.append((lines, what))
    if any(True for rank in timeline.plan for _ in timeline.item_waits(rank)):
        items.append(([rect(Area(0, 0, 26, 14), _STALL)], "waits for the slow tier"))
    parts = [f'<text class="muted" x="{_LEFT}" y="{y}">weights: micro-batches that use them</text>']
    x = float(_LEFT)
    y += 10
    for shapes, text in items:
        width = 34 + 6.3 * len(text) + 18
        if x + width > full_width - 10:
            x = float(_LEFT)
            y = y + 22
        parts += [
            f'<g transform="translate({x:.1f} {y})">',
            *shapes,
            f'<text x="33" y="11.5">{text}</text></g>',
        ]
        x += width
    return parts, y + 32


def _swatch(version: int) -> list[str]:
    light, dark = _colours(version)
    return [rect(Area(0, 0, 13, 14), light), rect(Area(13, 0, 13, 14), dark)]
