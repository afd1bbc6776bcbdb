"""How results and pictures of benchmarks are written: with few lines, so that a change shows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any


def as_text(value: Any, indent: int = 0) -> str:
    """JSON, in which what fits in a line is in one, and a list of numbers always is."""
    text = json.dumps(value)
    flat = isinstance(value, list) and not any(isinstance(each, (dict, list)) for each in value)
    if flat or not isinstance(value, (dict, list)) or indent + len(text) <= 118:
        return text
    names = (
        [f"{json.dumps(name)}: " for name in value]
        if isinstance(value, dict)
        else [""] * len(value)
    )
    parts = value.values() if isinstance(value, dict) else value
    lines = ",".join(
        f"\n{' ' * (indent + 1)}{name}{as_text(part, indent + 1)}"
        for name, part in zip(names, parts, strict=True)
    )
    return f"{text[0]}{lines}\n{' ' * indent}{text[-1]}"


def write_svg(figure: Any, path: Path) -> None:
    """Writes a picture of matplotlib's, the same from the same numbers: text as text, a shape in a
    line."""
    import matplotlib  # slow to import

    with matplotlib.rc_context({"svg.hashsalt": "hybridpar", "svg.fonttype": "none"}):
        figure.savefig(buffer := io.StringIO(), format="svg", metadata={"Date": None})
    path.write_text(re.sub(r'\s*\n\s*(?=[A-Za-z]\s|"|[\w:-]+=")', " ", buffer.getvalue()))
