"""The study's pictures, as SVG that comes out the same from the same results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.convergence.results import Result
from benchmarks.convergence.study import Variant
from benchmarks.files import write_svg

Runs = Mapping[str, Mapping[int, Result]]
_SYNC = "#c7680f"
_STALE = "#2c6ab1"


def draw(model: str, variants: Sequence[Variant], runs: Runs, folder: Path) -> None:
    """Writes <model>_curves.svg and <model>_final.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    full = [v for v in variants if len(v.seeds) > 1 and v.baseline in runs]
    for name, figure in (
        ("curves", _curves(model, full, runs)),
        ("final", _final(model, full, runs)),
    ):
        write_svg(figure, folder / f"{model}_{name}.svg")


def _curves(model: str, variants: Sequence[Variant], runs: Runs) -> Figure:
    """Left: training loss of the baseline and of 2bw. Right: how far each is above its baseline, on
    the same tokens."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title in (
        (left, f"{model.upper()}: training loss"),
        (right, "above its baseline on the same tokens"),
    ):
        _style(axes, "tokens (millions)", title)
    for name, color in (("sync", _SYNC), ("2bw", _STALE)):
        if name in runs:
            left.plot(
                *_mean_curve(runs[name], runs[name].keys()), color=color, label=name, linewidth=1.5
            )
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    shown = [v for v in variants if v.name != v.baseline and not v.name.startswith("sync")]
    for i, variant in enumerate(shown):
        ours = runs[variant.name]
        base = runs[variant.baseline]
        if seeds := ours.keys() & base.keys():
            tokens, losses = _mean_curve(ours, seeds)
            _, baseline = _mean_curve(base, seeds)
            gaps = _smoothed(losses[: len(baseline)] - baseline[: len(losses)])
            right.plot(
                tokens[: len(gaps)], gaps, label=variant.name, color=colors[i % 20], linewidth=1.2
            )
    right.axhline(0, color=_SYNC, linewidth=1)
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7)
    return figure


def _final(model: str, variants: Sequence[Variant], runs: Runs) -> Figure:
    """Every seed's final validation loss, and their mean."""
    shown = sorted(variants, key=lambda v: -fmean(r.final_val_loss for r in runs[v.name].values()))
    figure = Figure(figsize=(8, 0.9 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    _style(axes, "validation loss at the end (nats); each seed, and the mean", model.upper())
    for place, variant in enumerate(shown):
        losses = [r.final_val_loss for r in runs[variant.name].values()]
        color = _SYNC if variant.stale == "none" else _STALE
        axes.plot(losses, [place] * len(losses), "o", color=color, alpha=0.4, markersize=4)
        axes.plot([fmean(losses)], [place], "|", color=color, markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(shown)), [v.name for v in shown], fontsize=8)
    return figure


def _style(axes: Axes, xlabel: str, title: str) -> None:
    axes.set(xlabel=xlabel, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _mean_curve(
    runs: Mapping[int, Result], seeds: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Millions of tokens, and the training loss there, mean over `seeds`."""
    chosen = [runs[seed] for seed in seeds]
    steps = np.array([step for step, _ in chosen[0].train_loss])
    losses = np.mean([[loss for _, loss in run.train_loss] for run in chosen], axis=0)
    return steps * chosen[0].tokens / chosen[0].train_loss[-1][0] / 1e6, losses


def _smoothed(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Running mean over `width` bins, over fewer at the ends."""
    kernel = np.ones(min(width, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
