"""Plot loss curves, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hybridpar
from hybridpar.config.row_names import valid_numbers_in
from hybridpar.errors import HybridparError


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


_VALID_COLOURS = ("#c7680f", "#35843a", "#774aae", "#b93a3a", "#1c7d7d", "#b23c83", "#7d5636")
_LONGEST_S = 30.0
"""Time limit of a plot: other ranks wait for rank 0 in the meantime, by default for up to 60 s."""
_PROGRAM = (
    # in the place of the working folder
    f"import sys; sys.path[0] = {str(Path(hybridpar.__file__).parents[1])!r}\n"
    f"from {__name__} import main; main()"
)
"""Program of the process that draws."""


class PictureError(HybridparError):
    """Drawing a plot has failed."""


def draw_loss(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Call `plot_loss` in its own process, so that no failure can end this one.

    OpenBLAS ends a process without memory, and the kernel ends a process that takes too much.

    Raises:
        PictureError: The process fails, or takes longer than 30 s.
        OSError: The process cannot be started.
    """
    command = [sys.executable, "-c", _PROGRAM, str(path), title]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(rows),
            text=True,
            errors="replace",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PictureError(f"drawing it took longer than {_LONGEST_S:.0f} s") from None
    if done.returncode < 0:
        raise PictureError(
            f"the process that drew it was ended by {signal.Signals(-done.returncode).name}"
        )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise PictureError(
            said or f"the process that drew it ended with exit code {done.returncode}"
        )


def main() -> None:
    """Draw the rows that stdin has as JSON. Arguments of the process: file and title."""
    plot_loss(json.load(sys.stdin), Path(sys.argv[1]), sys.argv[2])


def plot_loss(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Plot training and validation loss over the steps into a PNG file."""
    from matplotlib.figure import Figure

    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    valid: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, valid_set, value in valid_numbers_in(row):
            if name == "loss":
                valid.setdefault(valid_set, []).append((row["step"], value))
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="#2c6ab1", alpha=0.3, linewidth=1)
        line = smooth(losses)
        axes.plot(
            steps,
            line,
            color="#2c6ab1",
            linewidth=1.8,
            label=f"training, smoothed, {line[-1]:.3f} at the end",
        )
    for number, (valid_set, points) in enumerate(valid.items()):
        steps, losses = np.array(points).T
        axes.plot(
            steps,
            losses,
            "o-",
            color=_VALID_COLOURS[number % len(_VALID_COLOURS)],
            markersize=4,
            linewidth=1.5,
            label=f"{f'validation {valid_set}'.rstrip()}, {losses[-1]:.3f} at the end",
        )
    if train or valid:
        axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooth values by a least-squares line through each value's neighbours.

    The line follows a slope, even at both ends. The neighbours on each side are a tenth of the
    values before it, at least 2 and at most 2 % of all values (10 if these are fewer), so that a
    loss which falls fast at first is not smoothed away.

    Shapes: [n] -> [n].
    """
    at = np.arange(len(values))
    reach = np.clip(at // 10, 2, max(10, len(values) // 50))
    first = np.maximum(at - reach, 0)
    stop = np.minimum(at + reach + 1, len(values))
    count = stop - first
    middle = (first + stop - 1) / 2
    total, moment = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values, values * at))
    sums = total[stop] - total[first]
    slopes = (
        (moment[stop] - moment[first] - middle * sums)
        * 12
        / np.maximum(count * (count**2 - 1.0), 1)
    )
    return sums / count + slopes * (at - middle)
