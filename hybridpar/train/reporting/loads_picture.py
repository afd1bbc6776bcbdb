"""Loads of experts over some steps: counted, and drawn as a picture.

expert          0    1    2    3
block 1       [0.9][1.1][1.0][1.0]      a box's colour: its load over the block's mean, from
block 2       [0.2][2.3][0.8][0.7]      white (none) over blue (balance) to orange (twice and more)
"""

from __future__ import annotations

from hybridpar.schedules.draw.shapes import Area, page, rect
from hybridpar.train.batches.expert_loads import Loads, max_violation

MOST_EXPERTS = 1 << 14
"""Most experts, of all blocks together, whose loads are written and drawn."""
_WIDTH = 900
_LEFT = 74
_RIGHT = 70
_TOP = 76
_PITCH = 18
_NONE = (255, 255, 255)
_BALANCED = (111, 163, 220)
_TWICE = (199, 104, 15)


class LoadCounter:
    """Adds up the loads of steps."""

    def __init__(self) -> None:
        self._total: dict[int, list[int]] = {}

    def add(self, loads: Loads) -> None:
        """Add a step's loads."""
        for block, load in loads.items():
            total = self._total.setdefault(block, [0] * len(load))
            self._total[block] = [sum(pair) for pair in zip(total, load, strict=True)]

    def take(self) -> dict[int, list[int]]:
        """Return the loads of all steps since the last call, by block; empty if there were none."""
        taken = self._total
        self._total = {}
        return taken


def size_of(loads: Loads) -> int:
    """Return the number of experts of all blocks."""
    return sum(map(len, loads.values()))


def draw_loads(loads: Loads, step: int) -> str:
    """Draw the loads of the steps before a step: an SVG picture with a box for each expert.

    Args:
        loads: At least one block's.
        step: The last of the steps.
    """
    most = max(map(len, loads.values()))
    width = (_WIDTH - _LEFT - _RIGHT) / most
    violation = max_violation(loads)
    title = f"Loads of experts up to step {step}"
    what = "no token counts" if violation is None else f"MaxVio {violation:.2f}"
    parts = [
        f'<text class="title" x="16" y="28">{title}</text>',
        f'<text class="muted" x="16" y="48">a row for each block, a box for each expert: tokens over '
        f"the block's mean; largest excess over a mean: {what}</text>",
        f'<text class="muted end" x="{_WIDTH - 16}" y="{_TOP - 8}">largest</text>',
    ]
    for row, (block, load) in enumerate(loads.items()):
        y = _TOP + row * _PITCH
        mean = sum(load) / len(load)
        ratios = [count / mean if mean else 0.0 for count in load]
        parts.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 13}">block {block}</text>')
        for expert, (count, ratio) in enumerate(zip(load, ratios, strict=True)):
            area = Area(_LEFT + expert * width, y, width, _PITCH - 2)
            tip = f"block {block}, expert {expert}: {count:,} tokens, {ratio:.2f} of the mean"
            parts.append(rect(area, _colour(ratio), tip))
        parts.append(f'<text class="end" x="{_WIDTH - 16}" y="{y + 13}">{max(ratios):.2f}</text>')
    return page(_WIDTH, _TOP + len(loads) * _PITCH + 12, "\n".join(parts))


def _colour(ratio: float) -> str:
    """Return the colour of a load, over the mean."""
    near = ratio <= 1
    start = _NONE if near else _BALANCED
    stop = _BALANCED if near else _TWICE
    share = ratio if near else min(ratio - 1, 1.0)
    mixed = (round(a + share * (b - a)) for a, b in zip(start, stop, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
