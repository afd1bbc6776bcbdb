"""Parts of all SVG pictures: the page, its colours and text styles, and boxes with tooltips."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

INK = "#1f2733"
MUTED = "#6a7482"
IDLE = "#eceff3"

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
text {{ font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: {ink}; }}
.title {{ font-size: 17px; font-weight: 600; }}
.muted {{ fill: {muted}; }}
.mid {{ text-anchor: middle; pointer-events: none; }}
.end {{ text-anchor: end; }}
.on-dark {{ fill: #fff; }}
.small {{ font-size: 9px; }}
</style>
<rect width="100%" height="100%" fill="#fbfcfd"/>
{body}
</svg>
"""


def page(width: float, height: float, body: str) -> str:
    """Return a self-contained SVG file. Units: pixels."""
    return _SVG.format(width=round(width), height=round(height), ink=INK, muted=MUTED, body=body)


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangular area of a picture, from its left upper corner. Units: pixels."""

    x: float
    y: float
    width: float
    height: float


def rect(area: Area, fill: str, tip: str = "", more: str = "") -> str:
    """Return a box with `tip` as its tooltip. more: further attributes, each after a blank."""
    shape = (
        f'<rect x="{area.x:.2f}" y="{area.y:.2f}" width="{max(area.width, 0.1):.2f}" '
        f'height="{area.height}" fill="{fill}"{more}'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"
