"""What a person sees while training runs, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_LINE_EVERY_S = 2.0
_ETA_STEPS = 20


@dataclass
class Status:
    """The latest numbers, as a line of text. `total`: steps of the whole run."""

    total: int
    step: int = 0
    loss: float | None = None
    val_loss: float | None = None
    row: dict[str, Any] = field(default_factory=dict)
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS + 1))

    def update(self, row: dict[str, Any]) -> None:
        self.step, self.loss, self.row = row["step"], row["loss"], row
        self.ends.append(time.monotonic())

    def eta(self) -> str:
        """Time left at the pace of the last steps."""
        if len(self.ends) < 2:
            return "-"
        pace = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return str(timedelta(seconds=round(pace * (self.total - self.step))))

    def text(self) -> str:
        row = self.row
        parts = [f"loss {self.loss:.4f}" if self.loss is not None else "starting"]
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.4f}")
        if row:
            norm = row["grad_norm"]
            parts += [f"grad norm {norm:.3f}" if norm is not None else "grad norm -", f"lr {row['lr']:.2e}",
                      f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['step_ms']:,.0f} ms", f"MFU {100 * row['mfu']:.1f} %",
                      f"{row['memory_mb']:,.0f} MiB", f"ETA {self.eta()}"]
            parts += ["SKIPPED (gradients not finite)"] if row.get("skipped") else []
        return "  ".join(parts)


class Reporter(Protocol):
    """Takes what happens in a run; `say` is a line of its own."""

    def say(self, text: str) -> None: ...
    def step(self, row: dict[str, Any]) -> None: ...
    def evaluation(self, step: int, val_loss: float) -> None: ...
    def __enter__(self) -> Reporter: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None: ...


class PlainReporter:
    """A line for the first and the last step, for evaluations, and otherwise every other second."""

    def __init__(self, total: int):
        self.status = Status(total)
        self._last_line = float("-inf")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, row: dict[str, Any]) -> None:
        self.status.update(row)
        if row["step"] == self.status.total or time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"step {row['step']}/{self.status.total}  {self.status.text()}")

    def evaluation(self, step: int, val_loss: float) -> None:
        self.status.val_loss = val_loss
        self.say(f"step {step}/{self.status.total}  validation loss {val_loss:.4f}")

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class BarReporter:
    """A bar that stays at the bottom of a terminal, and lines above it."""

    def __init__(self, total: int):
        self.status = Status(total)
        self._progress = Progress(
            BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"), console=Console(stderr=True),
            refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=total)

    def say(self, text: str) -> None:
        self._progress.console.print(escape(text), highlight=False)

    def step(self, row: dict[str, Any]) -> None:
        self.status.update(row)
        self._show()

    def evaluation(self, step: int, val_loss: float) -> None:
        self.status.val_loss, self.status.step = val_loss, step
        self.say(f"step {step}: validation loss {val_loss:.4f}")
        self._show()

    def _show(self) -> None:
        self._progress.update(self._task, completed=self.status.step, description=escape(self.status.text()))

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()


class SilentReporter:
    """Of all ranks but the first."""

    def say(self, text: str) -> None:
        pass

    def step(self, row: dict[str, Any]) -> None:
        pass

    def evaluation(self, step: int, val_loss: float) -> None:
        pass

    def __enter__(self) -> SilentReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def make_reporter(rank: int, total: int) -> Reporter:
    if rank != 0:
        return SilentReporter()
    return BarReporter(total) if sys.stderr.isatty() else PlainReporter(total)
