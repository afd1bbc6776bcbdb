"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from hybridpar.config.row_names import metrics_in, valid_numbers_in
from hybridpar.train.links import a_day

_LINE_EVERY_S = 2.0
_ETA_STEPS = 20
_DROPPED = ("memory", "data", "ms", "norm", "mfu", "lr", "speed", "metrics", "val")
"""Parts of a line that are left out on a narrow terminal, in this order."""


@dataclass
class Status:
    """The latest numbers of a run, as a line of text. total: steps of the whole run. ends: of the last ones."""

    total: int
    step: int = 0
    valid: dict[str, float] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS + 1))

    def update(self, row: dict[str, Any]) -> None:
        self.step, self.row = row["step"], row
        if self.ends and self.ends[-1][0] >= self.step:  # it went back to a checkpoint
            self.ends.clear()
        self.ends.append((self.step, time.monotonic()))

    def eta(self) -> str:
        """Time left at the pace of the last steps."""
        if len(self.ends) < 2:
            return "-"
        (first, began), (last, ended) = self.ends[0], self.ends[-1]
        pace = (ended - began) / (last - first)
        return str(timedelta(seconds=round(pace * (self.total - self.step))))

    def text(self, width: int | None = None) -> str:
        """The numbers that fit into `width` columns (None: all); those that matter least are left out first."""
        row = self.row
        if not row:
            return "starting"
        parts = {"loss": f"loss {row['loss']:.4f}"}
        if metrics := dict(metrics_in(row)):
            parts["metrics"] = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if losses := valid_losses(self.valid):
            parts["val"] = f"val {losses}"
        parts |= {
            "norm": f"grad norm {row['grad_norm']:.3f}", "lr": f"lr {row['lr']:.2e}",
            "speed": f"{row['tokens_per_s']:,.0f} {row.get('counts', 'tokens')}/s", "ms": f"{row['step_ms']:,.0f} ms",
            "mfu": f"MFU {100 * row['mfu']:.1f} %", "memory": f"{row['memory_mib']:,.0f} MiB"}
        if "sent_gb_a_day" in row:
            parts["data"] = a_day(1e9 * row["sent_gb_a_day"], 1e9 * row["received_gb_a_day"])
        if row.get("skipped"):
            parts["skipped"] = "SKIPPED (gradients not finite)"
        for least in _DROPPED:
            if width is None or len("  ".join(parts.values())) <= width:
                break
            parts.pop(least, None)
        return "  ".join(parts.values())


def valid_losses(row: Mapping[str, float], number: str = "loss") -> str:
    """Return a number of an evaluation as text: 2.3026, or wiki 2.3026 code 1.2345 of several sets.

    Args:
        row: The numbers of the evaluation, named as in metrics.jsonl.
        number: "loss", or the name of a metric.
    """
    found = [f"{valid_set} {value:.4f}".strip() for name, valid_set, value in valid_numbers_in(row) if name == number]
    return " ".join(found)


def valid_numbers(row: Mapping[str, float]) -> str:
    """Return the loss and the metrics of an evaluation as text; `row` as in `valid_losses`."""
    names = dict.fromkeys(name for name, _, _ in valid_numbers_in(row))
    return "  ".join(f"{name} {valid_losses(row, name)}" for name in names)


class Reporter:
    """The reporter of all ranks but the first: it shows nothing."""

    def say(self, text: str) -> None:
        """Shows a line of its own."""

    def step(self, row: dict[str, Any]) -> None:
        """Shows the numbers of a step, as in metrics.jsonl."""

    def evaluation(self, step: int, row: Mapping[str, float]) -> None:
        """Shows the numbers of an evaluation, named as in metrics.jsonl."""

    def close(self) -> None:
        """Ends what is shown."""


class PlainReporter(Reporter):
    """Shows a line for the first and the last step, for evaluations, and otherwise every other second."""

    def __init__(self, total: int):
        self.status = Status(total)
        self._last_line = float("-inf")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, row: dict[str, Any]) -> None:
        self.status.update(row)
        if row["step"] == self.status.total or time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"step {row['step']}/{self.status.total}  {self.status.text()}  ETA {self.status.eta()}")

    def evaluation(self, step: int, row: Mapping[str, float]) -> None:
        self.status.valid = dict(row)
        self.say(f"step {step}/{self.status.total}  validation {valid_numbers(row)}")


class BarReporter(Reporter):
    """Shows a bar and the latest numbers at the bottom of a terminal, and lines above them."""

    def __init__(self, total: int):
        self.status = Status(total)
        self._bar = Progress(BarColumn(None), MofNCompleteColumn(), TextColumn("ETA {task.fields[eta]}"), expand=True)
        self._task = self._bar.add_task("", total=total, eta="-")
        self._live = Live(self._bar, console=Console(stderr=True), refresh_per_second=4)
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(Text(text))

    def step(self, row: dict[str, Any]) -> None:
        self.status.update(row)
        self._show()

    def evaluation(self, step: int, row: Mapping[str, float]) -> None:
        self.status.valid = dict(row)
        self.status.step = step
        self.say(f"step {step}: validation {valid_numbers(row)}")
        self._show()

    def close(self) -> None:
        self._live.stop()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.status.step, eta=self.status.eta())
        line = self.status.text(self._live.console.width)  # a line that wraps leaves bars behind
        self._live.update(Group(self._bar, Text(line, no_wrap=True, overflow="ellipsis")))


def make_reporter(rank: int, total: int) -> Reporter:
    """The reporter for this rank and this terminal. total: steps of the run."""
    if rank != 0:
        return Reporter()
    return BarReporter(total) if sys.stderr.isatty() else PlainReporter(total)
