"""The loss curve as a picture, and TensorBoard, where matplotlib and tensorboard are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SMOOTHING = 0.05  # weight of the newest step, at most


def plot_loss(rows: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Draws training and validation loss over the steps into a PNG; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
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
    return True


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, unbiased at the start. Shapes: [n] -> [n]."""
    weight = max(_SMOOTHING, 1 / max(len(values), 1))
    out, total, norm = np.empty_like(values), 0.0, 0.0
    for i, value in enumerate(values):
        total, norm = (1 - weight) * total + weight * value, (1 - weight) * norm + weight
        out[i] = total / norm
    return out


class TensorBoard:
    """Scalars for TensorBoard in `folder`; does nothing where it is not installed."""

    def __init__(self, folder: Path, resumed_step: int, *, enabled: bool):
        self._writer = None
        if enabled and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if isinstance(value, float) and name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
