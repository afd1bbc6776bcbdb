"""Draw a plan as a text staircase; svg.py draws pictures.

A Timeline is drawn as it ran. A plan is simulated first, with a backward that takes as long as two
forwards, and everything else free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor

from hybridpar.schedules.action import Action, Plan
from hybridpar.schedules.kinds import COMPUTE, PER_BATCH, Kind
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.schedules.simulate.timeline import Timeline

_MOST_RANKS = 8
_STEPS = 9
"""Most ranks that are drawn, and steps of each."""


def as_timeline(drawn: Plan | Timeline) -> Timeline:
    """Return the timeline to draw; a plan is simulated first."""
    return drawn if isinstance(drawn, Timeline) else simulate(drawn)


def number_of(action: Action, num_ranks: int) -> str:
    """Return a micro-batch's label: its number, with b on the second virtual stage, and so on."""
    chunk = action.stage // num_ranks
    return f"{action.microbatch}{chr(ord('a') + min(chunk, 25)) if chunk else ''}"


def draw(drawn: Plan | Timeline, *, unit: float | None = None, width: int = 0) -> str:
    """Draw a plan as text: one line for each stage.

        stage 0  F0 F1 F2       B0--- B1--- B2---*F3        F0: micro-batch 0 forward, B0: backward, blank: idle
        stage 1     F0 B0--- F1 B1--- F2 B2---*     F3      *: the weights were updated; U4: an update that takes time

    If a rank holds several stages, a line is a rank, and F0b is micro-batch 0 on its second stage.

    Args:
        unit: Unit of time; None: the shortest forward or backward.
        width: Columns of a unit of time; 0: as many as labels need.
    """
    timeline = as_timeline(drawn)
    rows = {rank: list(_text_items(timeline, rank)) for rank in sorted(timeline.plan)}
    lengths = [end - start for row in rows.values() for label, start, end in row if label != "*"]
    unit = unit or min((length for length in lengths if length > 0), default=1.0)
    width = width or max(
        (
            -(-(len(label) + 1) // max(1, round((end - start) / unit)))
            for row in rows.values()
            for label, start, end in row
            if label != "*"
        ),
        default=3,
    )
    what = timeline.shape.rank_name
    name = len(f"{what} {max(rows, default=0)}") + 2
    return "\n".join(
        f"{f'{what} {rank}':<{name}}{_text_row(row, unit, width)}".rstrip()
        for rank, row in rows.items()
    )


def _text_items(timeline: Timeline, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield label, start and end of each item in a row. An update that takes no time is a star."""
    for action, start, end in timeline.shown(rank):
        if action.kind in COMPUTE:
            yield f"{action.kind}{number_of(action, len(timeline.plan))}", start, end
        elif action.kind is Kind.UPDATE:
            yield (f"U{action.microbatch}" if end > start else "*"), start, end


def _text_row(row: list[tuple[str, float, float]], unit: float, width: int) -> str:
    line: list[str] = []

    def column(time: float) -> int:
        return floor(time / unit + 0.5) * width

    def put(position: int, text: str) -> None:
        line.extend(" " * (position + len(text) - len(line)))
        line[position : position + len(text)] = text

    for label, start, end in row:
        position = column(start)
        if label == "*":
            put(max(position - 1, 0), label)
        else:
            put(position, label.ljust(column(end) - position - 1, "-"))
    return "".join(line)


def draw_steps(plan: Plan, marked: Sequence[tuple[int, int]] = ()) -> str:
    """Draw the lists of some ranks around the marked (rank, step) cells, which are in >brackets<.

    A rank without a mark shows the steps that are related to the first mark's action.
    """
    if not plan or not any(plan.values()):
        return "(an empty plan)"
    marks: Mapping[int, list[int]] = {rank: [s for r, s in marked if r == rank] for rank in plan}
    centre_rank = marked[0][0] if marked else min(plan)
    centre = plan[centre_rank][marked[0][1]] if marked and plan[centre_rank] else None
    order = sorted(plan, key=lambda rank: (abs(rank - centre_rank), rank))
    lines = []
    for rank in sorted(order[:_MOST_RANKS]):
        actions = plan[rank]
        middle = 0
        if marks[rank]:
            middle = marks[rank][0]
        elif centre:
            middle = related_step(actions, centre)
        start = max(0, min(middle - _STEPS // 2, len(actions) - _STEPS))
        cells = [
            f">{action}<" if step in marks[rank] else f" {action} "
            for step, action in enumerate(actions[start : start + _STEPS], start)
        ]
        far = [
            f"... step {s}: >{actions[s]}<" for s in marks[rank] if not start <= s < start + _STEPS
        ]
        lines.append((f"rank {rank}, step {start}:", cells, " ".join(far)))
    heading = max(len(line[0]) for line in lines)
    width = max((len(cell) for line in lines for cell in line[1]), default=0)
    return "\n".join(
        f"{name:<{heading}} {''.join(cell.ljust(width) for cell in cells)} {far}".rstrip()
        for name, cells, far in lines
    )


def related_step(actions: Sequence[Action], missing: Action) -> int:
    """Return the first step of the same micro-batch or batch as `missing`; else the last step."""
    for step, action in enumerate(actions):
        same_sort = (action.kind in PER_BATCH) == (missing.kind in PER_BATCH)
        if same_sort and action.microbatch == missing.microbatch:
            return step
    return max(len(actions) - 1, 0)
