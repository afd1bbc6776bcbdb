"""Loss curves as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hybridpar.errors import HybridparError, in_a_line


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


_LONGEST_S = 30.0
"""Most time for a picture: the other ranks wait for rank 0 meanwhile, by default for up to 60 s."""


class PictureError(HybridparError):
    """A picture could not be drawn."""


def draw_apart(draw: Callable[[], None]) -> None:
    """Call `draw` in a fork of this process, so that nothing that it meets can end this one.

    OpenBLAS ends the process that it has no memory for, and the kernel the one that takes too much. Only on Linux may
    a fork draw; elsewhere `draw` is called here.

    Raises: PictureError, if `draw` raises anything or its process ends early; OSError, if there can be no process.
    """
    if sys.platform != "linux":
        draw()
        return
    with os.fdopen(os.memfd_create("errors of drawing"), "rb") as errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child needs none
            child = os.fork()
        if not child:
            _draw_and_exit(draw, errors.fileno())
        status = _wait(child)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if status < 0:
        raise PictureError(f"the process that drew it was ended by {signal.Signals(-status).name}")
    if status:
        raise PictureError(said.rpartition("\n")[2] or f"the process that drew it ended with exit code {status}")


def _draw_and_exit(draw: Callable[[], None], errors: int) -> NoReturn:
    """End this process after `draw`, without what a process does at its end. `errors`: where it says what is wrong."""
    status = 1
    try:
        os.dup2(errors, 2)
        draw()
        status = 0
    except BaseException as error:
        os.write(errors, f"\n{in_a_line(error)}".encode(errors="replace"))
    finally:
        os._exit(status)


def _wait(child: int) -> int:
    """Return the exit code of a process, the negative signal if one has ended it; end it if it takes too long."""
    end = time.monotonic() + _LONGEST_S
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


def plot_loss(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and validation loss over the steps into a PNG."""
    from matplotlib.figure import Figure

    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    valid = [(r["step"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="#2c6ab1", alpha=0.3, linewidth=1)
        line = smooth(losses)
        axes.plot(steps, line, color="#2c6ab1", linewidth=1.8, label=f"training, smoothed, {line[-1]:.3f} at the end")
    if valid:
        steps, losses = np.array(valid).T
        axes.plot(steps, losses, "o-", color="#c7680f", markersize=4, linewidth=1.5,
                  label=f"validation, {losses[-1]:.3f} at the end")
    if train or valid:
        axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooths values by the line of least squares through each one's neighbours: it follows a slope, also at both ends.

    Neighbours on each side are a tenth of the values before it, at least 2 and at most 2 % of all (10 where these are
    fewer), so a loss that falls fast at first is not smoothed away. Shapes: [n] -> [n].
    """
    at = np.arange(len(values))
    reach = np.clip(at // 10, 2, max(10, len(values) // 50))
    first, stop = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    count, middle = stop - first, (first + stop - 1) / 2
    total, moment = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values, values * at))
    sums = total[stop] - total[first]
    slopes = (moment[stop] - moment[first] - middle * sums) * 12 / np.maximum(count * (count**2 - 1.0), 1)
    return sums / count + slopes * (at - middle)
