"""Progress of a run on stderr: permanent lines, and on a terminal a bar with the latest numbers.

Lines appear at the first and the last step, at evaluations, and otherwise after a tenth of the time
that the run has taken so far: every 2 s at first, every minute in the end. An hour has about a
hundred lines.
"""

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
from hybridpar.train.faults.links import a_day

_SHARE_OF_TIME = 0.1
"""Time between two lines as a share of the time so far, within the following bounds in seconds."""
_LEAST_PAUSE_S = 2.0
_MOST_PAUSE_S = 60.0
_ETA_STEPS = 20
_DROPPED = (
    "memory",
    "data",
    "ms",
    "mfu",
    "experts",
    "norm",
    "lr",
    "speed",
    "metrics",
    "evaluation",
)
"""Parts of a line that are dropped on a narrow terminal, in this order."""


@dataclass
class Status:
    """The latest numbers of a run, as a line of text.

    Args:
        evaluation: Numbers of the newest evaluation by name, such as {"val": 4.32}.
        row: Numbers of the newest step, as in metrics.jsonl.
        ends: Numbers and times of the last steps.
    """

    total: int
    step: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS + 1))

    def update(self, row: dict[str, Any]) -> None:
        self.step = row["step"]
        self.row = row
        if self.ends and self.ends[-1][0] >= self.step:  # it went back to a checkpoint
            self.ends.clear()
        self.ends.append((self.step, time.monotonic()))

    def eta(self) -> str:
        """Return the time left at the pace of the last steps."""
        if len(self.ends) < 2:
            return "-"
        first, began = self.ends[0]
        last, ended = self.ends[-1]
        pace = (ended - began) / (last - first)
        return str(timedelta(seconds=round(pace * (self.total - self.step))))

    def text(self, width: int | None = None, *, evaluation: bool = True) -> str:
        """Return the latest numbers as text, without the least important if space is short.

        Args:
            width: Columns of the terminal; None: no limit.
            evaluation: Whether to include the newest evaluation, possibly of an earlier step.
        """
        row = self.row
        parts: dict[str, str] = {}
        if row:
            parts["loss"] = f"loss {row['loss']:.4f}"
        if metrics := dict(metrics_in(row)):
            parts["metrics"] = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if evaluation and (numbers := valid_numbers(self.evaluation)):
            parts["evaluation"] = numbers
        if row:
            parts |= _numbers_of(row)
        for least in _DROPPED:
            if width is None or len("  ".join(parts.values())) <= width:
                break
            if len(parts) > 1:
                parts.pop(least, None)
        return "  ".join(parts.values()) or "starting"

    def line(self, width: int | None = None, *, evaluation: bool = False) -> str:
        """Return the step and its numbers as a permanent line.

        Args:
            width: Columns of the terminal, whose bar has the total; None: no terminal.
            evaluation: Whether the step has just been evaluated.
        """
        total = f"/{self.total}" if width is None else ""
        place = f"step {self.step}{total}".ljust(len(f"step {self.total}{total}"))
        return f"{place}  {self.text(width and width - len(place) - 2, evaluation=evaluation)}"


def _numbers_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a step after its losses, as parts of a line."""
    parts = {
        "norm": f"grad norm {row['grad_norm']:.3f}",
        "lr": f"lr {row['lr']:.2e}",
        "speed": f"{row['tokens_per_s']:,.0f} {row.get('counts', 'tokens')}/s",
        "ms": f"{row['step_ms']:,.0f} ms",
        "mfu": f"MFU {100 * row['mfu']:.1f} %",
        "memory": f"{row['memory_mib']:,.0f} MiB",
    }
    if parts["mfu"] == "MFU 0.0 %":  # a tiny model on a fast machine
        del parts["mfu"]
    if "sent_gb_a_day" in row:
        parts["data"] = a_day(1e9 * row["sent_gb_a_day"], 1e9 * row["received_gb_a_day"])
    if "max_vio" in row:
        parts["experts"] = f"MaxVio {row['max_vio']:.2f}"
    if row.get("skipped"):
        parts["skipped"] = "SKIPPED (gradients not finite)"
    return parts


def valid_numbers(row: Mapping[str, float]) -> str:
    """Return the numbers of an evaluation as text.

    "val 2.3026  val accuracy 0.51", or with several sets "val wiki 2.30 code 1.23".

    row: named as in metrics.jsonl.
    """
    by_number: dict[str, list[str]] = {}
    for name, valid_set, value in valid_numbers_in(row):
        by_number.setdefault(name, []).append(f"{valid_set} {value:.4f}".strip())
    return "  ".join(
        f"{'val' if name == 'loss' else f'val {name}'} {' '.join(values)}"
        for name, values in by_number.items()
    )


class Reporter:
    """A reporter that shows nothing, for all ranks but the first."""

    def say(self, text: str) -> None:
        """Show a separate line."""

    def detail(self, text: str) -> None:
        """Show a line only with `--verbose`."""

    def step(self, row: dict[str, Any], *, is_evaluated: bool = False) -> None:
        """Show the numbers of a step, named as in metrics.jsonl.

        is_evaluated: whether `evaluation` follows for this step.
        """

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of an evaluation next to its step's, named as in metrics.jsonl."""

    def close(self) -> None:
        """Stop showing anything."""


class PlainReporter(Reporter):
    """Shows lines only, for a file, a pipe, or a terminal that cannot move its cursor.

    Args:
        total: Number of steps of the whole run.
    """

    def __init__(self, total: int, is_verbose: bool = False):
        self.status = Status(total)
        self.is_verbose = is_verbose
        self._first_line = self._last_line = 0.0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        if self.is_verbose:
            self.say(text)

    def step(self, row: dict[str, Any], *, is_evaluated: bool = False) -> None:
        self.status.update(row)
        self._show()
        if not is_evaluated and (row["step"] == self.status.total or self._is_due()):
            self._write_line(evaluation=False)

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.status.evaluation = numbers
        if self.status.step != step:  # a resumed run does not know the numbers of its first step
            self.status.step = step
            self.status.row = {}
        self._show()
        self._write_line(evaluation=True)

    def _is_due(self) -> bool:
        """Return whether it is time for a line."""
        now = time.monotonic()
        if not self._first_line:
            return True
        pause = min(max(_SHARE_OF_TIME * (now - self._first_line), _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return now - self._last_line >= pause

    def _write_line(self, *, evaluation: bool) -> None:
        if self.status.row:  # an evaluation before the first step does not delay the first line
            self._last_line = time.monotonic()
            self._first_line = self._first_line or self._last_line
        eta = ""
        if self._width is None and self.status.row:
            eta = f"  ETA {self.status.eta()}"
        self.say(self.status.line(self._width, evaluation=evaluation) + eta)

    @property
    def _width(self) -> int | None:
        """Number of columns that a line may take; None: no limit."""
        return None

    def _show(self) -> None:
        """Show the latest numbers temporarily, on a terminal."""


class BarReporter(PlainReporter):
    """Shows a bar with the latest numbers at the bottom of a terminal, and lines above it.

    The bar appears with the first step or evaluation; until then other processes may write lines.
    """

    def __init__(self, total: int, is_verbose: bool = False):
        super().__init__(total, is_verbose)
        self._bar = Progress(
            BarColumn(None), MofNCompleteColumn(), TextColumn("ETA {task.fields[eta]}"), expand=True
        )
        self._task = self._bar.add_task("", total=total, eta="-")
        self._live = Live(
            self._bar, console=Console(stderr=True), refresh_per_second=4, transient=True
        )

    def say(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    @property
    def _width(self) -> int | None:
        return self._live.console.width

    def _show(self) -> None:
        self._bar.update(self._task, completed=self.status.step, eta=self.status.eta())
        line = self.status.text(self._live.console.width)  # a line that wraps leaves bars behind
        self._live.update(Group(self._bar, Text(line, no_wrap=True, overflow="ellipsis")))
        if not self._live.is_started:
            self._live.start()


def make_reporter(rank: int, total: int, is_verbose: bool = False) -> Reporter:
    """Create the reporter for this rank and this terminal.

    Args:
        total: Number of steps of the run.
    """
    if rank != 0:
        return Reporter()
    moves_cursor = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    return BarReporter(total, is_verbose) if moves_cursor else PlainReporter(total, is_verbose)
