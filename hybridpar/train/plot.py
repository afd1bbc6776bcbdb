"""The loss curve as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SMOOTHING = 0.05  # weight of the newest step, at most


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


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
        axes.plot(steps, smooth(losses), color="#2c6ab1", linewidth=1.8, label=f"training, {losses[-1]:.3f} at the end")
    if valid:
        steps, losses = np.array(valid).T
        axes.plot(steps, losses, "o-", color="#c7680f", markersize=4, linewidth=1.5,
                  label=f"validation, {losses[-1]:.3f} at the end")
    if train or valid:
        axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, unbiased at the start. Shapes: [n] -> [n]."""
    weight = max(_SMOOTHING, 1 / max(len(values), 1))
    out, total, norm = np.empty_like(values), 0.0, 0.0
    for i, value in enumerate(values):
        total, norm = (1 - weight) * total + weight * value, (1 - weight) * norm + weight
        out[i] = total / norm
    return out
