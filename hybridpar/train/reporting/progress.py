"""Progress of a run on stderr: lines that stay, and on a terminal a bar with the latest numbers
below them.

Lines come at the first and the last step, at evaluations, and otherwise after a tenth of the time
that the run has taken so far: every 2 s at first, every minute in the end. An hour has some hundred
lines.
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
"""Share of the time so far that passes from one line to the next, within these bounds in
seconds."""
_LEAST_PAUSE_S = 2.0
_MOST_PAUSE_S = 60.0
_ETA_STEPS = 20
_DROPPED = ("memory", "data", "ms", "mfu", "norm", "lr", "speed", "metrics", "evaluation")
"""Parts of a line that are left out on a narrow terminal, in this order."""


@dataclass
class Status:
    """The latest numbers of a run, as a line of text.

    Args:
        total: Steps of the whole run.
        step: The newest step.
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
        """Time left at the pace of the last steps."""
        if len(self.ends) < 2:
            return "-"
        (first, began), (last, ended) = self.ends[0], self.ends[-1]
        pace = (ended - began) / (last - first)
        return str(timedelta(seconds=round(pace * (self.total - self.step))))

    def text(self, width: int | None = None, *, evaluation: bool = True) -> str:
        """The numbers that fit into `width` columns (None: all); those that matter least are left
        out first.

        evaluation: whether those of the newest evaluation are among them, which may be of an
        earlier step.
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
        """The step and its numbers, as a line of the history.

        Args:
            width: Columns of the terminal, whose bar has the total; None: no terminal.
            evaluation: Whether the step has just been evaluated.
        """
        total = f"/{self.total}" if width is None else ""
        place = f"step {self.step}{total}".ljust(len(f"step {self.total}{total}"))
        return f"{place}  {self.text(width and width - len(place) - 2, evaluation=evaluation)}"


def _numbers_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of a step behind its losses, as parts of a line."""
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
    if row.get("skipped"):
        parts["skipped"] = "SKIPPED (gradients not finite)"
    return parts


def valid_numbers(row: Mapping[str, float]) -> str:
    """Return the numbers of an evaluation as text: val 2.3026  val accuracy 0.51; of sets: val wiki
    2.30 code 1.23.

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
    """The reporter of all ranks but the first: it shows nothing."""

    def say(self, text: str) -> None:
        """Shows a line of its own."""

    def detail(self, text: str) -> None:
        """Shows a line that only `--verbose` asks for."""

    def step(self, row: dict[str, Any], *, is_evaluated: bool = False) -> None:
        """Shows the numbers of a step, as in metrics.jsonl. is_evaluated: `evaluation` follows for
        this step."""

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the numbers of an evaluation named as in metrics.jsonl, beside those of its
        step."""

    def close(self) -> None:
        """Ends what is shown."""


class PlainReporter(Reporter):
    """Shows lines alone, for a file, a pipe, or a terminal that cannot move its cursor.

    Args:
        total: Steps of the whole run.
        is_verbose: Whether details are shown.
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
        if self.status.step != step:  # of a run that resumes: the numbers of its step are not known
            self.status.step = step
            self.status.row = {}
        self._show()
        self._write_line(evaluation=True)

    def _is_due(self) -> bool:
        """Whether it is time for a line."""
        now = time.monotonic()
        if not self._first_line:
            return True
        pause = min(max(_SHARE_OF_TIME * (now - self._first_line), _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return now - self._last_line >= pause

    def _write_line(self, *, evaluation: bool) -> None:
        if self.status.row:  # the evaluation before the first step takes no line from it
            self._last_line = time.monotonic()
            self._first_line = self._first_line or self._last_line
        eta = f"  ETA {self.status.eta()}" if self._width is None and self.status.row else ""
        self.say(self.status.line(self._width, evaluation=evaluation) + eta)

    @property
    def _width(self) -> int | None:
        """Columns that a line may take; None: any number."""
        return None

    def _show(self) -> None:
        """Shows the latest numbers where they do not stay."""


class BarReporter(PlainReporter):
    """Shows a bar and the latest numbers at the bottom of a terminal, and the same lines above
    them.

    The bar comes with the first step or evaluation: until then other processes write lines, too.
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
    """The reporter for this rank and this terminal. total: steps of the run. is_verbose: whether
    details are shown."""
    if rank != 0:
        return Reporter()
    moves_cursor = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    return BarReporter(total, is_verbose) if moves_cursor else PlainReporter(total, is_verbose)
